"""This machine alone as the fleet of a run: one node, a store on loopback, the lease of the run directory."""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from trimaran.core import Plan
from trimaran.launch.channel import Channel
from trimaran.launch.local_node import LocalNode
from trimaran.launch.node import Node
from trimaran.run import RunDirectory
from trimaran.run.lease import Lease, token_of

EnvironmentOf = Callable[[Plan], Mapping[str, str]]

LOOPBACK = "127.0.0.1"


class LocalNodeGroup:
    """One machine. Made by whoever holds the run's lease; from `with` on ranks can be started."""

    def __init__(self, run: RunDirectory, lease: Lease, node: LocalNode, environment: EnvironmentOf) -> None:
        self._lease, self._node, self._environment = lease, node, environment
        self.token = token_of(run)
        self._channel = Channel(LOOPBACK, self.token)
        self.store = self._channel.address

    def wait_for_nodes(self) -> list[Node] | None:
        return [self._node]

    def growth(self, nodes: Sequence[Node]) -> int | None:
        return None

    def environment(self, plan: Plan) -> Mapping[str, str]:
        return {**self._environment(plan), "TRIMARAN_TERM": str(self._lease.term)}

    def over(self, attempt: int) -> None:
        self._channel.forget(attempt)

    def holds(self) -> bool:
        return self._lease.holds()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._node.close()
        self._channel.close()
