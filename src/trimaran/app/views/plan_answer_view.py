"""The answer of `plan` drawn: the best plan, the others beside it, why each lost, and what would change that."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.request.plan_answer import Report
from trimaran.app.views.plan_view import WIDE_COLUMNS, add_model, add_plan, facts_table, occupancy, show_terms, unit_of
from trimaran.app.views.text_chart import GREEN, ORANGE, RED
from trimaran.core import Plan, show_bytes, show_count, show_seconds
from trimaran.hardware import Cluster
from trimaran.planner import Question

FULL = 0.88  # above this the allocator starts to search for room, and a step takes longer
SHOWN_MISSES = 6


def show_report(report: Report, console: Console, *, top: int) -> None:
    """Print the whole answer. Where nothing fits, the leanest plan stands in for the best."""
    answer = report.answer
    shown = report.best or next((miss.plan for miss in answer.misses), None)
    _show_facts(report, shown, console)
    if shown:
        show_terms(shown, console)
    if len(answer.ranked) > 1:
        _headline(console, f"the best {min(top, len(answer.ranked))} ways to split, by {answer.question.goal}")
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
    _show_list(console, "why others lost", lost[:SHOWN_MISSES])
    _show_list(console, "what would change the answer", answer.hints)
    for warning in answer.warnings:
        console.print(Text.assemble(("\nwarning  ", ORANGE), warning))
    _show_files(report, console)


def _show_facts(report: Report, plan: Plan | None, console: Console) -> None:
    question, answer = report.asked.question, report.answer
    recipe, facts = question.recipe, facts_table()
    facts.add_row("run", recipe.name)
    add_model(facts, question.outline)
    idle = answer.question.cluster.world_size - answer.cluster.world_size
    facts.add_row("cluster", f"{answer.cluster}{f', {idle} of {question.cluster} stay idle' if idle else ''}")
    facts.add_row("step", _step(question))
    if plan:
        add_plan(facts, plan, answer.cluster, unit=unit_of(question.outline))
    if not answer.ranked:
        missing = answer.missing or f"{show_bytes(answer.missing_bytes)} a device"
        facts.add_row("missing", Text(missing, style=f"bold {RED}"))
        facts.add_row("smallest", f"{answer.smallest} would do" if answer.smallest else "no number of them would do")
    for name, words in report.account.words if report.account else ():
        facts.add_row(name, words)
    facts.add_row("searched", f"{answer.num_considered:,} plans")
    console.print(facts)


def _step(question: Question) -> str:
    """Return what an optimizer step reads: sequences of tokens, or samples whose positions the network fixes."""
    recipe, unit = question.recipe, unit_of(question.outline)
    length = question.outline.main.places(recipe.data.seq_len)[0] if question.outline else recipe.data.seq_len
    batch, what = recipe.train.global_batch, "sequences" if unit == "tokens" else "samples"
    if length == 1:  # a network that was watched has no positions to count
        return f"{batch:,} samples"
    return f"{batch:,} {what} of {length:,}: {show_count(batch * length)} {unit}"


def _ranking(*, wide: bool, unit: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in ("mesh", "shard", "recompute", "loss", "offload") if wide else ("plan",):
        table.add_column(column)
    for column in ("batch", "memory", "step", f"{unit}/s", "mfu"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _row(plan: Plan, cluster: Cluster, *, wide: bool, style: str) -> list[Text]:
    how = (_mesh(plan), plan.sharding, _recompute(plan), plan.loss, plan.offload) if wide else (_short(plan),)
    return [*(Text(word, style=style) for word in how), *_figures(plan, cluster)]


def _figures(plan: Plan, cluster: Cluster) -> list[Text]:
    """Return the cells of a row: batch, memory with how full it is, step, pace and mfu."""
    words = [Text(_batch(plan))]
    if (found := plan.prediction) is None:
        return words
    full = occupancy(found, cluster)
    words.append(Text(f"{show_bytes(found.device_bytes)} {full:.0%}", style=ORANGE if full > FULL else ""))
    pace = show_seconds(found.step_seconds), show_count(found.tokens_per_second), f"{found.mfu:.0%}"
    return [*words, *map(Text, pace)]


def _batch(plan: Plan) -> str:
    return f"{plan.micro_batch} x {plan.grad_accum}"


def _mesh(plan: Plan) -> str:
    return str(plan.mesh) + (f" {plan.pipeline.schedule}" if plan.mesh.pp > 1 else "")


def _recompute(plan: Plan) -> str:
    return plan.recompute if isinstance(plan.recompute, str) else f"every {plan.recompute}"


def _short(plan: Plan) -> str:
    """Return what a plan does, in as few words as tell it from others."""
    words = [_mesh(plan)]
    for name, value in (("shard", plan.sharding), ("recompute", _recompute(plan)), ("offload", plan.offload)):
        words += [f"{name} {value}"] if value != "none" else []
    return ", ".join(words)


def _show_list(console: Console, title: str, lines: Iterable[str]) -> None:
    if lines := list(lines):
        _headline(console, title)
    for line in lines:
        console.print(Text(f"- {line}"), soft_wrap=True)


def _headline(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="dim"))


def _show_files(report: Report, console: Console) -> None:
    if report.written is None:
        return
    form = report.written.form
    _headline(console, f"written for {form.tool}")
    console.print(Text("\n".join(report.written.files)), soft_wrap=True)
    if form.loss:
        console.print(Text(f"not the best plan: {form.loss}", style=ORANGE), soft_wrap=True)
    for note in form.emission.notes:
        console.print(Text(f"- {note}", style="dim"), soft_wrap=True)
