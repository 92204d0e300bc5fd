"""A plan applied to a network: the order is the list below, and parameter names never change."""

from collections.abc import Callable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.axes.ddp import apply_ddp
from trimaran.parallel.axes.fsdp import apply_fsdp
from trimaran.parallel.memory.compile import apply_compile

Apply = Callable[[Network, Plan, DeviceMesh], None]

SHARDING: dict[str, Apply] = {"none": apply_ddp, "parameters": apply_fsdp}


def apply_plan(network: Network, plan: Plan, mesh: DeviceMesh) -> None:
    """Change the network's module in place so that it runs as the plan says."""
    for apply in (apply_compile, SHARDING[plan.sharding]):
        apply(network, plan, mesh)


def gradient_sync(module: nn.Module) -> Callable[[bool], None]:
    """Return the switch that says whether the coming backward reduces gradients; on one rank it does nothing."""
    return getattr(module, "set_requires_gradient_sync", lambda _: None)
