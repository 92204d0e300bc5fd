"""Events and step metrics: the records that a run writes."""

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
        """Return the line; `details` (router, pipeline, loss scale) become top-level keys.

        The loss is exact. Seconds are rounded to microseconds, other numbers to `DIGITS`, which a float32 survives.
        """
        phases = {name: round(seconds, SECONDS_DECIMALS) for name, seconds in self.phases.items()}
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": round_digits(self.grad_norm),
            "lr": round_digits(self.lr),
            "tokens": self.tokens,
            "samples": self.samples,
            "step_seconds": round(self.step_seconds, SECONDS_DECIMALS),
            "mfu": round_digits(self.mfu, 5),
            "peak_bytes": self.peak_bytes,
            "phases": phases,
            "time": round(self.time, SECONDS_DECIMALS),
            "tokens_per_second": round_digits(self.tokens_per_second, 8),
        } | {name: _rounded_detail(name, value) for name, value in self.details.items()}


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
