"""Checks whether a plan can run, before any process starts."""

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.engine_rules import MIN_FP8_FEATURES, RECIPE_MULTIPLES, check_deepspeed, refused_recipe
from trimaran.core.plugins import KINDS
from trimaran.machine import Cluster
from trimaran.models import ModelSpec, Outline, Spec, language_of, module_names, refuse_unmatched
from trimaran.models.adapter_rules import refuse_adapter
from trimaran.models.hf_facts import HfFacts
from trimaran.planner.degrees import divisors, either
from trimaran.planner.rules.async_rules import check_async
from trimaran.planner.rules.axis_rules import check_axes, fills_pipeline
from trimaran.planner.rules.compression_rules import check_compression
from trimaran.planner.rules.hf_rules import check_hf_facts
from trimaran.planner.rules.local_steps_rules import check_local_steps
from trimaran.planner.rules.tower_rules import check_towers
from trimaran.planner.rules.unequal_rules import check_micro_batches

# torch supports these on a CPU, whatever rates the catalogue has. Every GPU in the catalogue has fp16.
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
# Names of the devices whose tensor cores have the scales of a recipe: Hopper, and Blackwell in data centres.
RECIPE_DEVICES = {"block": ("H100", "H200", "H800", "GH200", "H20"), "mx": ("B100", "B200", "B300", "GB200", "GB300")}
ALWAYS_SUPPORTED = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("fp32", "fp16")}  # also if a device does not list them


def check_plan(
    plan: Plan,
    recipe: Recipe,
    spec: Spec | None,
    cluster: Cluster,
    outline: Outline | None = None,
    facts: HfFacts | None = None,
) -> None:
    """Raise UserError for the first thing in `plan` that cannot run.

    `outline` adds checks for models without a spec of ours, `facts` for Hugging Face models.
    """
    check_mesh(plan, cluster)
    check_deepspeed(plan, recipe.train)
    check_async(plan, recipe)
    check_sharding(plan)
    check_comm(plan, recipe.train.steps)
    check_micro_batches(plan)
    check_batch(plan, recipe.train.global_batch)
    check_sequence(recipe.data.seq_len, spec)
    check_precision(plan, spec, cluster)
    if recipe.train.precision and not recipe.model.kind.is_hf and spec is not None:
        refuse_unmatched(recipe.train.precision, module_names(spec))
    check_memory(plan, spec)
    check_compiled(plan, cluster)
    check_loss(plan, spec, outline)
    check_objective(plan, recipe)
    check_towers(plan, recipe, spec)
    refuse_adapter(recipe.model, plan, spec)
    check_axes(plan, recipe, spec)
    check_hf_facts(plan, recipe, facts)


def check_mesh(plan: Plan, cluster: Cluster) -> None:
    """Raise unless the degrees multiply to the number of devices."""
    mesh, world_size = plan.mesh, cluster.world_size
    if mesh.world_size == world_size:
        return
    inner = mesh.tp * mesh.pp * mesh.cp
    if world_size % inner:
        fix = f"set tp x pp x cp to {either(divisors(world_size, most=world_size))}, not {inner}"
    else:
        data = world_size // inner
        works = [f"{data // shard} x {shard}" for shard in divisors(data, most=data)]
        others = f" with tp x pp x cp of {inner}" if inner > 1 else ""
        fix = f"use dp_replicate x dp_shard of {either(works)}{others}, or leave one of them out"
    raise UserError("P001", f"the mesh ({mesh}) has {mesh.world_size} ranks, {cluster} has {world_size}",
                    where="plan.mesh", fix=fix)  # fmt: skip


def check_sharding(plan: Plan) -> None:
    """Raise when mesh and sharding contradict each other.

    Context-parallel ranks hold shards too, so `cp` above 1 is enough. On one rank there is nothing to shard, but FSDP's
    and DeepSpeed's offload of parameters needs sharding even there.
    """
    shards, sharding, reshard = plan.mesh.shards, plan.sharding, plan.comm.reshard
    shards_one_rank = plan.offload == "parameters" or plan.engine_traits.shards_one_rank
    if sharding != "none" and shards == 1 and not shards_one_rank:
        raise UserError("P004", f"sharding {sharding} needs ranks to shard over, but dp_shard and cp are 1",
                        where="plan.sharding", fix="set mesh.dp_shard above 1, or sharding to none")  # fmt: skip
    if sharding == "none" and plan.mesh.dp_shard > 1:
        raise UserError("P004", f"dp_shard is {plan.mesh.dp_shard}, but sharding is none",
                        where="plan.mesh.dp_shard", fix="set sharding to parameters, or use dp_replicate")  # fmt: skip
    if isinstance(reshard, int) and (sharding != "parameters" or shards % reshard):
        works = [each for each in divisors(shards, most=shards) if each > 1] if sharding == "parameters" else []
        fix = f"use {either(works)}, or auto" if works else "use auto, or set sharding to parameters"
        raise UserError("P019", f"weights cannot be resharded over {reshard} ranks with sharding {sharding} "
                        f"over {shards}", where="plan.comm.reshard", fix=fix)  # fmt: skip


def check_comm(plan: Plan, steps: int) -> None:
    """Raise unless the plan allows compressed gradients, or gradients that are not sent in every step."""
    comm, mesh = plan.comm, plan.mesh
    if not comm.overlap and mesh.world_size > 1 and not plan.reduces_after_backward:
        raise UserError("P003", f"comm.overlap false needs full replicas, but this plan splits the model ({plan})",
                        where="plan.comm.overlap", fix="use dp_replicate alone, with sharding none, or leave it "
                        "out")  # fmt: skip
    check_local_steps(plan, steps)
    check_compression(plan)


def check_precision(plan: Plan, spec: Spec | None, cluster: Cluster) -> None:
    """Raise unless the device supports the plan's precision, and the model has layers for fp8."""
    check_device_precision(plan.precision, cluster)
    check_fp8_recipe(plan, cluster)
    if plan.precision != "fp8" or spec is None:
        return
    if (language := language_of(spec)) is None:
        raise UserError("P015", f"fp8 is for the matmuls of a language model, and {spec.name} has none",
                        where="plan.precision", fix="use bf16")  # fmt: skip
    check_fp8(plan, language)


def check_device_precision(precision: str, cluster: Cluster) -> None:
    """Raise unless all devices support the precision."""
    for device in cluster.devices:
        has = {*ALWAYS_SUPPORTED[device.kind], *device.peak_flops}
        if precision not in has:
            works = either([each for each in PRECISIONS if each in has])
            raise UserError("P014", f"{device.name} does not support {precision}", where="plan.precision",
                            fix=f"use {works}, or leave it out")  # fmt: skip


def check_fp8_recipe(plan: Plan, cluster: Cluster) -> None:
    """Raise unless all devices have the matmuls of the plan's fp8 recipe."""
    recipe = plan.fp8.recipe
    if plan.fp8.all_gather:
        check_fp8_gather(plan)
    if recipe == "tensor":
        return
    if plan.precision != "fp8":
        raise UserError("P113", f"fp8.recipe is {recipe}, but precision is {plan.precision}", where="plan.fp8.recipe",
                        fix="set plan.precision to fp8, or leave the recipe out")  # fmt: skip
    for device in cluster.devices:
        if not device.name.startswith(RECIPE_DEVICES[recipe]):
            raise refused_recipe(recipe, device.name)


def check_fp8_gather(plan: Plan) -> None:
    """Raise unless FSDP gathers weights that fp8 layers read."""
    reasons = {
        f"precision is {plan.precision}": plan.precision != "fp8",
        "weights are not sharded": plan.sharding == "none",
        f"engine {plan.engine} gathers them itself": not plan.engine_traits.uses_fsdp,
        "offloaded parameters are gathered from the host": plan.offload == "parameters",
        "recipe mx has other blocks in backward": plan.fp8.recipe == "mx",
        f"comm.reshard {plan.comm.reshard} keeps weights in bf16": isinstance(plan.comm.reshard, int),
    }
    for why, holds in reasons.items():
        if holds:
            raise UserError("P113", f"weights cannot be gathered in fp8: {why}", where="plan.fp8.all_gather",
                            fix="leave it out")  # fmt: skip


def check_fp8(plan: Plan, spec: ModelSpec) -> None:
    """Raise unless a decoder's matmuls are large enough for fp8 and tp leaves multiples of 16."""
    tp, head_dim, experts = plan.mesh.tp, spec.head_dim, spec.block.experts
    multiple = RECIPE_MULTIPLES[plan.fp8.recipe]
    widths = {"queries": spec.heads * head_dim, "keys": spec.kv_heads * head_dim}
    if ffn := experts.shared_ffn if experts else spec.ffn:
        widths["feed-forward"] = ffn
    slices = {"hidden size": spec.hidden} | {name: width // tp for name, width in widths.items()}
    for name, width in slices.items():
        if width % multiple:
            raise UserError("P015", f"fp8 needs multiples of {multiple}, but the {name} of {spec.name} is "
                            f"{width} on each rank", where="plan.precision", fix="use bf16, or a lower tp")  # fmt: skip
    if min(spec.hidden, max(widths.values())) < MIN_FP8_FEATURES:
        raise UserError("P015", f"fp8 needs layers of at least {MIN_FP8_FEATURES} features, and {spec.name} has none",
                        where="plan.precision", fix="use bf16")  # fmt: skip


def check_memory(plan: Plan, spec: Spec | None) -> None:
    """Raise when recompute or offload do not fit the model or the sharding."""
    check_disk(plan)
    if plan.offload == "parameters" and plan.sharding != "parameters":
        raise UserError("P016", f"offload parameters needs sharding parameters, but sharding is {plan.sharding}",
                        where="plan.offload", fix="set sharding to parameters, or offload to optimizer")  # fmt: skip
    if spec is not None and isinstance(plan.recompute, int) and plan.recompute > spec.layers:
        raise UserError("P017", f"recompute {plan.recompute} is more than the {spec.layers} layers of {spec.name}",
                        where="plan.recompute",
                        fix=f"use 1 to {spec.layers}, full, selective, elementwise or none")  # fmt: skip


def check_disk(plan: Plan) -> None:
    """Raise unless what the plan offloads can be in files."""
    if not plan.disk.path:
        return
    exchanges = plan.comm.local.is_on or plan.comm.compression != "none"
    reasons = {
        f"engine {plan.engine} keeps its states elsewhere": plan.engine_traits.keeps_states_elsewhere,
        "the path is relative, and ranks may start in other folders": not plan.disk.path.startswith("/"),
        "local steps and compression use whole weights": exchanges and plan.offload == "parameters",
    }
    for why, holds in reasons.items():
        if holds:
            raise UserError("P109", f"tensors cannot be offloaded to {plan.disk.path}: {why}", where="plan.disk.path",
                            fix="name a full path, and use engine torch, or leave it out")  # fmt: skip


def check_compiled(plan: Plan, cluster: Cluster) -> None:
    """Raise where torch cannot compile what the plan asks for."""
    recomputes = plan.recompute == "full" or isinstance(plan.recompute, int)
    if plan.compile and recomputes and plan.mesh.tp > 1 and not cluster.device.traits.compiles_recomputed_slices:
        raise UserError("P020", f"torch cannot compile blocks with tp and recompute {plan.recompute} for a CPU",
                        where="plan.compile",
                        fix="set compile to false, or recompute to selective, elementwise or none")  # fmt: skip


def check_loss(plan: Plan, spec: Spec | None, outline: Outline | None = None) -> None:
    """Raise where the loss cannot be fused with the head.

    The rank needs all logits, and our trainer must call the head.
    """
    if plan.loss == "logits":
        return
    reasons = {
        "tp splits the vocabulary, so each rank has only a part of the logits": plan.mesh.tp > 1,
        "the last stage of a pipeline must return logits": plan.mesh.pp > 1,
        "DeepSpeed's engine needs logits": plan.engine_traits.needs_logits,
        "a perception model has no vocabulary": spec is not None and spec.language is None,
        "the model's logits are more than one matmul": outline is not None and not outline.main.bare_head,
    }
    for why, holds in reasons.items():
        if holds:
            raise UserError("P056", f"loss {plan.loss} is not possible: {why}", where="plan.loss",
                            fix="set plan.loss to logits, or leave it out")  # fmt: skip


def check_objective(plan: Plan, recipe: Recipe) -> None:
    """Raise for an objective that does not suit the model, or that cannot be fused with the head."""
    objective, is_perception = recipe.objective, recipe.model.kind.reads == "scenes"
    if objective.name not in ("auto", "perception" if is_perception else "language") and is_reserved(objective.name):
        raise UserError("K079", f"the objective {objective.name} is not for the family {recipe.model.family}",
                        where="objective.name", fix="leave it at auto")  # fmt: skip
    if objective.label_smoothing and is_perception:
        raise UserError("K079", "a perception model has no labels to smooth", where="objective.label_smoothing",
                        fix="leave it out: it is of next-token prediction")  # fmt: skip
    if plan.loss != "logits" and not is_reserved(objective.name):
        raise UserError("P056", f"loss {plan.loss} is not possible: the objective {objective.name} of a plug-in needs "
                        "logits", where="plan.loss", fix="set plan.loss to logits, or leave it out")  # fmt: skip


def is_reserved(objective: str) -> bool:
    """Return whether an objective is built in."""
    return objective in KINDS["objective"].reserved


def check_batch(plan: Plan, global_batch: int) -> None:
    """Raise unless data ranks, micro-batch and accumulation multiply to the global batch."""
    if plan.global_batch == global_batch:
        return
    if plan.rows_by_rank:
        raise uneven_rows_error(plan, global_batch)
    dp, at_once = plan.mesh.dp, plan.mesh.dp * plan.micro_batch
    batch_per_rank = global_batch // dp
    works = [size for size in divisors(batch_per_rank, most=64) if fills_pipeline(plan, batch_per_rank // size)]
    fix = f"set train.global_batch to {plan.global_batch}"
    if global_batch % at_once == 0:
        fix += f", or plan.grad_accum to {global_batch // at_once}"
    elif global_batch % dp == 0 and works:
        fix += f", or plan.micro_batch to {either(works)} and leave plan.grad_accum out"
    product = f"{dp} data ranks x micro_batch {plan.micro_batch} x grad_accum {plan.grad_accum}"
    raise UserError("P002", f"global_batch is {global_batch}, but {product} is {plan.global_batch}",
                    where="train.global_batch", fix=fix)  # fmt: skip


def uneven_rows_error(plan: Plan, global_batch: int) -> UserError:
    """Return the error for rows of the data ranks that do not make up the global batch."""
    at_once = plan.rows_at_once
    fix = f"set train.global_batch to {plan.global_batch}"
    if global_batch % at_once == 0:
        fix += f", or plan.grad_accum to {global_batch // at_once}"
    rows = f"micro_batches of {at_once} rows together x grad_accum {plan.grad_accum}"
    return UserError("P002", f"global_batch is {global_batch}, but {rows} is {plan.global_batch}",
                     where="train.global_batch", fix=fix)  # fmt: skip


def check_sequence(seq_len: int, spec: Spec | None) -> None:
    """Raise when sequences are longer than the model has positions for."""
    spec = language_of(spec)
    if spec is not None and seq_len > spec.max_seq_len:
        raise UserError("P005", f"seq_len is {seq_len:,}, but {spec.name} supports at most {spec.max_seq_len:,}",
                        where="data.seq_len", fix=f"set data.seq_len to {spec.max_seq_len} or less, "
                        f"or model.shape.max_seq_len to {seq_len}")  # fmt: skip
