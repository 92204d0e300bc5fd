"""Prints a view: its sentences, its formulas with their numbers, and its figures as tables and bars."""

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from trimaran.app import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, curve, stacked_bar
from trimaran.ui.viz.catalogue import SHORT_NAMES
from trimaran.ui.viz.figures import (
    Bars,
    Figure,
    FileText,
    Lines,
    Matrix,
    NodeGraph,
    PlanView,
    Scatter,
    Table,
    Timeline,
    show_value,
)

COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, RED)
BAR_CELLS, CURVE_CELLS, CURVE_LINES = 40, 60, 8
MAX_ROWS = 40


def list_views(console: Console) -> None:
    table = RichTable.grid(padding=(0, 2, 0, 0))
    for name, module in SHORT_NAMES.items():
        table.add_row(Text(name, style="bold"), module.QUESTION)
    console.print(table)


def show_view(view: PlanView, console: Console) -> None:
    console.print(Text(view.title, style="bold"))
    console.print(Text(view.about, style="dim"))
    for name, mode in view.modes.items():
        console.print()
        console.print(Text(name, style="bold underline"))
        for sentence in mode.sentences:
            console.print(sentence, markup=False)
        if mode.formulas:
            table = RichTable.grid(padding=(0, 2, 0, 0))
            for each in mode.formulas:
                table.add_row(each.name, Text(each.symbols, style="dim"), each.numbers,
                              Text(show_value(each.value, each.unit), style="bold"))  # fmt: skip
            console.print(table)
        for figure in mode.figures:
            console.print()
            console.print(Text(figure.title, style="bold"))
            for line in _figure(figure):
                console.print(line)
    if view.controls:
        console.print()
        values = {each.name: each.value for each in view.controls}
        shown = "  ".join(
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}" for name, value in values.items()
        )
        console.print(Text(f"controls (--with): {shown}", style="dim"))


def _figure(figure: Figure) -> Iterator[RichTable | Text | str]:
    match figure:
        case Bars():
            totals = [sum(each.values[at] or 0.0 for each in figure.series) for at in range(len(figure.categories))]
            most = max([*totals, *figure.limits.values()], default=0.0) or 1.0
            colors = {series.name: COLORS[number % len(COLORS)] for number, series in enumerate(figure.series)}
            table = RichTable.grid(padding=(0, 2, 0, 0))
            for at, (category, total) in enumerate(zip(figure.categories, totals, strict=True)):
                parts = {series.name: series.values[at] or 0.0 for series in figure.series}
                bar = stacked_bar(parts, colors, width=max(1, round(BAR_CELLS * total / most)))
                table.add_row(category, bar, show_value(total, figure.unit))
            yield table
            legend = Text()
            for name, color in colors.items() if len(colors) > 1 else ():
                legend.append("█ ", style=color).append(f"{name}  ")
            for name, limit in figure.limits.items():
                legend.append(f"{name}: {show_value(limit, figure.unit)}")
            yield legend
        case Table():
            yield _table(figure.columns, figure.rows)
        case Matrix():
            rows = [(name, *labels) for name, labels in zip(figure.rows, figure.labels, strict=True)]
            yield _table(("", *figure.columns), rows)
        case Scatter():
            columns = ("plan", figure.x_name, figure.y_name, "")
            yield _table(columns, [(each.name, show_value(each.x, figure.x_unit), show_value(each.y, figure.y_unit),
                                    each.kind) for each in figure.points])  # fmt: skip
        case Lines():
            for series in figure.series:
                values = [each for each in series.values if each is not None]
                ends = f"{show_value(min(values), figure.unit)} to {show_value(max(values), figure.unit)}"
                yield Text(f"{series.name}: {ends}")
                yield "\n".join(curve(values, width=CURVE_CELLS, height=CURVE_LINES))
            ends = f"{show_value(figure.x[0], figure.x_unit)} to {show_value(figure.x[-1], figure.x_unit)}"
            yield Text(f"{figure.x_name}: {ends}", style="dim")
            for name, limit in figure.limits.items():
                yield Text(f"{name}: {show_value(limit, figure.unit)}", style="dim")
        case Timeline():
            # One line of characters for each row: the number of what is done in each moment.
            end = max((each.end for each in figure.spans), default=1.0)
            cells, table = 2 * BAR_CELLS, RichTable.grid(padding=(0, 1, 0, 0))
            kinds = list(dict.fromkeys(each.kind for each in figure.spans))
            for number, row in enumerate(figure.rows):
                line, at = Text(), 0
                for span in sorted((each for each in figure.spans if each.row == number), key=lambda each: each.start):
                    first, last = round(cells * span.start / end), round(cells * span.end / end)
                    last = max(last, first + (span.start == span.end))  # a moment has one cell
                    first = max(first, at)
                    line.append(" " * (first - at))
                    style = f"{COLORS[kinds.index(span.kind) % len(COLORS)]} reverse"
                    line.append(span.label[: max(0, last - first)].ljust(max(0, last - first)), style=style)
                    at = max(at, last)
                table.add_row(row, line)
            table.add_row("", Text("  ".join(kinds), style="dim"))
            yield table
        case NodeGraph():
            names = [node.name for node in figure.nodes]
            arrows = [f"{names[each.source]} -> {names[each.target]} {each.text}".rstrip() for each in figure.arrows]
            yield Text("\n".join(arrows) or "-")
        case FileText():
            yield Text(figure.content)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RichTable:
    table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows[:MAX_ROWS]:
        table.add_row(*map(Text, row))
    if len(rows) > MAX_ROWS:
        table.add_row(Text(f"and {len(rows) - MAX_ROWS} more", style="dim"))
    return table
