"""Events and step metrics: the records that a run writes."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

EventKind = Literal[
    "start",
    "resume",  # data: tier (memory | disk), from_step, seconds
    "ready",  # the network has its weights. data: seconds, phases {join, network, data, optimizer, keep}, copies
    "started",  # the first step is done. data: seconds, phases, compile {compiles, seconds, cache_hits, cache_misses},
    # unused [parameters of this rank that got no gradient]
    "recompile",  # something was compiled after the first steps. data: what, why
    "evaluation",
    "checkpoint",  # a checkpoint is complete. data: path, seconds, stall_seconds, bytes, written_bytes
    "loader",  # the loader changed its settings. data: workers, depth, pinned, reason
    "bad_sample",  # a sample could not be used; its row was kept without a target. data: sample, reason
    "skip",  # an update was not applied. data: reason, loss, grad_norm, ranks, sample_ids, born {module, what, rank}
    "differ",  # replicas differ. data: message, ranks, keys, since, action
    "rewind",  # data: to_step
    "replay",  # the metrics of all later steps were withdrawn: those steps run again. data: steps, seconds
    "profile",  # a profile was written. data: what (trace | memory | failed), path, first, last, request
    "sample",
    "saved",
    "stop",
    "error",
    "done",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of one rank; a line of `events/rank-N.jsonl`. `time` is seconds since the epoch.

    `attempt` counts the starts of the run's ranks from 0.
    """

    kind: EventKind
    rank: int
    time: float
    step: int = 0
    attempt: int = 0
    data: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One optimizer step, measured on rank 0; a line of `metrics.jsonl`.

    `loss` is the mean over the valid tokens of the global batch. `phases` add up to `step_seconds`.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    step_seconds: float
    mfu: float
    peak_bytes: int
    phases: dict[str, float]
    time: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the line; `details` (router, pipeline, loss scale) become top-level keys."""
        line = asdict(self)
        details = line.pop("details")
        return line | {"tokens_per_second": self.tokens_per_second} | details


PHASES = ("data", "forward", "backward", "comm", "optimizer", "checkpoint")
