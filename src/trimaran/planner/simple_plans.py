"""The few plans that a person would try first: for a network that nothing is known about, and to say what is wrong."""

import math
from collections.abc import Iterator
from typing import Any

from trimaran.core import Mesh, Plan, UserError
from trimaran.models import split_outline
from trimaran.planner.axis_rules import fills
from trimaran.planner.degrees import divisors, multiples_around
from trimaran.planner.generic_rules import check_question
from trimaran.planner.legal import check_mesh
from trimaran.planner.loss_choices import losses_of
from trimaran.planner.question import Question
from trimaran.planner.space import MAX_MICRO_BATCH, MAX_MICRO_BATCH_TOKENS, precision_of


def first_way(question: Question) -> Plan:
    """Return the simplest plan that keeps the pins and can run: replicas, then shards. Raises what is wrong with it.

    When the pins rule out every way, the first says why.
    """
    refused: list[UserError] = []
    for plan in simple_ways(question):
        try:
            check_question(plan, question)
        except UserError as error:
            refused.append(error)
            continue
        return plan
    raise refused[0]


def simple_ways(question: Question) -> Iterator[Plan]:
    """Yield plans that keep the pins: replicas, shards inside each node, shards over all; each also computed again."""
    pins = question.pins
    kept = pins.model_fields_set - {"mesh"}  # its pins are in the mesh already
    for recompute in recomputes(pins):
        for mesh in meshes(question):
            for sharding in shardings(pins, mesh):
                fill = {"mesh": mesh, "sharding": sharding, "recompute": recompute}
                fill["loss"] = losses_of(question).on(mesh.tp, mesh.pp)
                fill |= fillings(question, mesh, sharding)
                split = pins.model_copy(update={field: value for field, value in fill.items() if field not in kept})
                check_mesh(split, question.cluster)
                split = with_stages(split, question)
                for micro_batch, grad_accum in batches(split, kept, question):
                    yield split.model_copy(update={"micro_batch": micro_batch, "grad_accum": grad_accum})


def fillings(question: Question, mesh: Mesh, sharding: str) -> dict[str, Any]:
    """Return what makes a device quick: half the bits where it has them, and compiled blocks on a GPU.

    Neither DeepSpeed nor a backward that is cut in two goes with compiled blocks.
    """
    pins, device = question.pins, question.cluster.device
    cut = mesh.pp > 1 and pins.pipeline.schedule == "zero-bubble"
    compiled = device.kind == "cuda" and not cut and pins.engine != "deepspeed"
    return {"precision": precision_of(question, sharding), "compile": compiled}


def recomputes(pins: Plan) -> list[str | int]:
    """Return what to compute again in backward: nothing first. A backward that is cut in two can do nothing else."""
    if "recompute" in pins.model_fields_set:
        return [pins.recompute]
    cut = pins.mesh.pp > 1 and pins.pipeline.schedule == "zero-bubble"
    return ["none"] if cut or pins.engine == "deepspeed" else ["none", "full"]


def shardings(pins: Plan, mesh: Mesh) -> list[str]:
    """Return what to shard on this mesh. Parameters that are offloaded are sharded, if only over one rank.

    DeepSpeed offloads nothing else without shards either.
    """
    if "sharding" in pins.model_fields_set:
        return [pins.sharding]
    if mesh.dp_shard > 1 or pins.offload == "parameters":
        return ["parameters"]
    if pins.engine == "deepspeed" and pins.offload == "optimizer" and mesh.dp == 1:
        return ["optimizer"]
    return ["none", "parameters"] if mesh.cp > 1 and pins.engine == "torch" else ["none"]


def meshes(question: Question) -> list[Mesh]:
    """Return the ways to spread the data over the ranks that the pinned axes leave, simplest first.

    A pinned degree of data parallelism leaves one way. Degrees that cannot make up the world come back as they are,
    for `check_mesh` to say so.
    """
    pins, cluster = question.pins, question.cluster
    pinned = pins.mesh.model_dump(exclude_unset=True)
    wish = pins.sharding if "sharding" in pins.model_fields_set else "any"
    wish = "parameters" if wish == "any" and pins.offload == "parameters" else wish
    whole = pins.comm.compression != "none" or pins.comm.local_steps > 1
    wish = "none" if wish == "any" and whole else wish
    inner = pins.mesh.tp * pins.mesh.pp * pins.mesh.cp
    if pinned.keys() & {"dp_replicate", "dp_shard"}:
        ranks, free = pins.mesh.world_size, "dp_replicate" if "dp_shard" in pinned else "dp_shard"
        if free not in pinned and cluster.world_size % ranks == 0 and (free == "dp_replicate" or wish != "none"):
            pinned[free] = cluster.world_size // ranks
        return [Mesh(**pinned)]
    if cluster.world_size % inner:
        return [Mesh(**pinned)]
    data = cluster.world_size // inner
    # Stages are the outermost axis, so a node's ranks that work on one stage are all but the slices' and the pieces'.
    in_node = math.gcd(data, max(1, cluster.devices_per_node // (pins.mesh.tp * pins.mesh.cp)))
    sharded = [(data // in_node, in_node)] if in_node > 1 else []
    sharded += [(1, data)]
    if pins.engine == "deepspeed":  # it has no replicas of shards, and without shards little
        ways = [(data, 1)] if wish == "none" else [(1, data)]
    else:
        ways = [(data, 1)] * (wish in ("any", "none")) + sharded * (wish != "none")
    return [Mesh(**pinned, dp_replicate=replicas, dp_shard=shards) for replicas, shards in dict.fromkeys(ways)]


def with_stages(split: Plan, question: Question) -> Plan:
    """Return the plan with its pipeline cut by cost, where nobody cut it and there are blocks for all stages."""
    outline = question.outline
    if outline is None or split.mesh.pp == 1 or split.pipeline.stages or split.num_stages > outline.layers:
        return split
    stages = split_outline(outline, split.num_stages, seq_len=question.recipe.data.seq_len)
    return split.model_copy(update={"pipeline": split.pipeline.model_copy(update={"stages": stages})})


def batches(split: Plan, pinned: set[str], question: Question) -> list[tuple[int, int]]:
    """Return the pairs (micro_batch, grad_accum) that make up each rank's share, largest micro-batch first.

    A pipeline prefers those that keep it full: twice as many micro-batches as ranks. Pins that make up no whole share,
    or fill no pipeline, come back as they are, for `check_plan` to say so.
    """
    recipe, kind = question.recipe, question.cluster.device.kind
    global_batch, dp, pp = recipe.train.global_batch, split.mesh.dp, split.mesh.pp
    if {"micro_batch", "grad_accum"} <= pinned:
        return [(split.micro_batch, split.grad_accum)]
    if global_batch % dp:
        raise uneven(question, split)
    share = global_batch // dp
    if "micro_batch" in pinned:
        return [(split.micro_batch, max(1, share // split.micro_batch))]
    if "grad_accum" in pinned:
        return [(max(1, share // split.grad_accum), split.grad_accum)]
    most = min(MAX_MICRO_BATCH[kind], MAX_MICRO_BATCH_TOKENS // question.positions)
    pairs = [(size, share // size) for size in reversed(divisors(share, most=max(1, most)))]
    if pp == 1:
        return pairs
    filling = [(size, count) for size, count in pairs if fills(split, count)]
    return sorted(filling, key=lambda pair: pair[1] < 2 * pp) or [(1, share)]


def uneven(question: Question, split: Plan) -> UserError:
    """Return what to say when the global batch does not make up equal shares."""
    global_batch, dp = question.recipe.train.global_batch, split.mesh.dp
    fewer, works = divisors(global_batch, most=dp)[-1], multiples_around(global_batch, dp)
    whole = dp == question.cluster.world_size
    use = f"use {fewer} of the devices" if whole else f"let dp_replicate x dp_shard be {fewer}"
    return UserError("P006", f"a global batch of {global_batch} does not split evenly over {dp} data ranks",
                     where="train.global_batch", fix=f"set it to {works}, or {use}")  # fmt: skip
