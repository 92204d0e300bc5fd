"""Several runs beside each other as markup: results, what differs, and curves over each other."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from trimaran.core import show_bytes, show_count, show_seconds
from trimaran.ui.report.compare_facts import at_step
from trimaran.ui.report.document import html_document
from trimaran.ui.report.markup import Content, Html, tag
from trimaran.ui.report.plot import Curve, Plot, draw, swatch
from trimaran.ui.report.sections import GOOD
from trimaran.ui.report.tables import command, note, plots, section, table
from trimaran.ui.report.words import say

Tree = dict[str, Any]
KINDS = ("blue", "orange", "green", "purple", "sky", "red", "brown", "grey")
AXES = {"step": "by step", "tokens": "by tokens", "seconds": "by time in steps"}
PLOTS = {  # of each curve: its title, its unit, and whether its scale may be logarithmic
    "loss": ("Loss", "number", False),
    "held_out": ("Loss on held-out data", "number", False),
    "tokens_per_second": ("Tokens per second", "count", False),
    "step_seconds": ("Step time", "seconds", True),
    "peak_bytes": ("Memory of a rank", "bytes", False),
    "grad_norm": ("Gradient norm", "number", True),
    "lr": ("Learning rate", "number", False),
}
MAX_VALUE = 60  # characters of a value of a recipe


def compare_page(facts: Tree) -> str:
    """Return the comparison as one HTML page."""
    title = say("Comparison of {count} runs", count=len(facts["runs"]))
    return html_document(title, [tag("h1", None, title), *comparison_parts(facts, axis="step")])


def comparison_parts(facts: Tree, *, axis: str) -> list[Html]:
    """Return all sections of the comparison."""
    return [
        legend(facts),
        section(say("Curves"), curve_plots(facts, axis=axis)),
        section(say("Results"), results(facts)),
        section(say("Plan"), difference_table(facts, facts["plan"], say("The plans are the same."))),
        section(say("Recipe"), difference_table(facts, facts["recipe"], say("The recipes are the same."))),
        section(say("The same as JSON"), command(json_command(facts))),
    ]


def json_command(facts: Tree) -> str:
    return " ".join(["trimaran", "report", *(each["run_dir"] for each in facts["runs"]), "--json"])


def legend(facts: Tree) -> Html:
    """Return the runs with their colours."""
    items = [
        tag("li", None, swatch(KINDS[number]), tag("b", None, each["path_name"]), " ",
            tag("span", {"class": f"badge {GOOD.get(each['status'], 'fair')}"}, say(each["status"])))
        for number, each in enumerate(facts["runs"])
    ]  # fmt: skip
    return tag("ul", {"class": "legend runs-legend"}, *items)


def curve_plots(facts: Tree, *, axis: str) -> Html:
    """Return the curves of all runs over each other, by step, by tokens or by time."""
    found = [_plot(facts, name, axis) for name in PLOTS]
    remark = "A line of a long run is the mean of neighbouring steps."
    is_long = any("spread" in each for curves in facts["curves"].values() for each in curves)
    return Html(plots(found) + (note(say(remark)) if is_long else ""))


def _plot(facts: Tree, name: str, axis: str) -> Html:
    title, unit, may_log = PLOTS[name]
    curves = []
    for number, found in enumerate(facts["curves"][name]):
        knots = facts["axes"][axis][number] if axis in facts["axes"] else None
        points = [(at, value) for step, value in _points(found)
                  if (at := step if knots is None else at_step(knots, step)) is not None]  # fmt: skip
        if points:
            label = facts["runs"][number]["path_name"]
            curves.append(Curve(name=label, kind=KINDS[number], points=points))
    since, counted = (0.0 if axis == "seconds" else None), say("tokens") if axis == "tokens" else ""
    return draw(Plot(title=say(title), unit=unit, curves=curves, may_log=may_log, wide=name == "loss", since=since,
                     counted=counted))  # fmt: skip


def _points(found: Tree) -> list[Sequence[float]]:
    if "points" in found:
        return found["points"]
    return [(row[0], row[2]) for row in found.get("spread", ())]


def results(facts: Tree) -> Html:
    """Return the main numbers of each run; the best of each row is marked."""
    runs = facts["runs"]
    rows = [
        _row("status", [say(each["status"]) for each in runs]),
        _row("model", [each["model"] for each in runs]),
        _row("plan", [each["plan_words"] for each in runs]),
        _row("ranks", [f"{each['world_size']:,}" for each in runs]),
        _row("steps", [f"{each['steps']:,} / {each['total_steps']:,}" for each in runs]),
        _best("last loss", runs, "final_loss", "{:.4g}".format, min),
        _best("loss on held-out data", runs, "held_out_loss", "{:.4g}".format, min),
        _best("tokens/s, median", runs, "tokens_per_second", show_count, max),
        _best("step time, median", runs, "step_seconds", show_seconds, min),
        _best("peak memory of a rank", runs, "peak_bytes", show_bytes, min),
        _best("MFU, median", runs, "mfu", "{:.1%}".format, max),
        _best("goodput", runs, "goodput", "{:.1%}".format, max),
        _best("time in steps", runs, "seconds", show_seconds, None),
        _row("restarts", [str(each["restarts"]) for each in runs]),
    ]
    found = table(["", *(each["path_name"] for each in runs)], [row for row in rows if any(row[1:])])
    return tag("div", {"class": "results"}, found)


def _row(name: str, values: Sequence[str]) -> list[Content]:
    return [say(name), *values]


def _best(
    name: str,
    runs: Sequence[Tree],
    field: str,
    show: Callable[[float], str],
    choose: Callable[[list[float]], float] | None,
) -> list[Content]:
    """Return a row; the best value has a tick, if the values differ."""
    values = [each[field] for each in runs]
    known = [value for value in values if value is not None]
    best = choose(known) if choose and len({*known}) > 1 else None
    cells = ["" if value is None else tag("b", {"class": "good"}, f"{show(value)} ✓") if value == best else show(value)
             for value in values]  # fmt: skip
    return [say(name), *cells]


def difference_table(facts: Tree, rows: Sequence[Tree], none: str) -> Html:
    """Return the fields that differ."""
    if not rows:
        return tag("p", None, none)
    shown = [[tag("code", None, row["field"]), *(_value(value) for value in row["values"])] for row in rows]
    return table([say("field"), *(each["path_name"] for each in facts["runs"])], shown)


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"
