"""The node group of a run on this machine only: one node, a channel on loopback and the run's lease."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from trimaran.core import Plan
from trimaran.launch.supervise.channel import Channel
from trimaran.launch.supervise.local_node import LocalNode
from trimaran.launch.supervise.node import Node
from trimaran.runs import RunDirectory
from trimaran.runs.lease import Lease, run_token

EnvironmentOf = Callable[[Plan], Mapping[str, str]]

LOOPBACK = "127.0.0.1"


class LocalNodeGroup:
    """Implements `supervisor.NodeGroup` for one machine. `lease` is that of the run; `with` closes the node."""

    def __init__(self, run: RunDirectory, lease: Lease, node: LocalNode, environment: EnvironmentOf) -> None:
        self._lease, self._node, self._environment = lease, node, environment
        self.token = run_token(run)
        self._channel = Channel(LOOPBACK, self.token)
        self.store = self._channel.address

    def wait_for_nodes(self) -> list[Node] | None:
        return [self._node]

    def growth(self, nodes: Sequence[Node]) -> int | None:
        return None

    def leaving(self, nodes: Sequence[Node]) -> list[str]:
        return []

    def can_go_on(self) -> bool:
        return True

    def can_hand_over(self) -> bool:
        return False

    def environment(self, plan: Plan) -> Mapping[str, str]:
        return {**self._environment(plan), "TRIMARAN_TERM": str(self._lease.term)}

    def joined(self, nodes: Sequence[Node]) -> list[Node]:
        return []

    def exchange_keys(self, attempt: int, prefix: str, written: Mapping[str, bytes | None]) -> dict[str, bytes]:
        return self._channel.exchange_keys(attempt, prefix, written)

    def end_attempt(self, attempt: int) -> None:
        self._channel.end_attempt(attempt)

    def count_refused(self) -> int:
        return self._channel.num_refused

    def holds(self) -> bool:
        return self._lease.holds()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.close()
        self._channel.close()
