"""Checks the plans of a question: by the rules of our trainer, or by those that hold for any training system."""

import math
from collections.abc import Iterator

from trimaran.core import Plan, UserError
from trimaran.core.engine_rules import check_deepspeed
from trimaran.models import Opaque, Outline, OutlineLayer
from trimaran.planner.degrees import degrees
from trimaran.planner.question import Question
from trimaran.planner.rules.async_rules import check_async
from trimaran.planner.rules.axis_rules import check_pipeline, takes_stages
from trimaran.planner.rules.legal import (
    check_batch,
    check_comm,
    check_compiled,
    check_loss,
    check_memory,
    check_mesh,
    check_plan,
    check_precision,
    check_sharding,
)
from trimaran.planner.rules.tower_rules import check_known_towers
from trimaran.planner.rules.unequal_rules import check_micro_batches


def check_question(plan: Plan, question: Question) -> None:
    """Raise UserError for the first thing in `plan` that the question does not allow."""
    if question.outline is not None:
        check_tower_names(plan, question)
    if question.for_trainer:
        check_plan(plan, question.recipe, question.spec, question.cluster, question.outline, question.facts)
    else:
        check_without_trainer(plan, question)


def check_without_trainer(plan: Plan, question: Question) -> None:
    """Raise for what no training system could run: degrees that divide nothing, batches that do not add up."""
    recipe, cluster, outline = question.recipe, question.cluster, question.outline
    check_mesh(plan, cluster)
    check_deepspeed(plan, recipe.train)
    check_async(plan, recipe)
    check_sharding(plan)
    check_comm(plan, recipe.train.steps)
    check_micro_batches(plan)
    check_batch(plan, recipe.train.global_batch)
    check_precision(plan, question.spec, cluster)
    check_memory(plan, question.spec)
    check_compiled(plan, cluster)
    if question.stack.name == "trimaran":  # other stacks ignore the plan's loss
        check_loss(plan, question.spec, outline)
    check_pipeline(plan, recipe)
    if outline is None:
        return
    if not outline.main.positions and 0 < outline.max_seq_len < recipe.data.seq_len:
        raise UserError("P005", f"seq_len is {recipe.data.seq_len:,}, but {outline.name} supports at most "
                        f"{outline.max_seq_len:,}", where="data.seq_len",
                        fix=f"set data.seq_len to {outline.max_seq_len} or less")  # fmt: skip
    check_divisors(plan, outline, recipe.data.seq_len)
    check_depth(plan, outline)


def check_tower_names(plan: Plan, question: Question) -> None:
    """Raise unless every tower that plan and recipe name exists."""
    outline = question.outline
    assert outline is not None
    names = [tower.name for tower in outline.towers]
    check_known_towers(plan.towers, names, of=outline.name, code="P022", where="plan.towers")
    check_known_towers(question.recipe.train.optimizer.towers, names, of=outline.name, code="P052",
                   where="train.optimizer.towers")  # fmt: skip


def check_divisors(plan: Plan, outline: Outline, seq_len: int) -> None:
    """Raise unless tp, cp and ep divide what they split, in every tower."""
    mesh = plan.mesh
    for axis, code in (("tp", "P008"), ("cp", "P009"), ("ep", "P010")):
        degree = getattr(mesh, axis)
        if degree == 1:
            continue
        if axis != "ep" and (opaque := next(_opaque(outline), None)):
            raise UserError("P021", f"{axis} cannot split {opaque.name}, an opaque block",
                            where=f"plan.mesh.{axis}", fix="use dp_shard or pp, or describe the model by its "
                            "config.json")  # fmt: skip
        for name, size in split_sizes(outline, plan, seq_len, axis):
            if size % degree:
                works = degrees(math.gcd(*(each for _, each in split_sizes(outline, plan, seq_len, axis))),
                                world_size=mesh.world_size)  # fmt: skip
                raise UserError(code, f"{axis} {degree} does not divide the {size:,} {name}",
                                where=f"plan.mesh.{axis}", fix=f"use {axis} of {works}")  # fmt: skip


def check_depth(plan: Plan, outline: Outline) -> None:
    """Raise unless every stage has a block and together they hold every block once."""
    pp, stages, schedule = plan.mesh.pp, plan.pipeline.stages, plan.pipeline.schedule
    if pp == 1 and stages:
        raise UserError("P011", f"{len(stages)} stages are listed, but pp is 1", where="plan.pipeline.stages",
                        fix=f"set mesh.pp to {len(stages)}, or leave the stages out")  # fmt: skip
    if pp > 1 and plan.num_stages > outline.layers:
        raise UserError("P011", f"{plan.num_stages} stages are more than the {outline.layers} blocks of "
                        f"{outline.name}", where="plan.mesh.pp", fix="use a lower pp, or fewer stages")  # fmt: skip
    wrong = sum(stages) != outline.layers or 0 in stages or not takes_stages(schedule, len(stages) / pp)
    if pp > 1 and stages and wrong:
        raise UserError("P011", f"{len(stages)} stages of {sum(stages)} blocks do not add up to the "
                        f"{outline.layers} of {outline.name} for {schedule} with pp {pp}", where="plan.pipeline.stages",
                        fix="leave them out: the planner splits by cost")  # fmt: skip


def split_sizes(outline: Outline, plan: Plan, seq_len: int, axis: str) -> Iterator[tuple[str, int]]:
    """Yield what the axis splits, by name: heads, widths, positions or experts of every tower.

    The vocabulary is left out, because systems pad it. A tower without experts does not restrict `ep`.
    """
    mesh, exchange = plan.mesh, plan.comm.context == "exchange"
    if axis == "ep":
        yield "ranks that experts may be spread over", mesh.expert_ranks
    for tower in outline.towers:
        if axis == "cp":
            positions, _ = tower.sample_positions(seq_len)
            yield (
                f"positions of tower {tower.name}" + " in halves" * (not exchange),
                positions if exchange else positions // 2,
            )
        own = plan.towers.get(tower.name)
        tp = mesh.tp if own is None or own.tp is None else own.tp
        if axis == "tp" and tp == 1:  # every rank holds the tower
            continue
        for block, _ in tower.runs:
            if isinstance(block, OutlineLayer):
                yield from (
                    (f"{name} of tower {tower.name}", size)
                    for name, size in _layer_sizes(block, tp, axis, mesh.cp if exchange else 1)
                )
    if axis == "ep" and not any(block.experts for block in _layers(outline)):
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


def _layers(outline: Outline) -> Iterator[OutlineLayer]:
    return (block for tower in outline.towers for block, _ in tower.runs if isinstance(block, OutlineLayer))


def _opaque(outline: Outline) -> Iterator[Opaque]:
    return (block for tower in outline.towers for block, _ in tower.runs if isinstance(block, Opaque))
