"""Checks whether a plan can run, before any process starts."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from trimaran.core import Plan, Recipe, UserError, did_you_mean, joined, templated
from trimaran.core.engine_rules import MIN_FP8_FEATURES, RECIPE_MULTIPLES, check_deepspeed, refused_recipe
from trimaran.core.plugins import KINDS
from trimaran.machine import Cluster
from trimaran.models import ModelSpec, Opaque, Outline, OutlineLayer, Spec, language_of, module_names, refuse_unmatched
from trimaran.models.adapter_rules import refuse_adapter
from trimaran.models.hf_facts import HfFacts
from trimaran.planner.question import Question
from trimaran.planner.rules.axis_rules import (
    check_axes,
    check_hf_facts,
    check_pipeline,
    check_towers,
    degrees,
    divisors,
    either,
    fills_pipeline,
    takes_stages,
    tower_degree,
)
from trimaran.planner.rules.replica_rules import check_async, check_compression, check_local_steps, check_micro_batches

# torch supports these on a CPU, whatever rates the catalogue has. Every GPU in the catalogue has fp16.
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
# Names of the devices whose tensor cores have the scales of a recipe: Hopper, and Blackwell in data centres.
RECIPE_DEVICES = {"block": ("H100", "H200", "H800", "GH200", "H20"), "mx": ("B100", "B200", "B300", "GB200", "GB300")}
ALWAYS_SUPPORTED = {"cpu": ("fp32", "bf16", "fp16"), "cuda": ("fp32", "fp16")}  # also if a device does not list them


class PlanRule(NamedTuple):
    """A rule of plans: the codes of its errors, for which questions it applies, and the check that raises them."""

    codes: str
    applies: Callable[[Question], bool]
    check: Callable[[Plan, Question], None]


def _always(question: Question) -> bool:
    return True


def _in_trainer(question: Question) -> bool:
    return question.for_trainer


def _elsewhere(question: Question) -> bool:
    """Return whether any training system is asked for, and the model is known: its degrees must divide something."""
    return not question.for_trainer and question.outline is not None


# In the order in which mistakes are reported. Other stacks ignore the plan's loss.
RULES = (
    PlanRule("P001", _always, lambda plan, asked: check_mesh(plan, asked.cluster)),
    PlanRule("P039", _always, lambda plan, asked: check_deepspeed(plan, asked.recipe.train)),
    PlanRule("P095", _always, lambda plan, asked: check_async(plan, asked.recipe)),
    PlanRule("P004 P019", _always, lambda plan, asked: check_sharding(plan)),
    PlanRule("P003", _always, lambda plan, asked: check_comm(plan, asked.recipe.train.steps)),
    PlanRule("P024", _always, lambda plan, asked: check_micro_batches(plan)),
    PlanRule("P002", _always, lambda plan, asked: check_batch(plan, asked.recipe.train.global_batch)),
    PlanRule("P005", _in_trainer, lambda plan, asked: check_sequence(asked.recipe.data.seq_len, asked.spec)),
    PlanRule("P014 P015 P113", _always, lambda plan, asked: check_precision(plan, asked.spec, asked.cluster)),
    PlanRule("P033", _in_trainer, lambda plan, asked: check_module_precision(asked.recipe, asked.spec)),
    PlanRule("P016 P017 P109", _always, lambda plan, asked: check_memory(plan, asked.spec)),
    PlanRule("P020", _always, lambda plan, asked: check_compiled(plan, asked.cluster)),
    PlanRule(
        "P056",
        lambda asked: asked.for_trainer or asked.stack.name == "trimaran",
        lambda plan, asked: check_loss(plan, asked.spec, asked.outline),
    ),
    PlanRule("P056 K079", _in_trainer, lambda plan, asked: check_objective(plan, asked.recipe)),
    PlanRule("P023 P053 P054", _in_trainer, lambda plan, asked: check_towers(plan, asked.recipe, asked.spec)),
    PlanRule("P064 P065 P066", _in_trainer, lambda plan, asked: refuse_adapter(asked.recipe.model, plan, asked.spec)),
    PlanRule("P008 to P013", _in_trainer, lambda plan, asked: check_axes(plan, asked.recipe, asked.spec)),
    PlanRule("M027 P010", _in_trainer, lambda plan, asked: check_hf_facts(plan, asked.recipe, asked.facts)),
    PlanRule("P012", lambda asked: not asked.for_trainer, lambda plan, asked: check_pipeline(plan, asked.recipe)),
    PlanRule("P005", _elsewhere, lambda plan, asked: check_outline_sequence(asked)),
    PlanRule("P008 P009 P010 P021", _elsewhere, lambda plan, asked: check_divisors(plan, asked)),
    PlanRule("P011", _elsewhere, lambda plan, asked: check_depth(plan, asked)),
)


def check_plan(
    plan: Plan,
    recipe: Recipe,
    spec: Spec | None,
    cluster: Cluster,
    outline: Outline | None = None,
    facts: HfFacts | None = None,
) -> None:
    """Raise for the first thing that our trainer cannot run. `outline` and `facts` are of models without a spec."""
    _check_rules(plan, Question(recipe=recipe, spec=spec, cluster=cluster, outline=outline, facts=facts))


def check_question(plan: Plan, question: Question) -> None:
    """Raise UserError for the first thing in `plan` that the question does not allow."""
    if question.outline is not None:
        check_tower_names(plan, question)
    _check_rules(plan, question)


def is_legal(plan: Plan, question: Question) -> bool:
    """Return whether the question allows the plan."""
    try:
        check_question(plan, question)
    except UserError:
        return False
    return True


def _check_rules(plan: Plan, question: Question) -> None:
    for rule in RULES:
        if rule.applies(question):
            rule.check(plan, question)


def check_mesh(plan: Plan, cluster: Cluster) -> None:
    """Raise unless the degrees multiply to the number of devices."""
    mesh, world_size = plan.mesh, cluster.world_size
    if mesh.world_size == world_size:
        return
    inner = mesh.tp * mesh.pp * mesh.cp
    if world_size % inner:
        fix = templated(
            "set tp x pp x cp to {world_size}, not {inner}",
            world_size=either(divisors(world_size, most=world_size)),
            inner=inner,
        )
    else:
        data = world_size // inner
        works = [f"{data // shard} x {shard}" for shard in divisors(data, most=data)]
        others = templated(" with tp x pp x cp of {inner}", inner=inner) if inner > 1 else ""
        fix = templated(
            "use dp_replicate x dp_shard of {works}{others}, or leave one of them out",
            works=either(works),
            others=others,
        )
    raise UserError(
        "P001.mesh-ranks",
        where="plan.mesh",
        fix=fix,
        mesh=mesh,
        num_ranks=mesh.world_size,
        cluster=cluster,
        num_devices=world_size,
    )


def check_sharding(plan: Plan) -> None:
    """Raise when mesh and sharding contradict each other.

    Context-parallel ranks hold shards too, so `cp` above 1 is enough. On one rank there is nothing to shard, but FSDP's
    and DeepSpeed's offload of parameters needs sharding even there.
    """
    shards, sharding, reshard = plan.mesh.shards, plan.sharding, plan.comm.reshard
    shards_one_rank = plan.offload == "parameters" or plan.engine_traits.shards_one_rank
    if sharding != "none" and shards == 1 and not shards_one_rank:
        raise UserError("P004.sharding-needs-ranks", where="plan.sharding", sharding=sharding)
    if sharding == "none" and plan.mesh.dp_shard > 1:
        raise UserError("P004.dp-shard", where="plan.mesh.dp_shard", dp_shard=plan.mesh.dp_shard)
    if isinstance(reshard, int) and (sharding != "parameters" or shards % reshard):
        works = [each for each in divisors(shards, most=shards) if each > 1] if sharding == "parameters" else []
        fix = f"use {either(works)}, or auto" if works else "use auto, or set sharding to parameters"
        raise UserError(
            "P019.weights-cannot-resharded",
            where="plan.comm.reshard",
            fix=fix,
            reshard=reshard,
            sharding=sharding,
            shards=shards,
        )


def check_comm(plan: Plan, steps: int) -> None:
    """Raise unless the plan allows compressed gradients, or gradients that are not sent in every step."""
    comm, mesh = plan.comm, plan.mesh
    if not comm.overlap and mesh.world_size > 1 and not plan.reduces_after_backward:
        raise UserError("P003.comm-overlap-false", where="plan.comm.overlap", plan=plan)
    check_local_steps(plan, steps)
    check_compression(plan)


def check_precision(plan: Plan, spec: Spec | None, cluster: Cluster) -> None:
    """Raise unless the device supports the plan's precision, and the model has layers for fp8."""
    for device in cluster.devices:
        has = {*ALWAYS_SUPPORTED[device.kind], *device.peak_flops}
        if plan.precision not in has:
            works = either([each for each in PRECISIONS if each in has])
            raise UserError(
                "P014.not-support", where="plan.precision", device=device.name, precision=plan.precision, works=works
            )
    check_fp8_recipe(plan, cluster)
    if plan.precision != "fp8" or spec is None:
        return
    if (language := language_of(spec)) is None:
        raise UserError("P015.fp8-matmuls-language", where="plan.precision", spec=spec.name)
    check_fp8(plan, language)


def check_fp8_recipe(plan: Plan, cluster: Cluster) -> None:
    """Raise unless all devices have the matmuls of the plan's fp8 recipe."""
    recipe = plan.fp8.recipe
    if plan.fp8.all_gather:
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
                raise UserError("P113.weights-cannot-gathered", where="plan.fp8.all_gather", why=why)
    if recipe == "tensor":
        return
    if plan.precision != "fp8":
        raise UserError("P113.fp8-recipe", where="plan.fp8.recipe", recipe=recipe, precision=plan.precision)
    for device in cluster.devices:
        if not device.name.startswith(RECIPE_DEVICES[recipe]):
            raise refused_recipe(recipe, device.name)


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
            raise UserError(
                "P015.fp8-needs-multiples",
                where="plan.precision",
                multiple=multiple,
                name=name,
                spec=spec.name,
                width=width,
            )
    if min(spec.hidden, max(widths.values())) < MIN_FP8_FEATURES:
        raise UserError(
            "P015.fp8-needs-layers", where="plan.precision", min_fp8_features=MIN_FP8_FEATURES, spec=spec.name
        )


def check_module_precision(recipe: Recipe, spec: Spec | None) -> None:
    """Raise for a module of `train.precision` that our network does not have."""
    if recipe.train.precision and not recipe.model.kind.is_hf and spec is not None:
        refuse_unmatched(recipe.train.precision, module_names(spec))


def check_memory(plan: Plan, spec: Spec | None) -> None:
    """Raise when recompute or offload do not fit the model or the sharding."""
    check_disk(plan)
    if plan.offload == "parameters" and plan.sharding != "parameters":
        raise UserError("P016.offload-parameters", where="plan.offload", sharding=plan.sharding)
    if spec is not None and isinstance(plan.recompute, int) and plan.recompute > spec.layers:
        raise UserError(
            "P017.recompute-more-layers",
            where="plan.recompute",
            recompute=plan.recompute,
            layers=spec.layers,
            spec=spec.name,
        )


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
            raise UserError("P109.tensors-cannot-offloaded", where="plan.disk.path", disk=plan.disk.path, why=why)


def check_compiled(plan: Plan, cluster: Cluster) -> None:
    """Raise where torch cannot compile what the plan asks for."""
    recomputes = plan.recompute == "full" or isinstance(plan.recompute, int)
    if plan.compile and recomputes and plan.mesh.tp > 1 and not cluster.device.traits.compiles_recomputed_slices:
        raise UserError("P020.torch-cannot-compile", where="plan.compile", recompute=plan.recompute)


def check_loss(plan: Plan, spec: Spec | None, outline: Outline | None = None) -> None:
    """Raise where the loss cannot be fused with the head, which needs all logits and a head that we call."""
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
            raise UserError("P056.loss-not-possible-set", where="plan.loss", loss=plan.loss, why=why)


def check_objective(plan: Plan, recipe: Recipe) -> None:
    """Raise for an objective that does not suit the model, or that cannot be fused with the head."""
    objective, is_perception = recipe.objective, recipe.model.kind.reads == "scenes"
    is_built_in = objective.name in KINDS["objective"].reserved
    if objective.name not in ("auto", "perception" if is_perception else "language") and is_built_in:
        raise UserError(
            "K079.objective-not-family", where="objective.name", objective=objective.name, family=recipe.model.family
        )
    if objective.label_smoothing and is_perception:
        raise UserError("K079.perception-model", where="objective.label_smoothing")
    if plan.loss != "logits" and not is_built_in:
        raise UserError("P056.loss-not-possible", where="plan.loss", loss=plan.loss, objective=objective.name)


def check_batch(plan: Plan, global_batch: int) -> None:
    """Raise unless data ranks, micro-batch and accumulation multiply to the global batch."""
    if plan.global_batch == global_batch:
        return
    dp, batch_per_rank = plan.mesh.dp, global_batch // plan.mesh.dp
    at_once = plan.rows_at_once if plan.rows_by_rank else dp * plan.micro_batch
    works = [size for size in divisors(batch_per_rank, most=64) if fills_pipeline(plan, batch_per_rank // size)]
    fix = templated("set train.global_batch to {global_batch}", global_batch=plan.global_batch)
    product = templated("{dp} data ranks x micro_batch {size}", dp=dp, size=plan.micro_batch)
    if plan.rows_by_rank:
        product, works = templated("micro_batches of {rows} rows together", rows=at_once), []
    if global_batch % at_once == 0:
        fix = joined([fix, templated("plan.grad_accum to {count}", count=global_batch // at_once)])
    elif global_batch % dp == 0 and works:
        text = templated("plan.micro_batch to {sizes} and leave plan.grad_accum out", sizes=either(works))
        fix = joined([fix, text])
    raise UserError(
        "P002.global-batch",
        where="train.global_batch",
        fix=fix,
        global_batch=global_batch,
        product=product,
        grad_accum=plan.grad_accum,
        plan_global_batch=plan.global_batch,
    )


def check_sequence(seq_len: int, spec: Spec | None) -> None:
    """Raise when sequences are longer than the model has positions for."""
    spec = language_of(spec)
    if spec is not None and seq_len > spec.max_seq_len:
        raise UserError(
            "P005.seq-len", where="data.seq_len", seq_len=seq_len, spec=spec.name, max_seq_len=spec.max_seq_len
        )


def check_outline_sequence(question: Question) -> None:
    """Raise when sequences are longer than a model that is known by its outline has positions for."""
    outline, seq_len = question.outline, question.recipe.data.seq_len
    if outline is not None and not outline.main.positions and 0 < outline.max_seq_len < seq_len:
        raise UserError(
            "P005.seq-len-but-supports",
            where="data.seq_len",
            seq_len=seq_len,
            outline=outline.name,
            max_seq_len=outline.max_seq_len,
        )


def check_tower_names(plan: Plan, question: Question) -> None:
    """Raise unless every tower that plan and recipe name exists."""
    outline = question.outline
    assert outline is not None
    names = [tower.name for tower in outline.towers]
    of_optimizer = question.recipe.train.optimizer.towers
    for where, code, own in (("plan.towers", "P022", plan.towers), ("train.optimizer.towers", "P052", of_optimizer)):
        for name in (each for each in own if each not in names):
            raise UserError(code, f"{outline.name} has no tower '{name}'{did_you_mean(name, names)}",
                            where=f"{where}.{name}", fix=f"its towers are {', '.join(names)}")  # fmt: skip


def check_divisors(plan: Plan, question: Question) -> None:
    """Raise unless tp, cp and ep divide what they split, in every tower."""
    mesh, outline, seq_len = plan.mesh, question.outline, question.recipe.data.seq_len
    assert outline is not None
    for axis, code in (("tp", "P008"), ("cp", "P009"), ("ep", "P010")):
        degree = getattr(mesh, axis)
        if degree == 1:
            continue
        opaque = [block.name for tower in outline.towers for block, _ in tower.runs if isinstance(block, Opaque)]
        if axis != "ep" and opaque:
            raise UserError("P021.cannot-split-opaque", where=f"plan.mesh.{axis}", axis=axis, opaque=opaque[0])
        for name, size in split_sizes(outline, plan, seq_len, axis):
            if size % degree:
                works = degrees(math.gcd(*(each for _, each in split_sizes(outline, plan, seq_len, axis))),
                                world_size=mesh.world_size)  # fmt: skip
                raise UserError(code, f"{axis} {degree} does not divide the {size:,} {name}",
                                where=f"plan.mesh.{axis}", fix=f"use {axis} of {works}")  # fmt: skip


def check_depth(plan: Plan, question: Question) -> None:
    """Raise unless every stage has a block and together they hold every block once."""
    outline = question.outline
    assert outline is not None
    pp, stages, schedule = plan.mesh.pp, plan.pipeline.stages, plan.pipeline.schedule
    if pp == 1 and stages:
        raise UserError("P011.stages-listed", where="plan.pipeline.stages", num_stages=len(stages))
    if pp > 1 and plan.num_stages > outline.layers:
        raise UserError(
            "P011.stages-more-blocks",
            where="plan.mesh.pp",
            num_stages=plan.num_stages,
            layers=outline.layers,
            outline=outline.name,
        )
    wrong = sum(stages) != outline.layers or 0 in stages or not takes_stages(schedule, len(stages) / pp)
    if pp > 1 and stages and wrong:
        raise UserError(
            "P011.stages-blocks",
            where="plan.pipeline.stages",
            num_stages=len(stages),
            total=sum(stages),
            layers=outline.layers,
            outline=outline.name,
            schedule=schedule,
            pp=pp,
        )


def split_sizes(outline: Outline, plan: Plan, seq_len: int, axis: str) -> Iterator[tuple[str, int]]:
    """Yield what the axis splits, by name. The vocabulary is padded; towers without experts do not restrict ep."""
    mesh, exchange, has_experts = plan.mesh, plan.comm.context == "exchange", False
    if axis == "ep":
        yield "ranks that experts may be spread over", mesh.expert_ranks
    for tower in outline.towers:
        if axis == "cp":
            positions, _ = tower.sample_positions(seq_len)
            halves, size = ("", positions) if exchange else (" in halves", positions // 2)
            yield f"positions of tower {tower.name}{halves}", size
        tp = tower_degree(tower.name, plan)
        if axis == "tp" and tp == 1:  # every rank holds the tower
            continue
        for layer in (block for block, _ in tower.runs if isinstance(block, OutlineLayer)):
            has_experts = has_experts or layer.experts is not None
            for name, size in _layer_sizes(layer, tp, axis, mesh.cp if exchange else 1):
                yield f"{name} of tower {tower.name}", size
    if axis == "ep" and not has_experts:
        yield f"experts of {outline.name}", 1


def _layer_sizes(layer: OutlineLayer, tp: int, axis: str, exchanged: int) -> Iterator[tuple[str, int]]:
    """Yield what the axis splits of a layer; `exchanged` is how many context-parallel ranks exchange heads, or 1."""
    experts = layer.experts
    if axis == "ep" and experts:
        yield "experts", experts.num_experts
    if axis == "tp" and experts:
        yield "features of an expert", experts.ffn
        yield "features of the shared expert", experts.shared_ffn
    elif axis == "tp":
        yield "features of the feed-forward", layer.ffn
    if axis == "tp" and layer.heads:
        yield "heads", layer.heads
        yield "KV heads", layer.kv_heads
    if axis == "cp" and exchanged > 1 and layer.heads:
        yield "heads", layer.heads // tp
        if exchanged % max(1, layer.kv_heads // tp):  # else each KV head goes to several ranks
            yield "KV heads", layer.kv_heads // tp
