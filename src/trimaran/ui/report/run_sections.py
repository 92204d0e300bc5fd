"""The sections about a run, by name: the report shows them one below the other, the web page as tabs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.core import show_seconds
from trimaran.runs import RunDirectory
from trimaran.ui.language import say
from trimaran.ui.report.draw_figure import stacked_bar
from trimaran.ui.report.figure_axis import SIZE, FigureAxis, legend, stretched
from trimaran.ui.report.markup import Html, clock, html_document, note, plots, section, tag
from trimaran.ui.report.plots import PHASE_KINDS, downsample_note, machine_plots, phases_plot, spread_plots, step_plots
from trimaran.ui.report.rank_pictures import rank_layout, rank_matrix
from trimaran.ui.report.run_feed import RunFeed
from trimaran.ui.report.sections import (
    checkpoints,
    commands,
    comparison,
    findings,
    header,
    incidents,
    last_decision,
    machine_tables,
    outliers,
    reproduction,
    samples,
    weights,
)
from trimaran.ui.report.view_page import views

Tree = dict[str, Any]
LEDGER_KINDS = {
    "compute": "green",
    "communication": "red",
    "data": "orange",
    "straggler": "yellow",
    "save": "purple",
    "evaluation": "sky",
    "compile": "blue",
    "init": "grey",
    "restart": "ink",
    "replay": "brown",
    "idle": "pale",
}
WATERFALL = {  # of a group of categories: its colour and what it means
    "queue": ("pale", "no process ran: before the first start, or between a stop and a resume"),
    "start": ("grey", "ranks start, build the model, compile"),
    "restart": ("ink", "ranks are restarted after a fault"),
    "replay": ("brown", "steps that were computed again after a fault"),
    "stall": ("orange", "steps wait: for data, for the slowest rank, for a checkpoint or an evaluation"),
    "useful": ("green", "compute and communication of steps that count"),
}
BAR_HEIGHT = 26
MIN_SECONDS = 5e-4  # that are shown; less would be 0 ms


def waterfall(facts: Tree) -> Html:
    """Return all time since the run was made as bars, each beginning where the one above ends; the last is useful."""
    found = facts["waterfall"]
    if not found or found["total"] <= 0:
        return Html("")
    total, passed, rows = found["total"], 0.0, []
    rows.append(_bar(say("wall-clock"), say("since the run was made"), total, 0.0, total, "sky"))
    for group in found["groups"]:
        kind, meaning = WATERFALL[group["name"]]
        if group["seconds"] > MIN_SECONDS or group["name"] == "useful":
            parts = ", ".join(f"{say(name)} {show_seconds(value)}" for name, value in group["parts"].items()
                              if value > MIN_SECONDS)  # fmt: skip
            detail = f"{say(meaning)}: {parts}" if len(group["parts"]) > 1 else say(meaning)
            rows.append(_bar(say(group["name"]), detail, group["seconds"], passed, total, kind))
            passed += group["seconds"]
    return tag("table", {"class": "waterfall"}, tag("tbody", None, *rows))


def _bar(name: str, detail: str, seconds: float, begin: float, total: float, kind: str) -> Html:
    place = {"x": round(begin / total * SIZE, 1), "width": round(max(seconds / total * SIZE, 1.0), 1)}
    shape = tag("rect", {"class": f"fill {kind}", **place, "y": 0, "height": BAR_HEIGHT},
                tag("title", None, f"{name}: {show_seconds(seconds)}"))  # fmt: skip
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {BAR_HEIGHT}", "preserveAspectRatio": "none", "class": "fall",
                      "role": "img", "aria-label": f"{name} {show_seconds(seconds)}"}, shape)  # fmt: skip
    label = tag("th", None, tag("b", None, name), tag("span", {"class": "quiet"}, detail))
    value = tag("td", None, f"{show_seconds(seconds)} ", tag("span", {"class": "quiet"}, f"{seconds / total:.1%}"))
    return tag("tr", None, label, tag("td", {"class": "bar-cell"}, svg), value)


def ledger(facts: Tree) -> Html:
    parts = []
    if found := facts["ledger"]:
        seconds = {say(name): value for name, value in found["seconds"].items() if value > MIN_SECONDS}
        kinds = {say(name): LEDGER_KINDS.get(name, "grey") for name in found["seconds"]}
        text = say("Goodput {goodput}: compute and communication of steps that count, of {total}.",
                   goodput=f"{found['goodput']:.1%}", total=show_seconds(found["at_work"]))  # fmt: skip
        parts = [tag("p", None, text), waterfall(facts), stacked_bar(seconds, kinds)]
    return Html("".join([*parts, timeline(facts)]))


def timeline(facts: Tree) -> Html:
    found = facts["timeline"]
    if not found["attempts"] or found["end"] <= found["begin"]:
        return Html("")
    axis = FigureAxis(found["begin"], found["end"])
    shapes = []
    for each in found["attempts"]:
        begin, end = SIZE * axis.place(each["time"]), SIZE * axis.place(each["ended"] or axis.high)
        label = say("start {number}: {ranks} ranks, {how}, step {step}", number=each["number"],
                    ranks=each["world_size"], how=say(each["how"] or "running"), step=each["step"])  # fmt: skip
        shapes.append(tag("rect", {"class": "fill sky", "x": round(begin, 1), "width": round(max(1.0, end - begin), 1),
                                   "y": 250, "height": 500}, tag("title", None, label)))  # fmt: skip
    events = [(each["time"], "purple", say("checkpoint of step {step}", step=each["step"]), 500, 800)
              for each in found["saved"][-2000:]]  # fmt: skip
    events += [(each["time"], "red", f"{each['id']} {each['cause']}: {each['what']}", 0, SIZE)
               for each in facts["incidents"][-500:]]  # fmt: skip
    for at, kind, label, top, bottom in events:
        x = round(SIZE * axis.place(at), 1)
        shapes.append(tag("line", {"class": f"mark {kind}", "x1": x, "x2": x, "y1": top, "y2": bottom},
                          tag("title", None, label)))  # fmt: skip
    svg = stretched(shapes, say("attempts, checkpoints and incidents over time"), kind="bar")
    begin, *later = axis.even_values(2)
    texts = [clock(begin), *(f"+ {show_seconds(at - begin)}" for at in later)]
    ends = tag("div", {"class": "x-labels"}, *(tag("span", None, text) for text in texts))
    keys = [("sky", "ranks running", True), ("purple", "checkpoint", found["saved"])]
    keys.append(("red", "incident", facts["incidents"]))
    shown = legend([(say(name), kind) for kind, name, is_shown in keys if is_shown])
    return tag("div", None, tag("h3", None, say("Timeline")), svg, ends, shown)


def facts_of(run: RunDirectory) -> dict[str, Any]:
    return RunFeed(run).refresh()


@dataclass(frozen=True, slots=True)
class RunSection:
    """One section: the parts of the facts that it shows (see `run_feed`), and how it is drawn. It may be empty."""

    parts: tuple[str, ...]
    draw: Callable[[Tree], Html]


def training(facts: Tree, *, may_zoom: bool = False) -> Html:
    return section(say("Training"), note(downsample_note(facts)), plots(step_plots(facts, may_zoom=may_zoom)))


def _layout(facts: Tree) -> Html:
    return section(say("Parallel layout"), tag("p", None, facts["plan_words"]), rank_layout(facts))


def _phases(facts: Tree) -> Html:
    phases = {say(name): seconds for name, seconds in facts["phases"].items()}
    kinds = {say(name): kind for name, kind in PHASE_KINDS.items()}
    now = stacked_bar(phases, kinds) if phases else Html("")
    return section(say("Time of a step"), plots([phases_plot(facts)]), now)


def _ranks(facts: Tree) -> Html:
    matrix = rank_matrix(facts) if facts["ranks_now"] else Html("")
    return section(say("Ranks"), matrix, plots(spread_plots(facts)), outliers(facts))


def _machines(facts: Tree) -> Html:
    return section(say("Machines"), plots(machine_plots(facts)), machine_tables(facts))


def _titled(title: str, draw: Callable[[Tree], Html]) -> Callable[[Tree], Html]:
    return lambda facts: section(say(title), draw(facts))


SECTIONS: Mapping[str, RunSection] = {
    "header": RunSection(("about", "state"), header),
    "training": RunSection(("about", "state", "curves"), training),
    "findings": RunSection(("state", "findings"), findings),
    "autopilot": RunSection(("state",), last_decision),
    "layout": RunSection(("about", "state"), _layout),
    "comparison": RunSection(("state",), _titled("Predicted and measured", comparison)),
    "phases": RunSection(("state", "phases"), _phases),
    "ranks": RunSection(("details", "ranks"), _ranks),
    "weights": RunSection(("state",), _titled("Weights", weights)),
    "time": RunSection(("state",), _titled("Time of the run", ledger)),
    "incidents": RunSection(("state",), _titled("Incidents", incidents)),
    "checkpoints": RunSection(("state", "checkpoints"), _titled("Checkpoints", checkpoints)),
    "machines": RunSection(("state", "machines"), _machines),
    "samples": RunSection(("state",), _titled("Samples", samples)),
    "views": RunSection(("views",), _titled("Views of the plan", views)),
    "commands": RunSection(("state",), _titled("Commands", commands)),
    "reproduction": RunSection(("about", "state"), reproduction),
}
REPORT = (
    "header", "training", "findings", "autopilot", "layout", "comparison", "views", "phases", "ranks", "weights",
    "time", "incidents", "checkpoints", "samples", "machines", "reproduction",
)  # fmt: skip


def page_of(facts: Tree) -> str:
    return html_document(f"{facts['name']}: {facts['status']}", [SECTIONS[name].draw(facts) for name in REPORT])
