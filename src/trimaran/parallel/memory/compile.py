"""Compiled blocks."""

from torch.distributed.device_mesh import DeviceMesh

from trimaran.core import Plan
from trimaran.nets import Network


def apply_compile(network: Network, plan: Plan, mesh: DeviceMesh) -> None:
    """Compile each block by itself: alike blocks share one compilation, and parameter names do not change."""
    if plan.compile:
        for block in network.blocks:
            block.compile()
