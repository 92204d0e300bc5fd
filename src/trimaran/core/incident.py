"""Incidents: what went wrong in a run, which ranks caused it, and what was done about it."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

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
class Incident:
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
