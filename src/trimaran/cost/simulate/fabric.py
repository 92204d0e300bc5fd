"""The network between nodes: cards, pods and an oversubscribed spine, and how concurrent groups share them.

Every rank does the same at the same time, so one rank of each pipeline stage stands for all of its kind. What all
ranks of a kind do together is a demand: the fraction of a card or of a pod's uplinks that they use at full speed. A
demand above 1 makes the transfer slower by that factor; transfers of different kinds that overlap share what is left
(`fair_share`).
"""

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from trimaran.core import Mesh
from trimaran.machine import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """How nodes are wired.

    rails: network cards of a node. Card i of every node is on the same switches, and traffic between two devices goes
        through the card of the sender's rail. 0: one for each device.
    pod_nodes: nodes that reach each other at full bandwidth; 0: all of them.
    oversubscription: how much less bandwidth leads out of a pod than its cards have.
    outermost: the axis whose neighbours are furthest apart. Our trainer places pipeline stages outermost, Llama 3 did
        so with data ranks.
    """

    rails: int = 0
    pod_nodes: int = 0
    oversubscription: float = 1.0
    outermost: Literal["pp", "dp"] = "pp"


FULL_BANDWIDTH = Fabric()


class Demands(NamedTuple):
    """What a plan asks of the network at full speed, in capacities: of a card, and of a pod's uplinks per device.

    card: of everything that leaves a node, if devices share cards.
    ring_card, ring_uplink: of gathers and reductions of data ranks; 0 if a node, or a pod, holds all of them.
    send_card, send_uplink: of messages between stages in different nodes, and in different pods.
    ranks_per_pod: pipeline ranks that one pod holds.
    """

    card: float
    ring_card: float
    ring_uplink: float
    send_card: float
    send_uplink: float
    ranks_per_pod: int

    @property
    def ring_slowdown(self) -> float:
        return max(1.0, self.card * self.ring_card, self.ring_uplink)

    def send_slowdown(self, here: int, there: int) -> float:
        """Return the slowdown of messages between two pipeline ranks."""
        return max(
            1.0, self.card * self.send_card, self.send_uplink if self.pod_of(here) != self.pod_of(there) else 0.0
        )

    def pod_of(self, rank: int) -> int:
        """Return the pod of a pipeline rank, among those of one pipeline."""
        return rank // self.ranks_per_pod


def demands_of(fabric: Fabric, cluster: Cluster, mesh: Mesh) -> Demands:
    """Return the demands of a mesh.

    Data ranks form rings with one member every `stride` devices. Of a ring with k members in a pod, one in k hops
    leaves it; the other rings of the pod do the same, so together they use 1/k of what their cards could send. With
    shards and replicas, the rings are those of shards: replicas reduce only a shard.
    """
    node, group = cluster.devices_per_node, mesh.tp * mesh.cp
    pod = min(cluster.world_size, (fabric.pod_nodes or cluster.num_nodes) * node)
    members = mesh.shards if mesh.dp_shard > 1 else mesh.data
    if fabric.outermost == "pp":
        stride, block = mesh.tp, mesh.world_size // mesh.pp  # devices of one pipeline rank
        ranks_per_pod = max(1, pod // block)
        sending = 1 / ranks_per_pod
    else:
        stride, members = group * mesh.pp, max(1, members // mesh.cp)
        ranks_per_pod = max(1, min(mesh.pp, pod // group))
        sending = group / pod
    has_pods = pod < cluster.world_size and fabric.oversubscription > 1
    leaves_pod, crosses_pods = members * stride > pod, mesh.pp > ranks_per_pod
    return Demands(
        card=node / min(node, fabric.rails or node),
        ring_card=float(members * stride > node),
        ring_uplink=fabric.oversubscription / max(1, pod // stride) if has_pods and leaves_pod else 0.0,
        send_card=float(mesh.world_size > node),
        send_uplink=fabric.oversubscription * sending if has_pods and crosses_pods else 0.0,
        ranks_per_pod=ranks_per_pod,
    )


def with_slower_network(cluster: Cluster, slowdown: float) -> Cluster:
    """Return the cluster with a slower outermost link."""
    if slowdown == 1.0 or cluster.num_nodes == 1:
        return cluster
    *inner, outer = cluster.levels
    reached = {name: rate / slowdown for name, rate in outer.reached.items()}
    return replace(cluster, links=(*inner, replace(outer, bandwidth=outer.bandwidth / slowdown, reached=reached)))


def fair_share(flows: list[dict[str, float]]) -> list[float]:
    """Return the speed of each flow, as a fraction of its full speed: max-min fair shares.

    A flow is its demand of each resource at full speed. All speeds grow together; when a resource is used up, the
    flows that use it stop growing.
    """
    speeds, growing = [0.0] * len(flows), set(range(len(flows)))
    left = {name: 1.0 for flow in flows for name in flow}  # of each resource, by flows that stopped growing
    while growing:
        wanted = {name: sum(flows[number].get(name, 0.0) for number in growing) for name in left}
        limits = {name: left[name] / demand for name, demand in wanted.items() if demand}
        speed = min(1.0, *limits.values()) if limits else 1.0
        full = {name for name, limit in limits.items() if limit <= speed * (1 + 1e-9)}
        stopped = {each for each in growing if speed == 1.0 or any(flows[each].get(name) for name in full)}
        for number in stopped:
            speeds[number] = speed
            for name, demand in flows[number].items():
                left[name] -= demand * speed
        growing -= stopped
    return speeds
