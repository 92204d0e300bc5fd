"""Replicated parameters: every rank holds its part of the model whole and gradients are averaged."""

# The composable form keeps parameter names; it sits under an underscore, so it is imported here and nowhere else.
from torch.distributed._composable.replicate import replicate

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.axes.fsdp import divide_as_everywhere, experts_of, replicate_split
from trimaran.parallel.comm.compression import bucket_mb
from trimaran.parallel.mesh import RankMesh


def apply_ddp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Reduce gradients over the ranks in buckets while backward goes on. Parameter names do not change.

    DDP knows neither DTensors nor pipeline stages; where there are any, FSDP2's form of replication takes its place.
    """
    if ranks.data.size() == 1 or plan.comm.local_steps > 1:  # replicas that train alone and meet later
        return
    mesh = ranks.degrees
    if mesh.tp == mesh.pp == mesh.ep == 1:
        replicate(
            network.module,
            process_group=ranks.data.get_group(),
            bucket_cap_mb=bucket_mb(plan, ranks.axes.device_type),
            gradient_as_bucket_view=True,
            # Keeps DDP from laying out its buckets anew after the first backward of every start: the order in which
            # three or more are summed depends on the layout, and a run that was resumed would round differently.
            find_unused_parameters=ranks.data.size() > 2,
        )
        return
    for block in network.blocks:
        for experts in experts_of(block, ranks):
            replicate_split(experts, mesh=ranks.experts["expert_shard"])
            divide_as_everywhere(experts, ranks, scattered=False)
        replicate_split(block, mesh=ranks.data)
    replicate_split(network.module, mesh=ranks.data)
