"""Replicated parameters: every rank holds the whole model and gradients are averaged."""

# The composable form keeps parameter names; it sits under an underscore, so it is imported here and nowhere else.
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import DeviceMesh

from trimaran.core import Plan
from trimaran.nets import Network


def apply_ddp(network: Network, plan: Plan, mesh: DeviceMesh) -> None:
    """Reduce gradients over the ranks in buckets while backward goes on. Parameter names do not change."""
    if mesh.size() == 1:
        return
    replicate(
        network.module,
        process_group=mesh["dp_replicate"].get_group(),
        bucket_cap_mb=plan.comm.bucket_mb,
        gradient_as_bucket_view=True,
    )
