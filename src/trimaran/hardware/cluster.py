"""A cluster: equal nodes of equal devices, and the links between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trimaran.core import Bytes, Seconds
from trimaran.hardware.device_catalogue import Device

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
    """A link between devices: how many neighbours it connects, and bytes a second per device in one direction.

    `reached` holds measured bus bandwidths by collective (all_reduce, all_gather, all_to_all, send), if there are any.
    """

    name: str
    devices: int
    bandwidth: float
    latency: Seconds
    reached: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run. Ranks are numbered node by node.

    `links` go from the innermost to the outermost; each connects more devices than the one before. The links inside
    a node are enough, and so are those between nodes; the others follow from the device. `host_bytes` and
    `host_bandwidth` describe a node's host memory.
    """

    device: Device
    num_nodes: int = 1
    devices_per_node: int = 1
    links: tuple[Link, ...] = ()
    host_bytes: Bytes = DEFAULT_HOST_BYTES
    host_bandwidth: float = DEFAULT_HOST_BANDWIDTH

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def levels(self) -> tuple[Link, ...]:
        """The links, or those that follow from the device; the last connects all devices."""
        if not self.links:
            return default_links(self.device, self.num_nodes, self.devices_per_node)
        if self.links[-1].devices == self.world_size:
            if self.num_nodes == 1 or self.links[0].devices <= self.devices_per_node:
                return self.links
            return (*default_links(self.device, 1, self.devices_per_node), *self.links)
        near = tuple(link for link in self.links if link.devices < self.devices_per_node)
        around = self.links[min(len(near), len(self.links) - 1)]
        node = (*near, replace(around, devices=self.devices_per_node))
        return node if self.num_nodes == 1 else (*node, network_link(self.device, self.world_size))

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}"


def default_links(device: Device, num_nodes: int, devices_per_node: int) -> tuple[Link, ...]:
    """Return the link inside a node, and the network between nodes where there are several."""
    name = "NVLink" if device.link_bandwidth > 100e9 else "PCIe"  # no PCIe is that fast yet
    name = "Infinity Fabric" if device.name.startswith("MI") else "loopback" if device.kind == "cpu" else name
    latency = Seconds(LATENCY_SECONDS[name])
    near = Link(name=name, devices=devices_per_node, bandwidth=device.link_bandwidth, latency=latency)
    return (near,) if num_nodes == 1 else (near, network_link(device, num_nodes * devices_per_node))


def network_link(device: Device, num_devices: int) -> Link:
    """Return the link between nodes."""
    name = "Ethernet" if device.kind == "cpu" or device.network_bandwidth < 5e9 else "InfiniBand"
    latency = Seconds(LATENCY_SECONDS["loopback" if device.kind == "cpu" else "network"])
    return Link(name=name, devices=num_devices, bandwidth=device.network_bandwidth, latency=latency)
