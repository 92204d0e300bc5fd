"""Which plans can run: everything that would fail later, said before a process starts."""

from operator import attrgetter
from typing import Any

from trimaran.core import Plan, Recipe, UserError
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec

# What version 0.1 can run, by field. A feature that arrives takes its row away.
BUILT: dict[str, tuple[Any, ...]] = {
    "mesh.tp": (1,),
    "mesh.pp": (1,),
    "mesh.cp": (1,),
    "mesh.ep": (1,),
    "sharding": ("none", "parameters"),
    "pipeline.stages": ((),),
    "precision": ("fp32", "bf16"),
    "recompute": ("none",),
    "offload": ("none",),
    "comm.compression": ("none",),
    "comm.local_steps": (1,),
    "engine": ("torch",),
}


def check_plan(plan: Plan, recipe: Recipe, spec: ModelSpec | None, cluster: Cluster) -> None:
    """Raise UserError for the first thing in `plan` that cannot run; return nothing when it can."""
    check_built(plan)
    check_mesh(plan, cluster)
    check_sharding(plan)
    check_batch(plan, recipe.train.global_batch)
    check_sequence(recipe.data.seq_len, spec)


def check_built(plan: Plan) -> None:
    """Raise unless this version can run every feature that the plan asks for."""
    for field, built in BUILT.items():
        if (value := attrgetter(field)(plan)) not in built:
            works = " or ".join(str(each) for each in built)
            raise UserError("P003", f"{field} {value} is not built yet in version 0.1", where=f"plan.{field}",
                            fix=f"set plan.{field} to {works}, or leave it out")  # fmt: skip


def check_mesh(plan: Plan, cluster: Cluster) -> None:
    """Raise unless the degrees multiply to the number of devices."""
    world_size = cluster.world_size
    if plan.mesh.world_size != world_size:
        works = [f"{world_size // shard} x {shard}" for shard in divisors(world_size, most=world_size)]
        raise UserError("P001", f"the mesh ({plan.mesh}) has {plan.mesh.world_size} ranks, {cluster} has {world_size}",
                        where="plan.mesh", fix=f"use dp_replicate x dp_shard of {' or '.join(_few(works))}, "
                        "or leave one of them out")  # fmt: skip


def check_sharding(plan: Plan) -> None:
    """Raise when the mesh and the sharding contradict each other."""
    shards = plan.mesh.dp_shard
    if plan.sharding == "parameters" and shards == 1:
        raise UserError("P004", "sharding parameters needs ranks to shard them over, and dp_shard is 1",
                        where="plan.sharding", fix="set mesh.dp_shard above 1, or sharding to none")  # fmt: skip
    if plan.sharding == "none" and shards > 1:
        raise UserError("P004", f"dp_shard is {shards}, and sharding none leaves nothing to shard",
                        where="plan.mesh.dp_shard", fix="set sharding to parameters, or use dp_replicate")  # fmt: skip


def check_batch(plan: Plan, global_batch: int) -> None:
    """Raise unless ranks, micro-batches and accumulation make up the global batch."""
    if plan.global_batch == global_batch:
        return
    dp, in_flight = plan.mesh.dp, plan.mesh.dp * plan.micro_batch
    fix = f"set train.global_batch to {plan.global_batch}"
    if global_batch % in_flight == 0:
        fix += f", or plan.grad_accum to {global_batch // in_flight}"
    elif global_batch % dp == 0:
        works = _few([str(each) for each in divisors(global_batch // dp, most=64)])
        fix += f", or plan.micro_batch to {' or '.join(works)} and leave plan.grad_accum out"
    product = f"{dp} data ranks x micro_batch {plan.micro_batch} x grad_accum {plan.grad_accum}"
    raise UserError("P002", f"global_batch is {global_batch}, but {product} is {plan.global_batch}",
                    where="train.global_batch", fix=fix)  # fmt: skip


def check_sequence(seq_len: int, spec: ModelSpec | None) -> None:
    """Raise when the sequences are longer than the model has positions for."""
    if spec is not None and seq_len > spec.max_seq_len:
        raise UserError("P005", f"seq_len is {seq_len:,}, and {spec.name} is made for at most {spec.max_seq_len:,}",
                        where="data.seq_len", fix=f"set data.seq_len to {spec.max_seq_len} or less, "
                        f"or model.shape.max_seq_len to {seq_len}")  # fmt: skip


def divisors(num: int, *, most: int) -> list[int]:
    """Return the divisors of `num` up to `most`, smallest first."""
    return [each for each in range(1, min(num, most) + 1) if num % each == 0]


def _few(words: list[str]) -> list[str]:
    return words if len(words) <= 5 else [*words[:4], words[-1]]
