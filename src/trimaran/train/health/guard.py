"""Refuses bad steps, so that they do not change the weights.

A step is bad when its loss or gradient norm is NaN or Inf, when its loss jumps, or when ranks that share a batch did
not load the same one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import FaultsSection, Mesh, UserError
from trimaran.data import Quarantine, read_quarantine
from trimaran.parallel import LossScale
from trimaran.runs import RunDirectory
from trimaran.train.health.memory_check import ReplicaDifference, ShardCheck

MIN_SAMPLES = 1000  # the fraction of bad samples is taken of at least this many
MAX_FLOAT32 = torch.finfo(torch.float32).max
MIN_GOOD_STEPS = 20  # before a loss can count as a jump: the first losses change fast
MEAN_LOSS_STEPS = 100  # window of the running mean
MEMORY_CHANGED = 2  # in the numbers of a step: added for each rank whose memory has changed, see `Stepper.step`
MIN_LOSS_JUMP = 1.0  # a loss near zero may grow many times over without meaning anything

Samples = Callable[[int, Sequence[int]], tuple[int, ...]]
"""Returns the ids of the samples that the given data-parallel ranks trained on at a step, counted from 0."""


class BadSampleCount:
    """How many samples were seen and how many of them were bad. Counts all ranks' samples, so all ranks agree."""

    def __init__(self, max_bad: float = 0.0) -> None:
        self._max_bad = max_bad
        self.bad = self.seen = 0

    def state(self) -> dict[str, int]:
        """Return the counts for the checkpoint, so that a resumed run continues them."""
        return {"bad": self.bad, "seen": self.seen}

    def restore(self, state: Mapping[str, int]) -> None:
        self.bad, self.seen = int(state["bad"]), int(state["seen"])

    def too_many(self, rows: Mapping[str, float]) -> bool:
        """Add one step's loader counts, `rows`, summed over ranks; return whether too many samples are bad now."""
        self.bad += round(rows.get("bad", 0))
        self.seen += round(rows.get("samples", 0))
        return self.bad > self._max_bad * max(MIN_SAMPLES, self.seen)


def too_many_bad_samples(bad_samples: BadSampleCount, run: RunDirectory, step: int) -> UserError:
    return UserError(
        "T055.samples-could",
        where=f"data (each is a bad_sample event in {run.path / 'events'})",
        bad=bad_samples.bad,
        seen=bad_samples.seen,
        step=step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """The numbers of one step once they are on the host, the same on every rank.

    `refused`: the update was not applied. `suspects`: the ranks whose own part of the loss was bad. `batches_differ`:
    ranks that share a batch did not load the same one. `corrupted`: the ranks whose weights or optimizer states changed
    since the update before, though no update wrote to them. `rank_sums`: sums of `Meters.rank_counts` over all ranks.
    """

    step: int
    loss: float
    grad_norm: float
    refused: bool
    suspects: tuple[int, ...]
    batches_differ: bool = False
    corrupted: tuple[int, ...] = ()
    rank_sums: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedStep:
    """A step that was refused: the reason, the ranks and samples at fault, and what the run does about it.

    Without `ranks`, any rank's samples may be at fault. `good_step` is the last step whose state is known to be good.
    `weights_differ`: the weights or the optimizer states themselves are wrong, because replicas differ or memory has
    changed. A refused update alone does not change them. `memory_changed`: it was the memory of `ranks`.
    """

    step: int
    good_step: int
    reason: str
    loss: float
    grad_norm: float
    ranks: tuple[int, ...]
    sample_ids: tuple[int, ...]
    action: Literal["skip", "rewind", "stop"]
    weights_differ: bool = False
    memory_changed: bool = False

    @property
    def not_finite(self) -> bool:
        """Whether the step's own loss or gradient norm is NaN or Inf. False when replicas differ."""
        return not self.weights_differ and not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def as_dict(self) -> dict[str, Any]:
        names = ("step", "reason", "loss", "grad_norm", "ranks", "sample_ids", "action")
        return {name: getattr(self, name) for name in names}


class Guard:
    """Decides which updates are applied, and whether the run skips, rewinds or stops after a refused one.

    The update is refused on the device, against a limit that the host computed from earlier steps. Neither waits for
    the other, except with a loss scale. Loss and norm are reduced over all ranks, so every rank decides the same.
    """

    def __init__(
        self,
        faults: FaultsSection | None = None,
        *,
        loss_scale: LossScale | None = None,
        quarantine: Quarantine | None = None,
        bad_samples: BadSampleCount | None = None,
    ) -> None:
        self._faults = faults or FaultsSection()
        self.loss_scale, self.quarantine = loss_scale, quarantine or Quarantine()
        self.bad_samples = bad_samples or BadSampleCount()
        self.shard_check: ShardCheck | None = None  # steps before which it finds changed memory are refused
        self._mean, self._good_steps, self._in_a_row = 0.0, 0, 0
        self._rewound: set[int] = set()  # not in the checkpoint state: a rewind must not undo it

    @property
    def limit(self) -> float:
        """The largest mean loss that the next step may have."""
        if not self._faults.spike or self._good_steps < MIN_GOOD_STEPS:
            return MAX_FLOAT32
        return max(self._faults.spike * self._mean, self._mean + MIN_LOSS_JUMP)

    def refuses(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 on the device when a step with this loss and gradient norm must not be applied, else 0.0."""
        good_loss = loss.abs() <= self.limit  # False for NaN
        # A bad loss was bad before it was scaled: it says nothing about the scale, which must not change.
        if self.loss_scale is not None and bool(good_loss):
            self.loss_scale.accepts(norm)
        return (good_loss & (norm <= MAX_FLOAT32)).logical_not().float()

    def suspects(self, loss: Tensor, num_valid: int) -> Tensor:
        """Return whether this rank's own part of the loss is bad: `loss`, summed over its `num_valid` tokens."""
        return (loss.abs() <= min(MAX_FLOAT32, self.limit * max(1, num_valid))).logical_not()

    def read(self, numbers: StepNumbers, mesh: Mesh, samples: Samples, *, scaled: bool) -> RefusedStep | None:
        """Record a step; return what was wrong with it, or None. Every rank calls it for every step.

        With a loss scale (`scaled`), a NaN or Inf gradient norm only makes the scale smaller, and is not reported.
        """
        if not numbers.refused:
            self._good_steps += 1
            self._mean += (numbers.loss - self._mean) / min(self._good_steps, MEAN_LOSS_STEPS)
            self._in_a_row = 0
            return None
        if scaled and not math.isfinite(numbers.grad_norm) and math.isfinite(numbers.loss):
            return None
        step, loss, norm = numbers.step, numbers.loss, numbers.grad_norm
        if numbers.corrupted:
            return RefusedStep(
                step=step,
                good_step=max(0, step - 2),  # the last step may have been copied after memory changed
                reason=f"memory of rank {', '.join(map(str, numbers.corrupted))} changed between two updates",
                loss=loss,
                grad_norm=norm,
                ranks=numbers.corrupted,
                sample_ids=(),
                action=self._rewind_or_stop(step),
                weights_differ=True,
                memory_changed=True,
            )
        self._in_a_row += 1
        data_ranks = sorted({rank // (mesh.cp * mesh.tp) % mesh.dp for rank in numbers.suspects}) or range(mesh.dp)
        ids = () if numbers.batches_differ else samples(step - 1, data_ranks)
        if numbers.batches_differ:
            reason = "ranks that share a batch disagree on which samples are usable"
        elif not math.isfinite(loss):
            reason = f"the loss is {loss}"
        elif not math.isfinite(norm):
            reason = f"the gradient norm is {norm}"
        else:
            reason = f"the loss jumped from {self._mean:.4g} to {loss:.4g}"
        # Batches differ after a read error on one rank, which may be gone at the next step.
        action = "skip" if numbers.batches_differ else self._faults.not_finite
        too_many = len(self.quarantine.ids | set(ids)) > self._faults.max_quarantined
        if self._in_a_row > self._faults.max_skips or (action == "rewind" and (step in self._rewound or too_many)):
            action = "stop"
        return RefusedStep(step=step, good_step=step - 1, reason=reason, loss=loss, grad_norm=norm,
                           ranks=numbers.suspects, sample_ids=ids, action=action)  # fmt: skip

    def on_replica_difference(self, difference: ReplicaDifference) -> RefusedStep:
        """Return what to do when replicas differ: rewind, or stop if a rewind from this step did not help.

        Skipping does not help: the weights are wrong already.
        """
        return RefusedStep(
            step=difference.step,
            good_step=difference.since,
            reason=difference.as_dict()["message"],
            loss=math.nan,
            grad_norm=math.nan,
            ranks=difference.ranks,
            sample_ids=(),
            action=self._rewind_or_stop(difference.step),
            weights_differ=True,
        )

    def _rewind_or_stop(self, step: int) -> Literal["rewind", "stop"]:
        return "stop" if step in self._rewound or self._faults.not_finite == "stop" else "rewind"

    def rewind(self, refusal: RefusedStep, *, write: bool) -> None:
        """Quarantine the samples of a refused step. `write`: also on disk, which one rank does."""
        self._rewound.add(refusal.step)
        self.quarantine.add(refusal.sample_ids, refusal.reason, refusal.step, write=write)

    def state(self) -> dict[str, Any]:
        """Return what the next decision depends on, for the checkpoint."""
        counts = {"mean": self._mean, "good_steps": self._good_steps, "in_a_row": self._in_a_row}
        return {**counts, "samples": self.bad_samples.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        if self.shard_check is not None:
            self.shard_check.forget()
        self._mean, self._good_steps = float(state["mean"]), int(state["good_steps"])
        self._in_a_row = int(state["in_a_row"])
        self.bad_samples.restore(state.get("samples", BadSampleCount().state()))  # older checkpoints have no counts


def broadcast_quarantine(path: Path) -> Quarantine:
    """Return the quarantine in the file at `path`. Rank 0 reads it and broadcasts it."""
    ids = torch.tensor(read_quarantine(path) if dist.get_rank() == 0 else (), dtype=torch.int64)
    size = torch.tensor([len(ids)])
    dist.broadcast(size, src=0)
    ids = ids if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.int64)
    if len(ids):
        dist.broadcast(ids, src=0)
    return Quarantine(ids.tolist(), path=path)
