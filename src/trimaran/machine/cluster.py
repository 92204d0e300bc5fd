"""A cluster: equal nodes of equal devices, or groups of them, and the links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

from trimaran.core import Bytes, Seconds, UserError
from trimaran.machine.device_catalogue import Device

DEFAULT_HOST_BYTES = Bytes(2**40)  # per node: what a server with 8 GPUs usually has
DEFAULT_HOST_BANDWIDTH = 200e9  # bytes a second per node: `bench calibrate` measured 205e9 on the host of an H200

# Seconds per hop by kind of link. Close to NCCL's own model for large messages (hwLat in graph/tuning.cc: 4 us over
# NVLink, 6 us over PCIe, 14 us over the network); gloo's 0.3 ms is measured.
LATENCY_SECONDS = {
    "NVLink": 5e-6,
    "Infinity Fabric": 5e-6,
    "PCIe": 6e-6,
    "sockets": 8e-6,
    "network": 15e-6,
    "loopback": 3e-4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between devices."""

    name: str
    devices: int  # how many neighbours it connects
    bandwidth: float  # bytes a second per device in one direction
    latency: Seconds
    reached: Mapping[str, float] = field(default_factory=dict, hash=False)  # measured bandwidths by collective


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Nodes with one kind of device, in a cluster with several kinds."""

    device: Device
    num_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskRates:
    """Bytes a second that the local disk of a node reads, and that it reads and writes if it does both at a time.

    Assumed, until `bench calibrate --disk` measures them: an NVMe disk on PCIe 4, with 6 GB/s of reads or 4 of writes.
    """

    read: float = 6e9
    both: float = 2.4e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run. Ranks are numbered node by node.

    `links` go from the innermost to the outermost; each connects more devices than the one before. The links inside
    a node are enough, and so are those between nodes; the others follow from the device. `host_bytes` and
    `host_bandwidth` describe a node's host memory, and `disk` its local disk. With `groups` the nodes have different
    kinds of devices, in this order, and `device` is the one with the least memory.
    """

    device: Device
    num_nodes: int = 1
    devices_per_node: int = 1
    links: tuple[Link, ...] = ()
    host_bytes: Bytes = DEFAULT_HOST_BYTES
    host_bandwidth: float = DEFAULT_HOST_BANDWIDTH
    disk: DiskRates = DiskRates()
    groups: tuple[DeviceGroup, ...] = ()

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of devices."""
        return tuple(group.device for group in self.groups) or (self.device,)

    @property
    def group_ranks(self) -> tuple[range, ...]:
        """The ranks of each group; empty if all devices are equal."""
        ends = [*accumulate((group.num_nodes * self.devices_per_node for group in self.groups), initial=0)]
        return tuple(range(*pair) for pair in pairwise(ends)) if self.groups else ()

    def only(self, group: DeviceGroup) -> "Cluster":
        """Return a cluster of as many devices, all of one group's kind, on the network of all groups.

        A step of the whole cluster takes as long as on the slowest of these.
        """
        network = min(each.network_bandwidth for each in self.devices)
        return replace(self, device=replace(group.device, network_bandwidth=network), groups=())

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def levels(self) -> tuple[Link, ...]:
        """The links, or those that follow from the device; the last connects all devices."""
        if not self.links:
            slowest = replace(self.device, link_bandwidth=min(each.link_bandwidth for each in self.devices),
                              network_bandwidth=min(each.network_bandwidth for each in self.devices))  # fmt: skip
            return default_links(slowest if self.groups else self.device, self.num_nodes, self.devices_per_node)
        if self.links[-1].devices == self.world_size:
            if self.num_nodes == 1 or self.links[0].devices <= self.devices_per_node:
                return self.links
            return (*default_links(self.device, 1, self.devices_per_node), *self.links)
        near = tuple(link for link in self.links if link.devices < self.devices_per_node)
        around = self.links[min(len(near), len(self.links) - 1)]
        node = (*near, replace(around, devices=self.devices_per_node))
        return node if self.num_nodes == 1 else (*node, network_link(self.device, self.world_size))

    def __str__(self) -> str:
        groups = self.groups or (DeviceGroup(device=self.device, num_nodes=self.num_nodes),)
        nodes = (f"{group.num_nodes}x" if group.num_nodes > 1 else "" for group in groups)
        pairs = zip(nodes, groups, strict=True)
        return "+".join(f"{num}{self.devices_per_node}x{group.device.name}" for num, group in pairs)


def mixed_cluster(parts: Sequence[Cluster]) -> Cluster:
    """Return the parts as one cluster, in this order; neighbours of one kind become one group.

    Raises UserError unless their nodes have the same number of devices, and all are GPUs.
    """
    sizes = {part.devices_per_node for part in parts}
    if len(sizes) > 1:
        raise UserError("C012.nodes-different-numbers", where="cluster", parts="+".join(map(str, parts)))
    if any(part.device.traits.shares_cores for part in parts):
        raise UserError("C012.cluster-with-several", where="cluster")
    groups: list[DeviceGroup] = []
    for part in parts:
        num_nodes = part.num_nodes
        if groups and groups[-1].device == part.device:
            num_nodes += groups.pop().num_nodes
        groups.append(DeviceGroup(device=part.device, num_nodes=num_nodes))
    least = min((group.device for group in groups), key=lambda device: device.memory_bytes)
    num_nodes = sum(group.num_nodes for group in groups)
    is_mixed = len(groups) > 1
    return Cluster(device=least, num_nodes=num_nodes, devices_per_node=parts[0].devices_per_node,
                   groups=tuple(groups) if is_mixed else ())  # fmt: skip


def refuse_mixed(cluster: Cluster, what: str) -> None:
    """Raise if the cluster has several kinds of devices: `what` is for equal ones."""
    if cluster.groups:
        raise UserError(
            "C012.clusters-equal-devices",
            where="cluster",
            text=what,
            cluster=cluster,
            world_size=cluster.world_size,
            device=cluster.device.name,
        )


def default_links(device: Device, num_nodes: int, devices_per_node: int) -> tuple[Link, ...]:
    """Return the link inside a node, and the network between nodes where there are several."""
    name = "NVLink" if device.link_bandwidth > 100e9 else "PCIe"  # no PCIe is that fast yet
    name = "Infinity Fabric" if device.name.startswith("MI") else "loopback" if device.traits.shares_cores else name
    latency = Seconds(LATENCY_SECONDS[name])
    near = Link(name=name, devices=devices_per_node, bandwidth=device.link_bandwidth, latency=latency)
    return (near,) if num_nodes == 1 else (near, network_link(device, num_nodes * devices_per_node))


def network_link(device: Device, num_devices: int) -> Link:
    """Return the link between nodes."""
    name = "Ethernet" if device.traits.shares_cores or device.network_bandwidth < 5e9 else "InfiniBand"
    latency = Seconds(LATENCY_SECONDS["loopback" if device.traits.shares_cores else "network"])
    return Link(name=name, devices=num_devices, bandwidth=device.network_bandwidth, latency=latency)
