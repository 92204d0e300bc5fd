"""The records of a run: events, step metrics, incidents, findings of the doctor, decisions of the autopilot."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

EventKind = Literal[
    "start",  # data: host, pid, device, world_size, version; fork_server (whether the warm one is used, if asked for)
    "resume",  # data: tier (memory | disk | store), from_step, seconds
    "rows",  # the ranks measured their speeds. data: micro_batches (rows of each data rank), seconds_per_row, rounds
    "ready",  # the network has its weights. data: seconds, phases {join, network, data, optimizer, keep}, copies
    "started",  # the first step is done. data: seconds, phases, compile {compiles, seconds, cache_hits, cache_misses,
    # functions {what: seconds}}, unused [parameters of this rank that got no gradient]
    "compile",  # before the first step has ended, rank 0 compiles a function. data: what, number (of this start); and
    # at its end: seconds
    "recompile",  # something was compiled after the first steps. data: what, why
    "evaluation",
    "checkpoint",  # a checkpoint is complete. data: path, seconds, stall_seconds, bytes, written_bytes
    "upload",  # a checkpoint is in the object store (data: url, seconds, bytes, sent_bytes; skipped checkpoints before
    # it), or is not (failed), or the run waits for it at its end (sent: the fraction so far)
    "loss_bound",  # what a fault costs at most from now on. data: steps, seconds, node_steps, node_seconds (or null)
    "loader",  # the loader changed its settings. data: workers, depth, pinned, reason
    "bad_sample",  # a sample could not be used; its row was kept without a target. data: sample, reason
    "skip",  # an update was not applied. data: reason, loss, grad_norm, ranks, sample_ids, born {module, what, rank},
    # reproduced {on_rank, again, same_device, verdict}: whether the same batch gives it again on another rank
    "differ",  # replicas differ, or memory changed between two updates. data: message, ranks, keys, since, action
    "rewind",  # data: to_step
    "replicas",  # elastic replicas were lost or have joined. data: replicas (that synchronised), joined, rows_again
    # (dealt out again), next_row
    "change",  # the answer to a request to change the plan. data: id, status (applied | refused | failed), patch, by,
    # reason, how (in place | rebuilt | restarted), pause_seconds, pause_parts {part: seconds},
    # error {code, what, fix} or null
    "replay",  # the metrics of all later steps were withdrawn: those steps run again. data: steps, seconds
    "disk",  # metrics cannot be written and are kept in memory (data: failed), or are written again.
    # data: file, failed; lost, first_lost, last_lost (steps) if some were lost
    "connections",  # strangers flood the rank's ports, or few file descriptors are left. data: refused (packets),
    # descriptors, limit
    "profile",  # a profile was written. data: what (trace | memory | nvtx | failed), path, first, last, request
    "sample",  # data: prompt, text; cut_short (why it has fewer tokens); of an answer: expected, right
    "saved",
    "trained",  # the last step is done, and the last checkpoint and the model are saved. data: next [kinds of events]
    "unfinished",  # training is done and saved, but something after it was not done. data: what, why
    "stop",
    "error",
    "done",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A line of a file of the run."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event(Record):
    """One event of one rank; a line of `events/rank-N.jsonl`."""

    kind: EventKind
    rank: int
    time: float  # seconds since the epoch
    step: int = 0
    attempt: int = 0  # counts the starts of the run's ranks from 0
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, measured on rank 0; a line of `metrics.jsonl`."""

    step: int
    loss: float  # the mean over the valid tokens of the global batch
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    step_seconds: float
    mfu: float
    peak_bytes: int
    phases: dict[str, float]  # add up to `step_seconds`
    time: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the line; `details` (router, pipeline, loss scale) become top-level keys.

        The loss is exact. Seconds are rounded to microseconds, other numbers to `DIGITS`, which a float32 survives.
        """
        plain = ("step", "loss", "grad_norm", "lr", "tokens", "samples")
        return (
            {name: getattr(self, name) for name in plain}
            | {
                "grad_norm": round_digits(self.grad_norm),
                "lr": round_digits(self.lr),
                "step_seconds": round(self.step_seconds, SECONDS_DECIMALS),
                "mfu": round_digits(self.mfu, 5),
                "peak_bytes": self.peak_bytes,
                "phases": {name: round(seconds, SECONDS_DECIMALS) for name, seconds in self.phases.items()},
                "time": round(self.time, SECONDS_DECIMALS),
                "tokens_per_second": round_digits(self.tokens_per_second, 8),
            }
            | {name: _rounded_detail(name, value) for name, value in self.details.items()}
        )


Phase = Literal["data", "forward", "backward", "comm", "optimizer", "checkpoint"]  # of a step
PHASES: tuple[str, ...] = get_args(Phase)
DIGITS = 9  # significant decimal digits that identify a float32
DETAIL_DIGITS = {"hfu": 5, "groups": 7}
SECONDS_DECIMALS = 6
# Details that change slowly or are statistics. Lines of a long run have them now and then, see `SlowDetails`.
SLOW_DETAILS = ("memory", "hfu", "ranks", "rows", "bubble", "router", "towers", "lrs")


def round_digits(value: float, digits: int = DIGITS) -> float:
    """Return `value` rounded to significant decimal digits; whole numbers, such as a loss scale, stay exact."""
    return value if value.is_integer() else float(f"{value:.{digits}g}")


def _rounded_detail(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded_detail(name, each) for key, each in value.items()}
    if not isinstance(value, float):
        return value
    if name in ("waits", "host_seconds", "comm_seconds"):
        return round(value, SECONDS_DECIMALS)
    return round_digits(value, DETAIL_DIGITS.get(name, DIGITS))


Cause = Literal[
    "crash",  # a process died of a signal or an exception that is none of the others
    "exit",  # a rank exited early with exit code 0
    "hang",  # a rank hung
    "mismatch",  # ranks called different collectives
    "straggler",  # a rank is slower than the others
    "oom",  # memory ran out, on a device or the host
    "network",  # nodes lost each other
    "storage",  # a disk was full, slow or gone; a checkpoint was damaged
    "data",  # a sample could not be loaded
    "numeric",  # a loss or a gradient was not finite, jumped, or replicas differ
    "preempted",  # the user or the scheduler asked the run to stop
    "host",  # a node or its supervisor is gone
    "user",  # a user's mistake
    "unknown",
]
Action = Literal[
    "continued", "skipped", "rewound", "quarantined", "restarted", "replanned", "resized", "saved", "waited", "stopped",
    "finished",  # training was done and saved before, so that the run is done
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident(Record):
    """One incident; a line of `incidents.jsonl`, where the last line of an `id` counts.

    `time` is seconds since the epoch. `step` is the last finished step. `suspects` are the ranks that caused it,
    `victims` those that only failed because of it. `what` is a sentence without a full stop. `cost` has
    `seconds_to_detect`, `seconds_to_recover` (to the first new step) and `lost_steps` (repeated), as far as known, and
    `max_lost_steps` and `max_lost_seconds`: what the run had stated before that such a fault costs at most.
    """

    id: str
    cause: Cause
    time: float
    what: str
    attempt: int = 0
    step: int = 0
    suspects: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)
    action: Action | None = None
    cost: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Record):
    """One diagnosis: a verdict with its evidence, the patch that fixes it and the expected effect of the patch.

    `culprit` names the cause, such as `rank 3` or `layers.2.mlp`. It contains no measurement: together with the code it
    identifies a finding, so that known findings are not reported again. `patch` maps recipe fields to values, the pairs
    that `--set` takes. If no setting fixes it, `fix` says what the user can do. `gain` is the fraction of step time
    that the patch should save by the cost model; `confidence` is how certain the verdict is. Both are from 0 to 1.
    `step` is the last step of the evidence.
    """

    code: str
    severity: Literal["note", "warning", "fault"]
    verdict: str
    culprit: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    patch: dict[str, Any] = field(default_factory=dict)
    fix: str = ""
    expected_effect: str = ""
    gain: float | None = None
    confidence: float = 1.0
    step: int = 0


DecisionOutcome = Literal["advised", "trying", "kept", "rolled-back", "refused", "failed", "undone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Record):
    """One change of a running run: why, what was expected, what was measured; a line of `decisions.jsonl`.

    `step` is the last step before it. `finding` is the code of the doctor's finding, empty if there was none. `reason`
    is one sentence. `undo` is the patch that takes `patch` back. `expected` has the fraction of a step that the change
    should save (`gain`), how uncertain that is (`uncertainty`) and the resulting `step_seconds`; of a change that saves
    memory also `peak_bytes`. `baseline` is the step before the change: `step_seconds`, its relative `spread` and the
    number of `steps`. `measured` has `step_seconds`, `gain`, `confidence` (that steps are shorter), `steps` and
    `pause_seconds`; None if nothing was measured. `request` is the last request about it, see `change.json`.
    """

    id: int
    time: float
    step: int
    finding: str
    reason: str
    patch: dict[str, Any]
    undo: dict[str, Any]
    expected: dict[str, float] = field(default_factory=dict)
    baseline: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] | None = None
    outcome: DecisionOutcome = "trying"
    by: Literal["autopilot", "user"] = "autopilot"
    request: int = 0

    @property
    def trial_seconds(self) -> float:
        """What the trial cost: pauses, and steps that were longer than before."""
        measured, before = self.measured, self.baseline.get("step_seconds", 0.0)
        if not measured:
            return 0.0
        longer = measured.get("steps", 0.0) * (measured.get("step_seconds", before) - before)
        lost = longer if self.outcome != "kept" and math.isfinite(longer) else 0.0
        return measured.get("pause_seconds", 0.0) + max(0.0, lost)
