"""Several runs beside each other: results, what differs in recipe and plan, and curves by step, tokens and time."""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimaran.app import StepHistory
from trimaran.core import UserError, show_bytes, show_count, show_seconds
from trimaran.runs import RunDirectory
from trimaran.ui.language import say
from trimaran.ui.report.draw_figure import draw_lines
from trimaran.ui.report.figure_axis import swatch
from trimaran.ui.report.markup import Content, Html, command, html_document, note, plots, section, table, tag
from trimaran.ui.report.part_facts import strict
from trimaran.ui.report.run_feed import RunFeed
from trimaran.ui.report.sections import GOOD
from trimaran.ui.viz.figures import Lines, Unit, ValueSeries

Tree = dict[str, Any]
Knot = tuple[float, float]
FORMAT = 1
MIN_RUNS, MAX_RUNS = 2, 8
MAX_KNOTS = 300
CURVES = ("loss", "held_out", "grad_norm", "tokens_per_second", "step_seconds", "peak_bytes", "lr")
PARTS = ("about", "state", "curves")
RESULTS = ("run_dir", "name", "model", "unit", "status", "steps", "total_steps", "first_loss", "final_loss",
           "held_out_loss", "goodput", "restarts", "plan_words")  # fmt: skip
IGNORED = ("name",)  # fields of a recipe that say nothing about its training


def compare_runs(runs: Sequence[RunDirectory]) -> Tree:
    """Return the facts about `runs` beside each other: lists have a value for each run, in the given order."""
    refuse_count(len(runs))
    return compare_feeds([RunFeed(run) for run in runs])


def compare_feeds(feeds: Sequence[RunFeed]) -> Tree:
    found = [feed.refresh(PARTS) for feed in feeds]
    recipes = [feed.state.recipe.model_dump(mode="json") for feed in feeds]
    plans = [feed.state.plan.model_dump(mode="json", exclude={"prediction"}) for feed in feeds]
    return strict({
        "format": FORMAT,
        "runs": [_result(facts, feed) for facts, feed in zip(found, feeds, strict=True)],
        "recipe": differences(recipes, ignored=IGNORED),
        "plan": differences(plans),
        "curves": {name: [facts["curves"].get(name, {}) for facts in found] for name in CURVES},
        "axes": {name: [knots[name] for knots in (progress_of(feed.state.history) for feed in feeds)]
                 for name in ("tokens", "seconds")},
    })  # fmt: skip


def refuse_count(count: int) -> None:
    if not MIN_RUNS <= count <= MAX_RUNS:
        raise UserError(
            "A042.runs-cannot-compared",
            where="the names of the runs",
            count=count,
            min_runs=MIN_RUNS,
            max_runs=MAX_RUNS,
        )


def _result(facts: Tree, feed: RunFeed) -> Tree:
    measured = facts["measured"] or {}
    speed = {name: measured.get(name) for name in ("tokens_per_second", "step_seconds", "peak_bytes", "mfu")}
    seconds = progress_of(feed.state.history)["seconds"]
    total = {"seconds": seconds[-1][1] if seconds else None, "world_size": feed.state.plan.mesh.world_size}
    return {name: facts[name] for name in RESULTS} | speed | total | {"path_name": feed.run.path.name}


def differences(trees: Sequence[Mapping[str, Any]], *, ignored: Sequence[str] = ()) -> list[Tree]:
    """Return the fields whose values differ, with the value of each tree; None where a tree has no such field."""
    leaves = [dict(_leaves(tree, "")) for tree in trees]
    names = dict.fromkeys(name for each in leaves for name in each)
    rows = [{"field": name, "values": [each.get(name) for each in leaves]} for name in names if name not in ignored]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def progress_of(history: StepHistory) -> dict[str, list[Knot]]:
    """Return tokens and seconds up to some of the steps. Tokens of joined steps are mean rate times seconds."""
    rows: list[tuple[float, float, float]] = []
    for block in history.blocks:
        seconds, rate = block.scalars.get("step_seconds"), block.scalars.get("tokens_per_second")
        if seconds is not None and rate is not None:
            rows.append((block.last, rate.total / rate.count * seconds.total, seconds.total))
    rows += [(step.step, float(step.tokens), step.step_seconds) for step in history.steps]
    tokens = seconds = 0.0
    knots: list[tuple[float, float, float]] = []
    for step, more_tokens, more_seconds in rows:
        if math.isfinite(more_tokens) and math.isfinite(more_seconds):
            tokens, seconds = tokens + more_tokens, seconds + more_seconds
            knots.append((step, tokens, seconds))
    every = max(1, math.ceil(len(knots) / MAX_KNOTS))
    kept = [*knots[:1], *knots[every - 1 :: every], *knots[-1:]]
    return {"tokens": [(step, each) for step, each, _ in kept], "seconds": [(step, each) for step, _, each in kept]}


def at_step(knots: Sequence[Sequence[float]], step: float) -> float | None:
    """Return the tokens or seconds at a step, between the knots by a straight line; None without knots."""
    if not knots:
        return None
    after = bisect_right(knots, step, key=lambda knot: knot[0])
    if after == 0:
        value = knots[0][1] * step / knots[0][0] if knots[0][0] else knots[0][1]
        return value if math.isfinite(value) else None
    if after == len(knots):
        return knots[-1][1]
    (low, before), (high, later) = knots[after - 1], knots[after]
    return before + (later - before) * (step - low) / ((high - low) or 1.0)


KINDS = ("blue", "orange", "green", "purple", "sky", "red", "brown", "grey")
AXIS_UNITS: Mapping[str, Unit] = {"step": "step", "tokens": "tokens", "seconds": "seconds"}
AXES = {"step": "by step", "tokens": "by tokens", "seconds": "by time in steps"}
# Of each curve: its title, its unit, and whether its scale may be logarithmic.
PLOTS: Mapping[str, tuple[str, Unit, bool]] = {
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
    title = say("Comparison of {count} runs", count=len(facts["runs"]))
    return html_document(title, [tag("h1", None, title), *comparison_parts(facts, axis="step")])


def comparison_parts(facts: Tree, *, axis: str) -> list[Html]:
    keys = [
        tag("li", None, swatch(KINDS[number]), tag("b", None, each["path_name"]), " ",
            tag("span", {"class": f"badge {GOOD.get(each['status'], 'fair')}"}, say(each["status"])))
        for number, each in enumerate(facts["runs"])
    ]  # fmt: skip
    words = ["trimaran", "report", *(each["run_dir"] for each in facts["runs"]), "--json"]
    return [
        tag("ul", {"class": "legend runs-legend"}, *keys),
        section(say("Curves"), curve_plots(facts, axis=axis)),
        section(say("Results"), results(facts)),
        section(say("Plan"), difference_table(facts, facts["plan"], say("The plans are the same."))),
        section(say("Recipe"), difference_table(facts, facts["recipe"], say("The recipes are the same."))),
        section(say("The same as JSON"), command(" ".join(words))),
    ]


def curve_plots(facts: Tree, *, axis: str) -> Html:
    found = [_plot(facts, name, axis) for name in PLOTS]
    remark = "A line of a long run is the mean of neighbouring steps."
    is_long = any("spread" in each for curves in facts["curves"].values() for each in curves)
    return Html(plots(found) + (note(say(remark)) if is_long else ""))


def _plot(facts: Tree, name: str, axis: str) -> Html:
    title, unit, may_log = PLOTS[name]
    curves = []
    for number, found in enumerate(facts["curves"][name]):
        knots = facts["axes"][axis][number] if axis in facts["axes"] else None
        means = found.get("points") or [(row[0], row[2]) for row in found.get("spread", ())]
        points = [(at, value) for step, value in means
                  if (at := step if knots is None else at_step(knots, step)) is not None]  # fmt: skip
        if points:
            label = facts["runs"][number]["path_name"]
            at, values = zip(*points, strict=True)
            curves.append(ValueSeries(name=label, color=KINDS[number], at=at, values=values))
    return draw_lines(Lines(title=say(title), unit=unit, series=curves, log_y=may_log, broad=name == "loss",
                            x_unit=AXIS_UNITS[axis]))  # fmt: skip


def results(facts: Tree) -> Html:
    runs = facts["runs"]
    rows = [
        [say("status"), *(say(each["status"]) for each in runs)],
        [say("model"), *(each["model"] for each in runs)],
        [say("plan"), *(each["plan_words"] for each in runs)],
        [say("ranks"), *(f"{each['world_size']:,}" for each in runs)],
        [say("steps"), *(f"{each['steps']:,} / {each['total_steps']:,}" for each in runs)],
        _best("last loss", runs, "final_loss", "{:.4g}".format, min),
        _best("loss on held-out data", runs, "held_out_loss", "{:.4g}".format, min),
        _best("tokens/s, median", runs, "tokens_per_second", show_count, max),
        _best("step time, median", runs, "step_seconds", show_seconds, min),
        _best("peak memory of a rank", runs, "peak_bytes", show_bytes, min),
        _best("MFU, median", runs, "mfu", "{:.1%}".format, max),
        _best("goodput", runs, "goodput", "{:.1%}".format, max),
        _best("time in steps", runs, "seconds", show_seconds, None),
        [say("restarts"), *(str(each["restarts"]) for each in runs)],
    ]
    found = table(["", *(each["path_name"] for each in runs)], [row for row in rows if any(row[1:])])
    return tag("div", {"class": "results"}, found)


def _best(
    name: str, runs: Sequence[Tree], field: str, show: Callable[[float], str],
    choose: Callable[[list[float]], float] | None,
) -> list[Content]:  # fmt: skip
    values = [each[field] for each in runs]
    known = [value for value in values if value is not None]
    best = choose(known) if choose and len({*known}) > 1 else None
    cells = ["" if value is None else tag("b", {"class": "good"}, f"{show(value)} ✓") if value == best else show(value)
             for value in values]  # fmt: skip
    return [say(name), *cells]


def difference_table(facts: Tree, rows: Sequence[Tree], none: str) -> Html:
    if not rows:
        return tag("p", None, none)
    shown: list[list[Content]] = []
    for row in rows:
        texts = [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in row["values"]]
        short = [each if len(each) <= MAX_VALUE else f"{each[: MAX_VALUE - 1]}…" for each in texts]
        shown.append([tag("code", None, row["field"]), *short])
    return table([say("field"), *(each["path_name"] for each in facts["runs"])], shown)
