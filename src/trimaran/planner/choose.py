"""Which plan: what a person pinned stays, the rest is filled in with the first that fits."""

import math
from collections.abc import Iterator
from typing import Any

from trimaran.core import Mesh, Plan, Recipe, UserError, show_bytes
from trimaran.cost import STATE_BYTES, needed_bytes, predict
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec, split_by_cost
from trimaran.planner.axes import fills
from trimaran.planner.legal import check_mesh, check_plan, check_sequence
from trimaran.planner.numbers import divisors, multiples_around

# Past this a micro-batch makes a device no faster, only fuller.
MAX_MICRO_BATCH = {"cuda": 64, "cpu": 16}
MAX_MICRO_BATCH_TOKENS = 32_768


def choose(recipe: Recipe, spec: ModelSpec | None, cluster: Cluster) -> Plan:
    """Return a legal plan with its prediction: the simplest way to split that fits, with the largest micro-batch.

    Ways are tried in this order: replicas, shards inside each node, shards over all nodes; then all of them once more
    with every layer computed again. Without a `spec` there is nothing to predict, and the first way is taken. The same
    question always gets the same answer. A way that the pins rule out is passed over; when all are, the first says why.
    """
    pins = Plan() if recipe.plan == "auto" else recipe.plan
    check_sequence(recipe.data.seq_len, spec)
    too_big: list[Plan] = []
    refused: list[UserError] = []
    for plan in candidates(pins, recipe, spec, cluster):
        try:
            check_plan(plan, recipe, spec, cluster)
        except UserError as error:
            refused.append(error)
            continue
        if spec is None:
            return plan
        plan = _predicted(plan, recipe, spec, cluster)
        assert plan.prediction is not None
        if plan.prediction.fits:
            return plan
        too_big.append(plan)
    if not too_big:
        raise refused[0]
    assert spec is not None, "a foreign model takes the first way"
    raise _nothing_fits(too_big, pins, recipe, spec, cluster)


def candidates(pins: Plan, recipe: Recipe, spec: ModelSpec | None, cluster: Cluster) -> Iterator[Plan]:
    """Yield the plans that keep the pins, in the order in which they are preferred."""
    kept = pins.model_fields_set - {"mesh"}  # its pins are in the mesh already
    for recompute in recomputes(pins):
        for mesh in meshes(pins, cluster):
            for sharding in shardings(pins, mesh):
                fill = {"mesh": mesh, "sharding": sharding, "recompute": recompute}
                fill |= fillings(pins, mesh, sharding, cluster)
                split = pins.model_copy(update={field: value for field, value in fill.items() if field not in kept})
                check_mesh(split, cluster)
                split = with_stages(split, spec, recipe.data.seq_len)
                for micro_batch, grad_accum in batches(split, kept, recipe, cluster):
                    yield split.model_copy(update={"micro_batch": micro_batch, "grad_accum": grad_accum})


def fillings(pins: Plan, mesh: Mesh, sharding: str, cluster: Cluster) -> dict[str, Any]:
    """Return what makes a device quick: bf16 where it has it, and compiled blocks on a GPU.

    Neither DeepSpeed nor a backward that is cut in two goes with compiled blocks. DeepSpeed has no bf16 without shards.
    """
    cut = mesh.pp > 1 and pins.pipeline.schedule == "zero-bubble"
    compiled = cluster.device.kind == "cuda" and not cut and pins.engine != "deepspeed"
    unsharded = pins.engine == "deepspeed" and sharding == "none"
    fast = "bf16" in cluster.device.peak_flops and not unsharded
    return {"precision": "bf16" if fast else "fp32", "compile": compiled}


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


def meshes(pins: Plan, cluster: Cluster) -> list[Mesh]:
    """Return the ways to spread the data over the ranks that the pinned axes leave, simplest first.

    A pinned degree of data parallelism leaves one way. Degrees that cannot make up the world come back as they are,
    for `check_mesh` to say so.
    """
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


def with_stages(split: Plan, spec: ModelSpec | None, seq_len: int) -> Plan:
    """Return the plan with its pipeline cut by cost, where nobody cut it and there are layers for all stages."""
    if spec is None or split.mesh.pp == 1 or split.pipeline.stages or split.num_stages > spec.layers:
        return split
    stages = split_by_cost(spec, split.num_stages, seq_len=seq_len)
    return split.model_copy(update={"pipeline": split.pipeline.model_copy(update={"stages": stages})})


def batches(split: Plan, pinned: set[str], recipe: Recipe, cluster: Cluster) -> list[tuple[int, int]]:
    """Return the pairs (micro_batch, grad_accum) that make up each rank's share, largest micro-batch first.

    A pipeline prefers those that keep it full: twice as many micro-batches as ranks. Pins that make up no whole share,
    or fill no pipeline, come back as they are, for `check_plan` to say so.
    """
    global_batch, dp, pp = recipe.train.global_batch, split.mesh.dp, split.mesh.pp
    if {"micro_batch", "grad_accum"} <= pinned:
        return [(split.micro_batch, split.grad_accum)]
    if global_batch % dp:
        raise _uneven(global_batch, split, cluster)
    share = global_batch // dp
    if "micro_batch" in pinned:
        return [(split.micro_batch, max(1, share // split.micro_batch))]
    if "grad_accum" in pinned:
        return [(max(1, share // split.grad_accum), split.grad_accum)]
    most = min(MAX_MICRO_BATCH[cluster.device.kind], MAX_MICRO_BATCH_TOKENS // recipe.data.seq_len)
    pairs = [(size, share // size) for size in reversed(divisors(share, most=max(1, most)))]
    if pp == 1:
        return pairs
    filling = [(size, count) for size, count in pairs if fills(split, count)]
    return sorted(filling, key=lambda pair: pair[1] < 2 * pp) or [(1, share)]


def _predicted(plan: Plan, recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> Plan:
    state_bytes = STATE_BYTES[recipe.train.optimizer.states]
    prediction = predict(spec, cluster, plan, seq_len=recipe.data.seq_len, state_bytes=state_bytes)
    return plan.model_copy(update={"prediction": prediction})


def _uneven(global_batch: int, split: Plan, cluster: Cluster) -> UserError:
    dp = split.mesh.dp
    fewer, works = divisors(global_batch, most=dp)[-1], multiples_around(global_batch, dp)
    use = f"use {fewer} of the devices" if dp == cluster.world_size else f"let dp_replicate x dp_shard be {fewer}"
    return UserError("P006", f"a global batch of {global_batch} does not split evenly over {dp} data ranks",
                     where="train.global_batch", fix=f"set it to {works}, or {use}")  # fmt: skip


def _nothing_fits(plans: list[Plan], pins: Plan, recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> UserError:
    device = cluster.device

    def excess(plan: Plan) -> int:
        assert plan.prediction is not None
        return needed_bytes(plan.prediction.reserved_bytes, plan, kind=device.kind) - device.memory_bytes

    leanest = min(plans, key=excess)
    assert leanest.prediction is not None
    term, size = max(leanest.prediction.memory.items(), key=lambda item: item[1])
    fix = "shorten data.seq_len" if term in ("activations", "logits", "heap") else "add devices"
    if term in ("weights", "gradients", "optimizer") and not pins.model_fields_set & {"offload", "engine"}:
        fix = _offload_that_fits(leanest, recipe, spec, cluster) or fix
    return UserError("P007", f"no plan fits: the leanest ({leanest}) is {show_bytes(excess(leanest))} too big for the "
                     f"{show_bytes(device.memory_bytes)} of {device.name}, the most for {term} ({show_bytes(size)})",
                     where="cluster", fix=f"{fix}, or choose a smaller model")  # fmt: skip


def _offload_that_fits(leanest: Plan, recipe: Recipe, spec: ModelSpec, cluster: Cluster) -> str:
    """Return the fix that keeps states on the host, where that makes the leanest plan fit; else nothing."""
    for offload in ("optimizer", "parameters"):
        plan = _predicted(leanest.model_copy(update={"offload": offload}), recipe, spec, cluster)
        if plan.prediction and plan.prediction.fits and (offload == "optimizer" or plan.sharding == "parameters"):
            return f"set plan.offload to {offload}, add devices"
    return ""
