"""Prints the answer of `plan`: the best plan, the runners-up, why other plans lost, and what would change that."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.plan.history_view import short_path, show_date
from trimaran.app.plan.plan_answer import PlanReport
from trimaran.app.plan.plan_view import WIDE_COLUMNS, add_model, add_plan, facts_table, occupancy, show_terms, unit_of
from trimaran.app.show.text_chart import GREEN, ORANGE, RED
from trimaran.core import Plan, show_bytes, show_count, show_seconds
from trimaran.core.plan import show_rows
from trimaran.machine import Cluster
from trimaran.planner import Question
from trimaran.planner.search.branch_and_bound import TIE_RATIO

FULL_MEMORY_FRACTION = 0.88  # above this the allocator has to search for free blocks, and a step takes longer
MAX_SHOWN_MISSES, MAX_SHOWN_TIES = 6, 4


def show_report(report: PlanReport, console: Console, *, top: int) -> None:
    """Print the answer. If nothing fits, the plan with the least memory is shown instead of the best."""
    answer = report.answer
    shown = report.best or next((miss.plan for miss in answer.misses), None)
    _show_facts(report, shown, console)
    if shown:
        show_terms(shown, console)
    if len(answer.ranked) > 1:
        _headline(console, _ranking_title(answer.ranked[:top], answer.question.goal))
        wide = console.width >= WIDE_COLUMNS
        table = _ranking(wide=wide, unit=unit_of(answer.question.outline))
        for plan in answer.ranked[:top]:
            table.add_row(*_row(plan, answer.cluster, wide=wide, style=f"bold {GREEN}" if plan is report.best else ""))
        console.print(table)
    lost = [
        f"{_short(miss.plan)}, batch {_batch(miss.plan)}: {miss.why}"
        for miss in answer.misses
        if miss.plan is not shown
    ]
    ties = [f"{_short(tie.plan)}, batch {_batch(tie.plan)}: {tie.why}" for tie in answer.ties]
    _show_list(console, "ties, which the error bar does not tell from the chosen plan", ties[:MAX_SHOWN_TIES])
    _show_list(console, "why others lost", lost[:MAX_SHOWN_MISSES])
    _show_list(console, "communication settings that differ from the defaults", answer.choices)
    _show_list(console, "what would change the answer", answer.hints)
    for warning in answer.warnings:
        console.print(Text.assemble(("\nwarning  ", ORANGE), warning))
    _show_files(report, console)


def _show_facts(report: PlanReport, plan: Plan | None, console: Console) -> None:
    question, answer = report.request.question, report.answer
    recipe, facts = question.recipe, facts_table()
    facts.add_row("run", recipe.name)
    add_model(facts, question.outline)
    idle = answer.question.cluster.world_size - answer.cluster.world_size
    facts.add_row("cluster", f"{answer.cluster}{f', {idle} of {question.cluster} stay idle' if idle else ''}")
    facts.add_row("step", _step(question))
    if rows := question.rows:
        facts.add_row("images", f"{rows.images:,.1f} images of {rows.patches:,.0f} patches in all a sequence, by the "
                      f"first {rows.num_samples:,} samples of the data")  # fmt: skip
    if plan:
        add_plan(facts, plan, answer.cluster, unit=unit_of(question.outline))
    if not answer.ranked:
        missing = answer.missing or f"{show_bytes(answer.missing_bytes)} a device"
        facts.add_row("missing", Text(missing, style=f"bold {RED}"))
        facts.add_row("smallest", f"{answer.smallest} is enough" if answer.smallest else "no number of them is enough")
    if found := report.reliability:
        spares = f"{found.spares} spare nodes, a checkpoint every {found.save_every:,} steps"
        facts.add_row("job", f"goodput {found.goodput:.1%} of weeks with failures, simulated: {spares}, "
                      f"MTTR {show_seconds(found.mttr)}")  # fmt: skip
    if report.measured:
        facts.add_row("measured", _measured(report, unit_of(question.outline)))
    for name, text in report.cost.rows if report.cost else ():
        facts.add_row(name, text)
    facts.add_row("searched", f"{answer.num_considered:,} plans")
    console.print(facts)


def _measured(report: PlanReport, unit: str) -> str:
    """Return what the fastest run of this model, size and cluster reached, beside what is predicted for the answer."""
    found, best = report.measured, report.best
    assert found is not None, "there is a measured plan"
    rate, run = show_count(found.measured.tokens_per_second), short_path(found.run.path)
    own = best.prediction.tokens_per_second if best and best.prediction else 0.0
    plan = "this plan" if report.is_measured else found.layout
    ending = f"; the planner's own is predicted at {show_count(own)}" if own and not report.is_measured else ""
    return f"{rate} {unit}/s with {plan}, run {run} of {show_date(found.run.time)}{ending}"


def _step(question: Question) -> str:
    """Return the size of an optimizer step: sequences of tokens, or samples if the network fixes the positions."""
    recipe, unit = question.recipe, unit_of(question.outline)
    length = question.outline.main.sample_positions(recipe.data.seq_len)[0] if question.outline else recipe.data.seq_len
    batch, what = recipe.train.global_batch, "sequences" if unit == "tokens" else "samples"
    if length == 1:  # a traced module has no positions to count
        return f"{batch:,} samples"
    return f"{batch:,} {what} of {length:,}: {show_count(batch * length)} {unit}"


def _ranking_title(plans: Sequence[Plan], goal: str) -> str:
    """Return the title of the table: how it is sorted. The first plan is the chosen one, maybe not the fastest."""
    if goal in ("memory", "goodput"):
        return f"the best {len(plans)} plans, {'least memory' if goal == 'memory' else 'most goodput'} first"
    seconds = [plan.prediction.step_seconds for plan in plans if plan.prediction]
    if seconds and seconds[0] > min(seconds):
        simplest = f"the simplest of those within {TIE_RATIO - 1:.0%} of the fastest"
        return f"the best {len(plans)} plans: the chosen one, {simplest}, then the others, fastest first"
    return f"the best {len(plans)} plans, fastest first"


def _ranking(*, wide: bool, unit: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in ("mesh", "shard", "recompute", "loss", "offload") if wide else ("plan",):
        table.add_column(column)
    for column in ("batch", "memory", "step", f"{unit}/s", "mfu"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _row(plan: Plan, cluster: Cluster, *, wide: bool, style: str) -> list[Text]:
    how = (_mesh(plan), plan.sharding, _recompute(plan), plan.loss, plan.offload) if wide else (_short(plan),)
    return [*(Text(word, style=style) for word in how), *_numbers(plan, cluster)]


def _numbers(plan: Plan, cluster: Cluster) -> list[Text]:
    """Return the cells of a row: batch, memory with its occupancy, step time, throughput and MFU."""
    cells = [Text(_batch(plan))]
    if (prediction := plan.prediction) is None:
        return cells
    full = occupancy(prediction, cluster)
    style = ORANGE if full > FULL_MEMORY_FRACTION else ""
    cells.append(Text(f"{show_bytes(prediction.device_bytes)} {full:.0%}", style=style))
    step, rate = show_seconds(prediction.step_seconds), show_count(prediction.tokens_per_second)
    return [*cells, *map(Text, (step, rate, f"{prediction.mfu:.0%}" if prediction.mfu_is_known else "-"))]


def _batch(plan: Plan) -> str:
    rows = f"({show_rows(plan.rows_by_rank)})" if plan.rows_by_rank else plan.micro_batch
    return f"{rows} x {plan.grad_accum}"


def _mesh(plan: Plan) -> str:
    return str(plan.mesh) + (f" {plan.pipeline.schedule}" if plan.mesh.pp > 1 else "")


def _recompute(plan: Plan) -> str:
    return plan.recompute if isinstance(plan.recompute, str) else f"every {plan.recompute}"


def _short(plan: Plan) -> str:
    """Return a plan as short text."""
    parts = [_mesh(plan)]
    for name, value in (("shard", plan.sharding), ("recompute", _recompute(plan)), ("offload", plan.offload)):
        parts += [f"{name} {value}"] if value != "none" else []
    parts += ["gradients summed after backward"] if plan.reduces_after_backward else []
    return ", ".join(parts)


def _show_list(console: Console, title: str, lines: Iterable[str]) -> None:
    if lines := list(lines):
        _headline(console, title)
    for line in lines:
        console.print(Text(f"- {line}"), soft_wrap=True)


def _headline(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="dim"))


def _show_files(report: PlanReport, console: Console) -> None:
    if report.written is None:
        return
    emitted = report.written.emitted
    _headline(console, f"written for {emitted.tool}")
    console.print(Text("\n".join(report.written.files)), soft_wrap=True)
    if emitted.loss:
        console.print(Text(f"not the best plan: {emitted.loss}", style=ORANGE), soft_wrap=True)
    for note in emitted.emission.notes:
        console.print(Text(f"- {note}", style="dim"), soft_wrap=True)
