"""The simplest plans: for a model that cannot be predicted, and to find out what is wrong with the pins."""

import math
from collections.abc import Iterator

from trimaran.core import Mesh, Plan, UserError, templated
from trimaran.models import split_outline
from trimaran.planner.plan_choices import losses_of
from trimaran.planner.question import Question
from trimaran.planner.rules.axis_rules import divisors, fills_pipeline, multiples_around
from trimaran.planner.rules.legal import check_mesh, check_question
from trimaran.planner.search.space import MAX_MICRO_BATCH_TOKENS, precision_of

MAX_MICRO_BATCH = {"cuda": 64, "cpu": 16}  # of a model whose memory is not known


def first_legal_plan(question: Question) -> Plan:
    """Return the simplest plan that keeps the pins and can run; raise the error of the first one if none can."""
    refused: list[UserError] = []
    for plan in simple_plans(question):
        try:
            check_question(plan, question)
        except UserError as error:
            refused.append(error)
            continue
        return plan
    raise refused[0]


def simple_plans(question: Question) -> Iterator[Plan]:
    """Yield plans that keep the pins: replicas, shards in each node, shards over all; then with full recompute."""
    pins = question.pins
    pinned = pins.model_fields_set - {"mesh"}  # the meshes already keep its pins
    outline, traits = question.outline, question.cluster.device.traits
    # A split backward supports neither compiled blocks nor recompute, and DeepSpeed no compiled blocks.
    splits_backward = pins.mesh.pp > 1 and pins.pipeline.schedule == "zero-bubble"
    recomputes = ["none"] if splits_backward or pins.engine == "deepspeed" else ["none", "full"]
    compiles = traits.compiles_by_default and not splits_backward and pins.engine_traits.compiles
    for recompute in [pins.recompute] if "recompute" in pinned else recomputes:
        for mesh in meshes(question):
            for sharding in shardings(pins, mesh):
                fill = {"mesh": mesh, "sharding": sharding, "recompute": recompute}
                fill["loss"] = losses_of(question).on(mesh.tp, mesh.pp)
                fill["precision"] = precision_of(question, sharding)
                fill["compile"] = compiles
                split = pins.model_copy(update={field: value for field, value in fill.items() if field not in pinned})
                check_mesh(split, question.cluster)
                if outline and mesh.pp > 1 and not split.pipeline.stages and split.num_stages <= outline.layers:
                    stages = split_outline(outline, split.num_stages, seq_len=question.recipe.data.seq_len)
                    pipeline = split.pipeline.model_copy(update={"stages": stages})
                    split = split.model_copy(update={"pipeline": pipeline})
                for micro_batch, grad_accum in batches(split, pinned, question):
                    yield split.model_copy(update={"micro_batch": micro_batch, "grad_accum": grad_accum})


def shardings(pins: Plan, mesh: Mesh) -> list[str]:
    """Return what to shard on this mesh. Offload needs shards, if only over one rank."""
    if "sharding" in pins.model_fields_set:
        return [pins.sharding]
    if mesh.dp_shard > 1 or pins.offload == "parameters":
        return ["parameters"]
    if pins.engine_traits.shards_one_rank and pins.offload == "optimizer" and mesh.dp == 1:
        return ["optimizer"]
    return ["none", "parameters"] if mesh.cp > 1 and pins.engine_traits.splits_models else ["none"]


def meshes(question: Question) -> list[Mesh]:
    """Return the data-parallel layouts of the ranks that the pinned axes leave, simplest first.

    A pinned data-parallel degree leaves one layout. Degrees that do not match the world size are returned as they are,
    so that `check_mesh` raises the error.
    """
    pins, cluster = question.pins, question.cluster
    pinned = pins.mesh.model_dump(exclude_unset=True)
    sharding_pin = pins.sharding if "sharding" in pins.model_fields_set else "any"
    sharding_pin = "parameters" if sharding_pin == "any" and pins.offload == "parameters" else sharding_pin
    needs_replicas = pins.comm.compression != "none" or pins.comm.local.is_on or not pins.comm.overlap
    needs_replicas |= not pins.engine_traits.is_synchronous
    sharding_pin = "none" if sharding_pin == "any" and needs_replicas else sharding_pin
    inner = pins.mesh.tp * pins.mesh.pp * pins.mesh.cp
    if pinned.keys() & {"dp_replicate", "dp_shard"}:
        ranks, free = pins.mesh.world_size, "dp_replicate" if "dp_shard" in pinned else "dp_shard"
        may_fill = free not in pinned and (free == "dp_replicate" or sharding_pin != "none")
        if may_fill and cluster.world_size % ranks == 0:
            pinned[free] = cluster.world_size // ranks
        return [Mesh(**pinned)]
    if cluster.world_size % inner:
        return [Mesh(**pinned)]
    data = cluster.world_size // inner
    # Stages are the outermost axis, so a node's ranks of one stage differ only in tp, cp and data.
    in_node = math.gcd(data, max(1, cluster.devices_per_node // (pins.mesh.tp * pins.mesh.cp)))
    sharded = [(data // in_node, in_node)] if in_node > 1 else []
    sharded += [(1, data)]
    if pins.engine_traits.has_replicas_of_shards:
        layouts = [(data, 1)] * (sharding_pin in ("any", "none")) + sharded * (sharding_pin != "none")
    else:
        layouts = [(data, 1)] if sharding_pin == "none" else [(1, data)]
    return [Mesh(**pinned, dp_replicate=replicas, dp_shard=shards) for replicas, shards in dict.fromkeys(layouts)]


def batches(split: Plan, pinned: set[str], question: Question) -> list[tuple[int, int]]:
    """Return the pairs (micro_batch, grad_accum) that make up each rank's batch, largest micro-batch first.

    A pipeline prefers those that keep it full: twice as many micro-batches as ranks. Pins that do not add up are
    returned as they are, so that `check_plan` raises the error.
    """
    recipe, kind = question.recipe, question.cluster.device.kind
    global_batch, dp, pp = recipe.train.global_batch, split.mesh.dp, split.mesh.pp
    if {"micro_batch", "grad_accum"} <= pinned:
        return [(split.micro_batch, split.grad_accum)]
    if split.rows_by_rank:
        return [(split.micro_batch, split.grad_accum if "grad_accum" in pinned else
                 max(1, global_batch // split.rows_at_once))]  # fmt: skip
    if global_batch % dp:
        fewer, works = divisors(global_batch, most=dp)[-1], multiples_around(global_batch, dp)
        needs_replicas = dp == question.cluster.world_size
        use = (
            templated("use {fewer} of the devices", fewer=fewer)
            if needs_replicas
            else templated("let dp_replicate x dp_shard be {fewer}", fewer=fewer)
        )
        raise UserError(
            "P006.global-batch", where="train.global_batch", global_batch=global_batch, dp=dp, works=works, use=use
        )
    batch_per_rank = global_batch // dp
    if "micro_batch" in pinned:
        return [(split.micro_batch, max(1, batch_per_rank // split.micro_batch))]
    if "grad_accum" in pinned:
        return [(max(1, batch_per_rank // split.grad_accum), split.grad_accum)]
    most = min(MAX_MICRO_BATCH[kind], MAX_MICRO_BATCH_TOKENS // question.positions)
    pairs = [(size, batch_per_rank // size) for size in reversed(divisors(batch_per_rank, most=max(1, most)))]
    if pp == 1:
        return pairs
    filling = [(size, count) for size, count in pairs if fills_pipeline(split, count)]
    return sorted(filling, key=lambda pair: pair[1] < 2 * pp) or [(1, batch_per_rank)]
