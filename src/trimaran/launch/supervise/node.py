"""The interface of a node: the ranks of one machine, as the supervisor sees them."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trimaran.core import Plan
from trimaran.runs import Heartbeat, Lease

if TYPE_CHECKING:
    from trimaran.launch.supervise.channel import Channel


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpec:
    """What a node starts.

    Each rank gets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, TRIMARAN_ATTEMPT, TRIMARAN_REPLICA_START,
    TRIMARAN_STORE and TRIMARAN_TOKEN from here, TRIMARAN_HEARTBEAT_FD, TRIMARAN_MEMORY_FDS and TRIMARAN_FORK_SERVER
    from its node, and `environment` on top.
    """

    attempt: int
    first_rank: int  # of this node
    num_ranks: int  # that it starts
    world_size: int
    store: str
    token: str
    environment: Mapping[str, str] = field(default_factory=dict)
    node: int = 0  # its number
    replica_start: int = 0  # how often an elastic replica was started in this attempt


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
    """A node no longer answers."""

    node: str
    what: str
    ranks: tuple[int, ...] = ()  # that were running on it
    since: float = 0.0  # when the last message came, by the monotonic clock; 0 if unknown


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

    def start_ranks(self, spec: AttemptSpec, ranks: Sequence[int]) -> None:
        """Start only these of the ranks of `spec`, beside those that are running."""

    def kill_ranks(self, ranks: Sequence[int]) -> None:
        """Kill every process of these ranks. They may be started again at once; how they ended is not reported."""

    def poll(self) -> list[NodeEvent]:
        """Return what happened since the last call."""

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank."""

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """Have every live rank, hung or not, write its stacks and collectives into `folder`; see `rank_report`.

        A rank that a signal stopped is continued for this, because it is killed next. `gently` leaves it stopped.
        """

    def request_stop(self) -> None:
        """Ask every rank to stop at a step that all of them agree on."""

    def request_leave(self) -> None:
        """Ask the ranks of this node alone to stop; those of other nodes go on."""

    def kill(self) -> None:
        """Kill every process of the attempt, stopped ones too, and return when they are gone."""


class NodeGroup:
    """The nodes of a run, and the channel where their ranks meet. By default it is one machine that never changes."""

    def __init__(self, channel: "Channel", lease: Lease, token: str) -> None:
        self.channel, self.lease, self.token = channel, lease, token
        self.store = channel.address

    def wait_for_nodes(self) -> list[Node] | None:
        """Return the nodes to start ranks on, once enough are present; None if too few come."""
        raise NotImplementedError

    def environment(self, plan: Plan) -> Mapping[str, str]:
        """Return the variables of the ranks of `plan` on every node, on top of the node's own environment."""
        raise NotImplementedError

    def growth(self, nodes: Sequence[Node]) -> int | None:
        """Return how many ranks are possible, if more nodes are present than `nodes`; None if not."""
        return None

    def leaving(self, nodes: Sequence[Node]) -> list[str]:
        """Return the names of those of `nodes` whose supervisors were asked to stop, except for this one."""
        return []

    def can_go_on(self) -> bool:
        """Return whether the nodes that are present, without those that leave, are enough."""
        return True

    def can_hand_over(self) -> bool:
        """Return whether another node can coordinate, and enough nodes would be left without this one."""
        return False

    def joined(self, nodes: Sequence[Node]) -> list[Node]:
        """Return the nodes that are present and not among `nodes`."""
        return []
