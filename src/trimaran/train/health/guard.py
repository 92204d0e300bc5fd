"""Bad steps: a loss or a gradient that is no number, a loss that jumped, or a batch that is not the same on the ranks
that share it. None of them moves the weights."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from trimaran.core import FaultsSection, Mesh
from trimaran.data.quarantine import Quarantine, read_quarantine
from trimaran.optim.loss_scale import LossScale
from trimaran.train.health.bad_sample_limit import BadSampleCount
from trimaran.train.health.replica_check import ReplicaDifference

LARGEST = torch.finfo(torch.float32).max
HISTORY = 20  # good steps before a jump is called one: the first losses move fast
WINDOW = 100  # steps that the recent mean remembers
LEAST_JUMP = 1.0  # a loss near zero may become many times as large and still mean nothing

Samples = Callable[[int, Sequence[int]], tuple[int, ...]]
"""Return the samples that the given data ranks worked on at a step, which counts from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What all ranks know of one step, alike, once it has reached the host.

    `refused`: its update was not applied. `suspects` are the ranks whose own share of the loss was bad. `apart`: ranks
    that share a batch did not have the same one.
    """

    step: int
    loss: float
    grad_norm: float
    refused: bool
    suspects: tuple[int, ...]
    apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A step that was refused: why, whose samples they were (nobody named: anyone's), and what follows from it.

    `good_step` is the last step whose state is beyond doubt. With `spoilt` the weights themselves are wrong now: a step
    that was refused has not moved them, but replicas may have drifted apart.
    """

    step: int
    good_step: int
    reason: str
    loss: float
    grad_norm: float
    ranks: tuple[int, ...]
    sample_ids: tuple[int, ...]
    action: Literal["skip", "rewind", "stop"]
    spoilt: bool = False

    @property
    def not_finite(self) -> bool:
        """Whether the numbers of the step itself were none. Those of replicas that differ are not looked at."""
        return not self.spoilt and not (math.isfinite(self.loss) and math.isfinite(self.grad_norm))

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, for an event."""
        names = ("step", "reason", "loss", "grad_norm", "ranks", "sample_ids", "action")
        return {name: getattr(self, name) for name in names}


class Guard:
    """Decides which updates are applied, and what becomes of the run when some are not.

    The decision is made on the device, with a limit that the host has worked out from the steps that it has seen: so
    neither waits for the other, unless there is a loss scale. Loss and norm are sums over all ranks, so every rank
    decides alike.
    """

    def __init__(
        self,
        faults: FaultsSection | None = None,
        *,
        loss_scale: LossScale | None = None,
        quarantine: Quarantine | None = None,
        tally: BadSampleCount | None = None,
    ) -> None:
        self._faults = faults or FaultsSection()
        self.loss_scale, self.quarantine, self.tally = loss_scale, quarantine or Quarantine(), tally or BadSampleCount()
        self._mean, self._good_steps, self._in_a_row = 0.0, 0, 0
        self._rewound: set[int] = set()  # not part of the state: a rewind must not forget that it has happened

    @property
    def limit(self) -> float:
        """The largest mean loss that the next step may have."""
        if not self._faults.spike or self._good_steps < HISTORY:
            return LARGEST
        return max(self._faults.spike * self._mean, self._mean + LEAST_JUMP)

    def refuses(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1.0 on the device when a step with this loss and gradient norm must not move the weights, else 0.0."""
        good_loss = loss.abs() <= self.limit  # nothing is true of NaN
        # The scale has no part in a bad loss, which was there before it was multiplied, and does not learn from it.
        if self.loss_scale is not None and bool(good_loss):
            self.loss_scale.accepts(norm)
        return (good_loss & (norm <= LARGEST)).logical_not().float()

    def suspects(self, loss: Tensor, num_valid: int) -> Tensor:
        """Return whether this rank's own share, the summed `loss` of `num_valid` tokens, is bad by itself."""
        return (loss.abs() <= min(LARGEST, self.limit * max(1, num_valid))).logical_not()

    def read(self, numbers: Numbers, mesh: Mesh, samples: Samples, *, scaled: bool) -> Refusal | None:
        """Return what there is to say of a step, and remember it. Every rank calls it, for every step.

        With a loss scale (`scaled`), gradients that are not finite are how it finds its size, and no trouble.
        """
        if not numbers.refused:
            self._good_steps += 1
            self._mean += (numbers.loss - self._mean) / min(self._good_steps, WINDOW)
            self._in_a_row = 0
            return None
        if scaled and not math.isfinite(numbers.grad_norm) and math.isfinite(numbers.loss):
            return None
        self._in_a_row += 1
        places = sorted({rank // (mesh.cp * mesh.tp) % mesh.dp for rank in numbers.suspects}) or range(mesh.dp)
        sample_ids = () if numbers.apart else samples(numbers.step - 1, places)
        return Refusal(
            step=numbers.step,
            good_step=numbers.step - 1,
            reason=self._reason(numbers),
            loss=numbers.loss,
            grad_norm=numbers.grad_norm,
            ranks=numbers.suspects,
            sample_ids=sample_ids,
            action=self._action(numbers, sample_ids),
        )

    def part(self, difference: ReplicaDifference) -> Refusal:
        """Return what follows from replicas that are not equal any more: the run goes back, unless it did so in vain.

        There is nothing to skip: no next step would be the one of a sound run.
        """
        in_vain = difference.step in self._rewound
        return Refusal(
            step=difference.step,
            good_step=difference.since,
            reason=difference.as_dict()["message"],
            loss=math.nan,
            grad_norm=math.nan,
            ranks=difference.ranks,
            sample_ids=(),
            action="stop" if in_vain or self._faults.not_finite == "stop" else "rewind",
            spoilt=True,
        )

    def rewind(self, refusal: Refusal, *, write: bool) -> None:
        """Leave the samples of a refused step out from now on. `write`: on disk too, which one rank does."""
        self._rewound.add(refusal.step)
        self.quarantine.add(refusal.sample_ids, refusal.reason, refusal.step, write=write)

    def state(self) -> dict[str, Any]:
        """Return what the next decision depends on, as plain data."""
        counts = {"mean": self._mean, "good_steps": self._good_steps, "in_a_row": self._in_a_row}
        return {**counts, "samples": self.tally.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._mean, self._good_steps = float(state["mean"]), int(state["good_steps"])
        self._in_a_row = int(state["in_a_row"])
        self.tally.restore(state.get("samples", BadSampleCount().state()))  # older checkpoints have counted none

    def _reason(self, numbers: Numbers) -> str:
        if numbers.apart:
            return "a sample could be used by one rank and not by another that works on the same batch"
        if not math.isfinite(numbers.loss):
            return f"the loss is {numbers.loss}"
        if not math.isfinite(numbers.grad_norm):
            return f"the gradient norm is {numbers.grad_norm}"
        return f"the loss jumped from {self._mean:.4g} to {numbers.loss:.4g}"

    def _action(self, numbers: Numbers, sample_ids: Sequence[int]) -> Literal["skip", "rewind", "stop"]:
        wanted = "skip" if numbers.apart else self._faults.not_finite  # it may have been a disk that is well again
        if self._in_a_row > self._faults.max_skips:
            return "stop"
        if wanted == "rewind":
            room = self._faults.max_quarantined - len(self.quarantine.ids | set(sample_ids))
            return "stop" if numbers.step in self._rewound or room < 0 else "rewind"
        return wanted


def agreed_quarantine(path: Path) -> Quarantine:
    """Return the samples that are left out according to the file at `path`. Rank 0 reads it and tells the others."""
    ids = torch.tensor(read_quarantine(path) if dist.get_rank() == 0 else (), dtype=torch.int64)
    size = torch.tensor([len(ids)])
    dist.broadcast(size, src=0)
    ids = ids if dist.get_rank() == 0 else torch.empty(int(size), dtype=torch.int64)
    if len(ids):
        dist.broadcast(ids, src=0)
    return Quarantine(ids.tolist(), path=path)
