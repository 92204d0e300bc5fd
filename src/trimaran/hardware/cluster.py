"""What a cluster is: equal nodes of equal devices."""

from dataclasses import dataclass

from trimaran.hardware.catalogue import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines of a run. Bandwidths are those of its `device`; ranks are numbered node by node."""

    device: Device
    num_nodes: int = 1
    devices_per_node: int = 1

    @property
    def world_size(self) -> int:
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes}x" if self.num_nodes > 1 else ""
        return f"{nodes}{self.devices_per_node}x{self.device.name}"
