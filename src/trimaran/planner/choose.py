"""Which plan: what a person pinned stays, the rest is filled in with the first that fits."""

from collections.abc import Iterator
from typing import Any

from trimaran.core import Mesh, Plan, Recipe, UserError, show_bytes
from trimaran.cost import needed_bytes, predict
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec
from trimaran.planner.legal import check_built, check_mesh, check_plan, check_sequence, divisors

# Past this a micro-batch makes a device no faster, only fuller.
MAX_MICRO_BATCH = {"cuda": 64, "cpu": 16}
MAX_MICRO_BATCH_TOKENS = 32_768


def choose(recipe: Recipe, spec: ModelSpec | None, cluster: Cluster) -> Plan:
    """Return a legal plan with its prediction: the simplest way to split that fits, with the largest micro-batch.

    Ways are tried in this order: replicas, shards inside each node, shards over all nodes. Without a `spec` there is
    nothing to predict, and the first way is taken. The same question always gets the same answer.
    """
    pins = Plan() if recipe.plan == "auto" else recipe.plan
    check_built(pins)
    check_sequence(recipe.data.seq_len, spec)
    too_big: list[Plan] = []
    for plan in candidates(pins, recipe, cluster):
        check_plan(plan, recipe, spec, cluster)
        if spec is None:
            return plan
        prediction = predict(spec, cluster, plan, seq_len=recipe.data.seq_len)
        plan = plan.model_copy(update={"prediction": prediction})
        if prediction.fits:
            return plan
        too_big.append(plan)
    raise _nothing_fits(too_big, cluster)


def candidates(pins: Plan, recipe: Recipe, cluster: Cluster) -> Iterator[Plan]:
    """Yield the plans that keep the pins, in the order in which they are preferred."""
    on_cuda = cluster.device.kind == "cuda"
    fast: dict[str, Any] = {"precision": "bf16" if "bf16" in cluster.device.peak_flops else "fp32", "compile": on_cuda}
    for mesh in meshes(pins, cluster):
        fill = fast | {"mesh": mesh, "sharding": "parameters" if mesh.dp_shard > 1 else "none"}
        kept = pins.model_fields_set - {"mesh"}  # its pins are in the mesh already
        split = pins.model_copy(update={field: value for field, value in fill.items() if field not in kept})
        check_mesh(split, cluster)
        for micro_batch, grad_accum in batches(split, kept, recipe, cluster):
            yield split.model_copy(update={"micro_batch": micro_batch, "grad_accum": grad_accum})


def meshes(pins: Plan, cluster: Cluster) -> list[Mesh]:
    """Return the ways to spread the data over the ranks, simplest first. A pinned degree leaves one way.

    Degrees that cannot make up the world come back as they are, for `check_mesh` to say so.
    """
    world_size, pinned = cluster.world_size, pins.mesh.model_dump(exclude_unset=True)
    wish = pins.sharding if "sharding" in pins.model_fields_set else "any"
    if pinned.keys() & {"dp_replicate", "dp_shard"}:
        ranks, free = pins.mesh.world_size, "dp_replicate" if "dp_shard" in pinned else "dp_shard"
        if free not in pinned and world_size % ranks == 0 and (free == "dp_replicate" or wish != "none"):
            pinned[free] = world_size // ranks
        return [Mesh(**pinned)]
    ways = [(world_size, 1)] if wish != "parameters" else []
    if wish != "none":
        ways += [(cluster.num_nodes, cluster.devices_per_node)] if cluster.devices_per_node > 1 else []
        ways += [(1, world_size)]
    return [Mesh(dp_replicate=replicas, dp_shard=shards) for replicas, shards in dict.fromkeys(ways)]


def batches(split: Plan, pinned: set[str], recipe: Recipe, cluster: Cluster) -> list[tuple[int, int]]:
    """Return the pairs (micro_batch, grad_accum) that make up each rank's share, largest micro-batch first.

    Pins that make up no whole share come back as they are, for `check_batch` to say so.
    """
    global_batch, dp = recipe.train.global_batch, split.mesh.dp
    if {"micro_batch", "grad_accum"} <= pinned:
        return [(split.micro_batch, split.grad_accum)]
    if global_batch % dp:
        raise _uneven(global_batch, dp)
    share = global_batch // dp
    if "micro_batch" in pinned:
        return [(split.micro_batch, max(1, share // split.micro_batch))]
    if "grad_accum" in pinned:
        return [(max(1, share // split.grad_accum), split.grad_accum)]
    most = min(MAX_MICRO_BATCH[cluster.device.kind], MAX_MICRO_BATCH_TOKENS // recipe.data.seq_len)
    return [(size, share // size) for size in reversed(divisors(share, most=max(1, most)))]


def _uneven(global_batch: int, dp: int) -> UserError:
    below, above = global_batch // dp * dp, -(-global_batch // dp) * dp
    works = f"{below} or {above}" if below else str(above)
    fewer = divisors(global_batch, most=dp)[-1]
    return UserError("P006", f"a global batch of {global_batch} does not split evenly over {dp} data ranks",
                     where="train.global_batch", fix=f"set it to {works}, or use {fewer} of the devices")  # fmt: skip


def _nothing_fits(plans: list[Plan], cluster: Cluster) -> UserError:
    device = cluster.device

    def excess(plan: Plan) -> int:
        assert plan.prediction is not None
        return needed_bytes(plan.prediction.reserved_bytes, plan, kind=device.kind) - device.memory_bytes

    leanest = min(plans, key=excess)
    assert leanest.prediction is not None
    term, size = max(leanest.prediction.memory.items(), key=lambda item: item[1])
    fix = "shorten data.seq_len" if term in ("activations", "logits", "heap") else "add devices"
    if term == "gradients" and leanest.grad_accum > 1:  # shards accumulate whole gradients and reduce them once
        fix = f"set train.global_batch to {leanest.mesh.dp * leanest.micro_batch}, which needs no accumulation"
    return UserError("P007", f"no plan fits: the leanest ({leanest}) is {show_bytes(excess(leanest))} too big for the "
                     f"{show_bytes(device.memory_bytes)} of {device.name}, the most for {term} ({show_bytes(size)})",
                     where="cluster", fix=f"{fix}, or choose a smaller model")  # fmt: skip
