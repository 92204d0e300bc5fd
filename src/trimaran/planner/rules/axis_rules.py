"""Checks that each axis divides the dimension of the model that it splits, tower by tower, as its code allows."""

import math
from collections.abc import Iterable

from trimaran.core import Plan, Recipe, UserError, templated
from trimaran.core.engine_rules import no_fp8_layers
from trimaran.core.plan import TowerPlan
from trimaran.models import ModelSpec, Spec, language_of, vision_of
from trimaran.models.hf_facts import HfFacts, refuse_ep_degree, refuse_seq_len, refuse_tp_degree
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.plugin_family import check_plugin_family
from trimaran.models.spec import every_rank_has_rows
from trimaran.planner.question import isolates_documents


def divisors(num: int, *, most: int) -> list[int]:
    """Return the divisors of `num` up to `most`, smallest first."""
    small = [each for each in range(1, min(math.isqrt(num), most) + 1) if num % each == 0]
    return small + [num // each for each in reversed(small) if each * each < num and num // each <= most]


def degrees(num: int, *, world_size: int) -> str:
    """Return the degrees that divide both `num` and the world size, as text."""
    return either(each for each in divisors(num, most=world_size) if world_size % each == 0)


def multiples_around(num: int, step: int) -> str:
    """Return the multiples of `step` nearest to `num`, as text: `8 or 12`."""
    below, above = num // step * step, -(-num // step) * step
    return either(dict.fromkeys(each for each in (below, above) if each))


def either(choices: Iterable[object]) -> str:
    """Return the choices as text, `1 or 2 or 4`; of many, the first four and the last."""
    texts = [str(each) for each in choices]
    return " or ".join(texts if len(texts) <= 5 else [*texts[:4], texts[-1]])


MULTI_STAGE_SCHEDULES = ("interleaved", "zero-bubble")


def check_axes(plan: Plan, recipe: Recipe, spec: Spec | None) -> None:
    """Raise when a degree does not divide what it splits. Without a spec only the worker knows the sizes."""
    if recipe.model.kind.is_hf:
        check_hf_model(plan, spec)
    check_plugin_family(plan, recipe)
    check_regather(plan, recipe, spec)
    check_pipeline(plan, recipe)
    if spec is not None:
        if spec.language is None:
            check_perception(plan, spec)
        check_tensor(plan, spec)
        if not recipe.model.kind.is_hf:
            check_vocabulary(plan, spec)
        check_stages(plan, spec)
    if (language := language_of(spec)) is not None:
        check_context(plan, language)
        check_experts(plan, language)
        check_prediction(plan, language)
    if spec is None or spec.language is not None:
        check_positions(plan, recipe, known=spec is not None)


def check_perception(plan: Plan, spec: PerceptionSpec) -> None:
    """Raise for axes that a perception model does not have: no sequences, no experts, and perhaps no fusion."""
    missing = {
        "cp": "a perception model has no sequences to split",
        "ep": "a perception model has no experts to spread",
    }
    others = "dp_shard, dp_replicate, pp or tp"
    if not spec.fusion_layers:
        missing["tp"] = "a perception model without cameras has no fusion layers to split"
        others = "dp_shard, dp_replicate or pp"
    for axis, what in missing.items():
        if getattr(plan.mesh, axis) > 1:
            raise UserError("P055", what, where=f"plan.mesh.{axis}", fix=f"set {axis} to 1, and use {others}")


def check_hf_model(plan: Plan, spec: Spec | None) -> None:
    """Raise for axes along which a Hugging Face model with images is not split. For others its code decides."""
    for axis in ("pp", "ep", "tp", "cp") if vision_of(spec) is not None else ():
        if getattr(plan.mesh, axis) > 1:
            raise UserError("P013.hugging-face-model", where=f"plan.mesh.{axis}", axis=axis)
    check_expert_ranks(plan)


def check_regather(plan: Plan, recipe: Recipe, spec: Spec | None) -> None:
    """Raise where tensor-parallel ranks do not gather inputs, or cannot gather them again."""
    if not plan.comm.regather or plan.mesh.tp == 1:
        return
    if not recipe.model.kind.splits_sequence:
        raise UserError("P058.tensor-parallelism-model", where="plan.comm.regather", family=recipe.model.family)
    language = language_of(spec)
    if plan.compile and language is not None and language.block.experts is not None:
        raise UserError("P058.torch-not-compile", where="plan.comm.regather")


def check_tensor(plan: Plan, spec: Spec) -> None:
    """Raise unless tp divides the heads and every width that it splits, except for the vocabulary."""
    tp, vision = plan.mesh.tp, spec.vision
    whole = [tower for tower in spec.tower_names if tower_degree(tower, plan) == 1]
    if tp > 1 and vision is not None and vision.block.qk_norm and "vision" not in whole:
        raise UserError("P054.vision-tower-normalises", where="plan.towers.vision.tp", spec=spec.name, tp=tp)
    sizes = spec.tensor_sizes(whole)
    works = degrees(math.gcd(*sizes.values()), world_size=plan.mesh.world_size)
    for name, size in sizes.items():
        if size % tp:
            raise UserError(
                "P008.tp-not-divide-use", where="plan.mesh.tp", tp=tp, size=size, name=name, spec=spec.name, works=works
            )


def check_vocabulary(plan: Plan, spec: Spec) -> None:
    """Raise if a tensor-parallel rank would hold no row of the vocabulary."""
    tp, language = plan.mesh.tp, language_of(spec)
    if language is not None and not every_rank_has_rows(language.vocab, tp):
        raise UserError("P008.tp-leaves-ranks", where="plan.mesh.tp", tp=tp, vocab=language.vocab, spec=spec.name)


def tower_degree(tower: str, plan: Plan) -> int:
    """Return the tensor-parallel degree of the tower."""
    own = plan.towers.get(tower)
    return plan.mesh.tp if own is None or own.tp is None else own.tp


def check_context(plan: Plan, spec: ModelSpec) -> None:
    """Raise unless cp divides the heads that ranks exchange. With fewer KV heads, it is a multiple of them."""
    mesh = plan.mesh
    if plan.comm.context != "exchange" or mesh.cp == 1:
        return
    heads, kv_heads = spec.heads // mesh.tp, spec.kv_heads // mesh.tp
    works = [each for each in divisors(heads, most=mesh.world_size) if kv_heads % each == 0 or each % kv_heads == 0]
    if mesh.cp in works:
        return
    name, num = ("heads", heads) if heads % mesh.cp else ("KV heads", kv_heads)
    raise UserError(
        "P009.cp-not-divide", where="plan.mesh.cp", cp=mesh.cp, num=num, name=name, spec=spec.name, works=either(works)
    )


def check_positions(plan: Plan, recipe: Recipe, *, known: bool) -> None:
    """Raise unless a sequence can be split into the chunks that cp and tp need.

    Unless ranks exchange heads, each holds one chunk from the front and one from the back: 2 x cp chunks. A decoder's
    tensor-parallel ranks also split the positions of their chunk (sequence parallelism); those of a Hugging Face model
    do not.
    """
    mesh, seq_len = plan.mesh, recipe.data.seq_len
    chunks = mesh.cp * (2 if mesh.cp > 1 and plan.comm.context != "exchange" else 1)
    if seq_len % chunks:
        per_rank = chunks // mesh.cp  # a sequence that this does not divide cannot be split at all
        works = degrees(1 if seq_len % per_rank else seq_len // per_rank, world_size=mesh.world_size)
        raise UserError(
            "P009.sequence-not-split",
            where="data.seq_len",
            seq_len=seq_len,
            chunks=chunks,
            cp=mesh.cp,
            multiples_around=multiples_around(seq_len, chunks),
            works=works,
        )
    if known and recipe.model.kind.splits_sequence and seq_len // mesh.cp % mesh.tp:
        step = math.lcm(chunks, mesh.cp * mesh.tp)
        raise UserError(
            "P008.tp-not-divide",
            where="data.seq_len",
            tp=mesh.tp,
            seq_len=seq_len // mesh.cp,
            multiples_around=multiples_around(seq_len, step),
            degrees=degrees(seq_len // mesh.cp, world_size=mesh.world_size),
        )


def check_experts(plan: Plan, spec: ModelSpec) -> None:
    """Raise unless ep divides the experts and the ranks that can hold them, and replicas train routers in step."""
    mesh, experts, local = plan.mesh, spec.block.experts, plan.comm.local
    if experts is None and mesh.ep == 1:
        return
    if experts is None:
        raise UserError("P010.ep-needs-experts", where="plan.mesh.ep", ep=mesh.ep, spec=spec.name)
    if experts.num_experts % mesh.ep:
        works = degrees(math.gcd(experts.num_experts, mesh.expert_ranks), world_size=mesh.expert_ranks)
        raise UserError(
            "P010.ep-not-divide",
            where="plan.mesh.ep",
            ep=mesh.ep,
            num_experts=experts.num_experts,
            spec=spec.name,
            works=works,
        )
    check_expert_ranks(plan, experts.num_experts)
    if experts.router.correction_rate and (local.is_on or not plan.engine_traits.is_synchronous):
        raise UserError(
            "P102.routers-follow-loads", where="plan.comm.local_steps" if local.is_on else "plan.engine", spec=spec.name
        )


def check_expert_ranks(plan: Plan, num_experts: int = 0) -> None:
    """Raise unless ep divides the ranks that can hold experts. `num_experts` 0: only the model's code knows it."""
    mesh, ranks = plan.mesh, plan.mesh.expert_ranks
    if ranks % mesh.ep:
        over = "dp_shard x cp" if mesh.dp_shard > 1 else "dp_replicate x cp"
        works = degrees(math.gcd(num_experts, ranks), world_size=ranks)
        raise UserError(
            "P010.ep-not-divide-ranks", where="plan.mesh.ep", ep=mesh.ep, ranks=ranks, over=over, works=works
        )


def check_prediction(plan: Plan, spec: ModelSpec) -> None:
    """Raise if layers that predict later tokens could not be trained: they need our trainer, and one stage."""
    layers, stages = spec.prediction_layers, plan.pipeline.stages
    if layers and plan.engine_traits.needs_logits:
        raise UserError("P120.deepspeed-engine", where="plan.engine")
    if layers and plan.mesh.pp > 1 and plan.pipeline.schedule == "zero-bubble":
        raise UserError("P122.zero-bubble", where="plan.pipeline.schedule")
    if plan.mesh.pp > 1 and stages and stages[-1] < layers:
        raise UserError("P121.last-stage-layers", where="plan.pipeline.stages", stages=stages[-1], layers=layers)


def check_stages(plan: Plan, spec: Spec) -> None:
    """Raise unless the schedule allows these stages, and they hold every layer; prediction layers stay together."""
    pp, stages, schedule = plan.mesh.pp, plan.pipeline.stages, plan.pipeline.schedule
    layers = spec.num_blocks
    parts = min(layers, spec.layers + 1)
    if pp == 1 and not stages:
        return
    if pp == 1:
        raise UserError("P011.stages-listed", where="plan.pipeline.stages", num_stages=len(stages))
    if stages and not takes_stages(schedule, len(stages) / pp):
        allowed = f"{pp}" if schedule not in MULTI_STAGE_SCHEDULES else f"{2 * pp}"
        allowed += f", {3 * pp} or more in steps of {pp}" if schedule == "interleaved" else ""
        raise UserError(
            "P011.pp-not-allow",
            where="plan.pipeline.stages",
            schedule=schedule,
            pp=pp,
            num_stages=len(stages),
            allowed=allowed,
        )
    if plan.num_stages > parts:
        most = parts // (plan.num_stages // pp)
        fix = f"use pp of at most {most}" if most > 1 else "use a schedule with fewer stages, or a deeper model"
        raise UserError(
            "P011.stages-more-layers",
            where="plan.mesh.pp",
            fix=fix,
            num_stages=plan.num_stages,
            parts=parts,
            spec=spec.name,
        )
    if stages and (sum(stages) != layers or min(stages) < 1):
        raise UserError(
            "P011.stages-layers",
            where="plan.pipeline.stages",
            stages=", ".join(map(str, stages)),
            layers=layers,
            spec=spec.name,
        )


def check_pipeline(plan: Plan, recipe: Recipe) -> None:
    """Raise when the pipeline has too few micro-batches, or a backward that cannot be split."""
    pp, schedule, count = plan.mesh.pp, plan.pipeline.schedule, plan.grad_accum
    if pp == 1:
        return
    if not fills_pipeline(plan, count):
        batch_per_rank = recipe.train.global_batch // plan.mesh.dp
        works = [size for size in divisors(batch_per_rank, most=64) if fills_pipeline(plan, batch_per_rank // size)]
        fix = templated("set train.global_batch to {dp} or a multiple of it, or use a lower pp", dp=plan.mesh.dp * pp)
        if works:
            fix = templated("set plan.micro_batch to {works} and leave plan.grad_accum out", works=either(works))
        why = (
            templated("fewer than its {pp} ranks", pp=pp)
            if count < pp
            else templated("not a multiple of its {count} rounds", count=count // pp)
        )
        num = templated("{count} micro-batches", count=count) if count > 1 else "one micro-batch"
        raise UserError(
            "P012.pp-cannot-run", where="plan.grad_accum", fix=fix, schedule=schedule, pp=pp, num=num, why=why
        )
    if schedule != "zero-bubble":  # whose backward has two parts: for the input and for the weights
        return
    for field, off, why in (
        ("compile", False, "a compiled backward cannot be split"),
        ("recompute", "none", "each part of its backward would recompute the layer"),
    ):
        if getattr(plan, field) != off:
            raise UserError("P018.zero-bubble", where=f"plan.{field}", field=field, why=why, off=str(off).lower())


def fills_pipeline(plan: Plan, num_micro_batches: int) -> bool:
    """Return whether the plan's schedule can run that many micro-batches."""
    return takes_micro_batches(plan.pipeline.schedule, plan.mesh.pp, num_micro_batches)


def takes_micro_batches(schedule: str, pp: int, num_micro_batches: int) -> bool:
    """Return whether a schedule on `pp` ranks can run that many micro-batches.

    With fewer micro-batches than ranks some ranks would always be idle, and 1F1B does not start. Interleaved runs equal
    rounds of at least `pp` micro-batches.
    """
    rounds = max(1, num_micro_batches // pp) if schedule == "interleaved" else 1
    return num_micro_batches >= pp and num_micro_batches % rounds == 0


def takes_stages(schedule: str, stages_per_rank: float) -> bool:
    """Return whether a rank of the schedule can hold that many stages."""
    if schedule == "interleaved":
        return stages_per_rank >= 2 and stages_per_rank.is_integer()
    return stages_per_rank == (2 if schedule == "zero-bubble" else 1)


# The tower that ends in the loss. Tensor parallelism splits its residual stream along the sequence.
MAIN = "language"
# The tower that takes images. Tensor-parallel ranks that all hold it encode different ones.
FIRST = "vision"


def check_towers(plan: Plan, recipe: Recipe, spec: Spec | None) -> None:
    """Raise for settings that a single tower cannot have."""
    tp = plan.mesh.tp
    for name, own in plan.towers.items():
        if recipe.model.kind.is_hf and vision_of(spec) is None and own != TowerPlan():
            raise UserError("P023.towers-hugging-face", where=f"plan.towers.{name}")
        where = f"plan.towers.{name}.sharding"
        if own.sharding not in (None, plan.sharding):
            if plan.engine_traits.shards_weights_itself:
                raise UserError("P053.deepspeed-shards", where=where)
            # If it and the first tower have tp 1, tensor-parallel ranks encode different images, and can hold shards.
            settings = (plan.towers.get(each, TowerPlan()) for each in (FIRST, name))
            splits_images = name != MAIN and all(each.tp == 1 < tp for each in settings)
            if plan.sharding == "none" and not splits_images:
                fix = f"set plan.sharding to {own.sharding}, and that of the other towers to none"
                if name != MAIN and tp > 1:
                    fix = f"{fix}, or give {name if name == FIRST else f'{FIRST} and {name}'} tp 1"
                raise UserError("P053.tower-cannot-sharded", where=where, fix=fix, name=name)
            if plan.offload == "parameters":
                raise UserError("P053.offload-parameters", where=where, name=name, sharding=own.sharding)
        works = [tp] if name == MAIN else sorted({1, tp})
        if own.tp is not None and own.tp not in works:
            why = "tp splits its sequence" if name == MAIN else "a tower is split over all tp ranks or not at all"
            raise UserError(
                "P054.tower-cannot-tp",
                where=f"plan.towers.{name}.tp",
                name=name,
                tp=own.tp,
                mesh_tp=tp,
                why=why,
                works=either(works),
            )


def check_hf_facts(plan: Plan, recipe: Recipe, facts: HfFacts | None) -> None:
    """Raise the mistake that a worker would raise for this plan. Without facts, only the worker knows."""
    if facts is None:
        return
    if facts.untrainable is not None:
        raise facts.untrainable
    if facts.max_seq_len:
        refuse_seq_len(recipe.data.seq_len, facts.max_seq_len)
    if facts.without_documents and recipe.data.seq_len > facts.longest_packed_row and isolates_documents(recipe.data):
        raise facts.without_documents
    if plan.precision == "fp8" and not facts.has_fp8_layers:
        raise no_fp8_layers()
    mesh = plan.mesh
    check_hf_axes(facts, tp=mesh.tp, cp=mesh.cp, pp=mesh.pp, ep=mesh.ep)
    num_layers, stages = facts.num_layers, plan.pipeline.stages
    if mesh.pp > 1 and num_layers and (plan.num_stages > num_layers or (stages and sum(stages) != num_layers)):
        raise UserError(
            "P011.stages-not-hold",
            where="plan.pipeline.stages" if stages else "plan.mesh.pp",
            num_stages=plan.num_stages,
            num_layers=num_layers,
        )


def check_hf_axes(facts: HfFacts, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1) -> None:
    """Raise if the model cannot be split by these degrees."""
    for degree, mistake in ((pp, facts.without_pp), (ep, facts.without_ep)):
        if degree > 1 and mistake is not None:
            raise mistake
    if tp > 1 and facts.without_tp is not None:
        raise facts.without_tp
    if tp > 1:
        refuse_tp_degree(tp, facts.tp_sizes)
    refuse_ep_degree(ep, tp, facts.num_experts)
    if cp > 1 and facts.without_cp is not None:
        raise facts.without_cp
