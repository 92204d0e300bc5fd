"""The interface of a node: the ranks of one machine, as the supervisor sees them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trimaran.runs import Heartbeat


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """What a node starts: `num_ranks` ranks from `first_rank` on, of `world_size`. `node` is the node's number.

    `replica_start` counts the starts of an elastic replica in this attempt. Each rank gets RANK, LOCAL_RANK,
    WORLD_SIZE, LOCAL_WORLD_SIZE, TRIMARAN_ATTEMPT, TRIMARAN_REPLICA_START, TRIMARAN_STORE and TRIMARAN_TOKEN from here,
    TRIMARAN_HEARTBEAT_FD, TRIMARAN_MEMORY_FDS and TRIMARAN_FORK_SERVER from its node, and `environment` on top.
    """

    attempt: int
    first_rank: int
    num_ranks: int
    world_size: int
    store: str
    token: str
    environment: Mapping[str, str] = field(default_factory=dict)
    node: int = 0
    replica_start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnded:
    """A rank's process ended. `code` is its exit code, or minus the number of the signal that killed it."""

    rank: int
    code: int
    time: float  # monotonic


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSilent:
    """A rank made no progress for longer than its section's deadline, or a signal has `stopped` it."""

    rank: int
    heartbeat: Heartbeat
    seconds: float
    deadline: float
    stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """A node no longer answers, or answers again (`back`).

    `ranks` were running on it. `since` is when the last message came, by the monotonic clock; 0 if unknown.
    """

    node: str
    what: str
    back: bool = False
    ranks: tuple[int, ...] = ()
    since: float = 0.0


NodeEvent = RankEnded | RankSilent | NodeLost


def on_all_nodes(nodes: Sequence["Node"], do: Callable[["Node"], None]) -> None:
    """Call `do` for all nodes in parallel, and return when the slowest is done."""
    if len(nodes) == 1:
        do(nodes[0])
        return
    with ThreadPoolExecutor(max_workers=len(nodes)) as pool:
        list(pool.map(do, nodes))


class Node(Protocol):
    """A machine that can hold `num_ranks` ranks. Calls return at once, except `collect_reports` and `kill`."""

    name: str
    num_ranks: int

    def start(self, spec: AttemptSpec) -> None:
        """Start the ranks. Those of an earlier attempt must be gone."""
        ...

    def start_ranks(self, spec: AttemptSpec, ranks: Sequence[int]) -> None:
        """Start only these of the ranks of `spec`, beside those that are running."""
        ...

    def kill_ranks(self, ranks: Sequence[int]) -> None:
        """Kill every process of these ranks. They may be started again at once; how they ended is not reported."""
        ...

    def poll(self) -> list[NodeEvent]:
        """Return what happened since the last call."""
        ...

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank."""
        ...

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """Have every live rank, hung or not, write its stacks and collectives into `folder`; see `rank_report`.

        A rank that a signal stopped is continued for this, because it is killed next. `gently` leaves it stopped.
        """
        ...

    def request_stop(self) -> None:
        """Ask every rank to stop at a step that all of them agree on."""
        ...

    def request_leave(self) -> None:
        """Ask the ranks of this node alone to stop; those of other nodes go on."""
        ...

    def kill(self) -> None:
        """Kill every process of the attempt, stopped ones too, and return when they are gone."""
        ...
