"""A plan drawn: what it is, whether it fits, and where the bytes and seconds go."""

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.cli.chart import GREEN, RED, SKY
from trimaran.app.cli.request import Request
from trimaran.core import Plan, Prediction, show_bytes, show_count, show_seconds
from trimaran.planner import explain

BAR_CELLS = 28
WIDE_COLUMNS = 110


def show_plan(request: Request, console: Console) -> None:
    """Print the plan of `request` and its prediction, term by term, the longest bar first."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim")
    facts.add_row("run", Text(request.recipe.name, style="bold"))
    facts.add_row("cluster", str(request.cluster))
    if request.spec:
        facts.add_row("model", f"{request.spec.name}, {show_count(request.spec.num_parameters)} parameters")
    facts.add_row("plan", str(request.plan))
    if request.plan.mesh.pp > 1:
        facts.add_row("stages", _stages(request.plan))
    if prediction := request.plan.prediction:
        _add_cost(facts, prediction)
    console.print(facts)
    terms = explain(request.plan)
    for title, rows, show in (
        ("bytes of one device at the peak", terms.memory, show_bytes),
        ("seconds of one step", terms.time, show_seconds),
    ):
        table = _term_table()
        for row in rows:
            bar = Bar(rows[0].value, 0, row.value, width=BAR_CELLS, color=SKY)
            meaning = [row.meaning] if console.width >= WIDE_COLUMNS else []
            table.add_row(row.term, bar, show(row.value), f"{row.share:.0%}", *meaning)
        if rows:
            console.print(Text(f"\n{title}", style="dim"))
            console.print(table)


def _stages(plan: Plan) -> str:
    cut = f"{', '.join(map(str, plan.pipeline.stages))} layers" if plan.pipeline.stages else f"{plan.num_stages}"
    return f"{cut}, waiting {plan.bubble:.0%} of the time in theory"


def _add_cost(facts: Table, prediction: Prediction) -> None:
    verdict = Text("fits", style=GREEN) if prediction.fits else Text("does not fit", style=f"bold {RED}")
    facts.add_row("memory", Text.assemble(show_bytes(prediction.peak_bytes), " a device, ", verdict))
    pace = f"{show_seconds(prediction.step_seconds)} a step, {show_count(prediction.tokens_per_second)} tokens/s"
    facts.add_row("speed", f"{pace}, mfu {prediction.mfu:.0%}, give or take {prediction.error:.0%}")
    if prediction.source:
        facts.add_row("source", Text(prediction.source, style="dim"))


def _term_table() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=11)
    table.add_column(width=BAR_CELLS)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    return table
