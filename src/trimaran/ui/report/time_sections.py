"""Where the time of a run went: goodput as a waterfall of wall-clock, the ledger, and a timeline."""

from typing import Any

from trimaran.core import show_seconds
from trimaran.ui.report.axis_scale import SIZE, Scale
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.plot import stacked_bar, swatch
from trimaran.ui.report.tables import clock
from trimaran.ui.report.words import say

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
    """Return where every second since the launch went, as a waterfall and as a bar, and a timeline."""
    parts = []
    if found := facts["ledger"]:
        seconds = {say(name): value for name, value in found["seconds"].items() if value > MIN_SECONDS}
        kinds = {say(name): LEDGER_KINDS.get(name, "grey") for name in found["seconds"]}
        text = say("Goodput {goodput}: compute and communication of steps that count, of {total}.",
                   goodput=f"{found['goodput']:.1%}", total=show_seconds(found["at_work"]))  # fmt: skip
        parts = [tag("p", None, text), waterfall(facts), stacked_bar(seconds, kinds)]
    return Html("".join([*parts, timeline(facts)]))


def timeline(facts: Tree) -> Html:
    """Return a bar of time that shows attempts, checkpoints and incidents."""
    found = facts["timeline"]
    if not found["attempts"] or found["end"] <= found["begin"]:
        return Html("")
    scale = Scale(low=found["begin"], high=found["end"])
    shapes = [_attempt(each, scale) for each in found["attempts"]]
    shapes += [_event(each["time"], scale, "purple", say("checkpoint of step {step}", step=each["step"]), 500, 800)
               for each in found["saved"][-2000:]]  # fmt: skip
    shapes += [_event(each["time"], scale, "red", f"{each['id']} {each['cause']}: {each['what']}", 0, SIZE)
               for each in facts["incidents"][-500:]]  # fmt: skip
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "class": "bar", "role": "img",
                      "aria-label": say("attempts, checkpoints and incidents over time")}, *shapes)  # fmt: skip
    begin, *later = scale.ticks(2)
    texts = [clock(begin), *(f"+ {show_seconds(at - begin)}" for at in later)]
    ends = tag("div", {"class": "x-labels"}, *(tag("span", None, text) for text in texts))
    keys = [("sky", "ranks running", True), ("purple", "checkpoint", found["saved"])]
    keys.append(("red", "incident", facts["incidents"]))
    legend = [tag("li", None, swatch(kind), say(name)) for kind, name, is_shown in keys if is_shown]
    return tag("div", None, tag("h3", None, say("Timeline")), svg, ends, tag("ul", {"class": "legend"}, *legend))


def _attempt(attempt: Tree, scale: Scale) -> Html:
    begin, end = scale.position(attempt["time"]), scale.position(attempt["ended"] or scale.high)
    label = say("start {number}: {ranks} ranks, {how}, step {step}", number=attempt["number"],
                ranks=attempt["world_size"], how=say(attempt["how"] or "running"), step=attempt["step"])  # fmt: skip
    return tag("rect", {"class": "fill sky", "x": round(begin, 1), "width": round(max(1.0, end - begin), 1), "y": 250,
                        "height": 500}, tag("title", None, label))  # fmt: skip


def _event(at: float, scale: Scale, kind: str, label: str, top: int, bottom: int) -> Html:
    x = round(scale.position(at), 1)
    return tag("line", {"class": f"mark {kind}", "x1": x, "x2": x, "y1": top, "y2": bottom}, tag("title", None, label))
