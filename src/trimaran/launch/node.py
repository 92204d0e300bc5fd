"""One machine's ranks, as whoever decides for the whole run sees them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trimaran.run import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What a node is to start: `num_ranks` ranks from `first_rank` on, of `world_size`. `node` is its number.

    Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, TRIMARAN_ATTEMPT, TRIMARAN_STORE and TRIMARAN_TOKEN
    from here, TRIMARAN_PULSE and TRIMARAN_BERTHS (file descriptors) from its node, and `environment` on top.
    """

    attempt: int
    first_rank: int
    num_ranks: int
    world_size: int
    store: str
    token: str
    environment: Mapping[str, str] = field(default_factory=dict)
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank's process is gone: `code` is its exit code, minus the signal's number when a signal ended it."""

    rank: int
    code: int
    time: float  # monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class Silent:
    """A rank has shown no progress for longer than its section's deadline, or was `stopped` by a signal."""

    rank: int
    heartbeat: Heartbeat
    seconds: float
    deadline: float
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A node answers no more, or answers again (`back`). `ranks` were at work on it; `since` is when it was heard last,
    by the monotonic clock, 0 where that is not known."""

    node: str
    what: str
    back: bool = False
    ranks: tuple[int, ...] = ()
    since: float = 0.0


News = Ended | Silent | Lost


def on_all(nodes: Sequence["Node"], do: Callable[["Node"], None]) -> None:
    """Have all nodes do what takes its time, at once: the slowest of them is waited for, not the sum."""
    if len(nodes) == 1:
        do(nodes[0])
        return
    with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        list(pool.map(do, nodes))


class Node(Protocol):
    """A machine with room for `num_ranks` ranks. Calls return at once, but for `collect_reports` and `kill`."""

    name: str
    num_ranks: int

    def start(self, orders: Orders) -> None:
        """Start the ranks; those of an earlier attempt must be gone."""
        ...

    def news(self) -> list[News]:
        """Return what happened since the last look."""
        ...

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return what each rank showed last."""
        ...

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """Have stacks and collectives of all ranks filed in `folder`, also of those that stand still; see `blame`.

        A rank that was stopped is made to go on for that: they are to be killed next. `gently` leaves it alone.
        """
        ...

    def ask_to_stop(self) -> None:
        """Let every rank know that the run is to end at a step that they agree on."""
        ...

    def kill(self) -> None:
        """End every process of the attempt now, stopped ones too, and return when they are gone."""
        ...
