"""The sections of a report that are text and tables."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from trimaran.app.report.axis_scale import SHOW, SIZE, Scale
from trimaran.app.report.markup import Content, Html, tag
from trimaran.app.report.plot import stacked_bar, swatch
from trimaran.core import show_bytes, show_count, show_seconds

Tree = dict[str, Any]
GOOD = {"done": "good", "training": "good", "failed": "bad", "vanished": "bad"}
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
UNITS = {"step_seconds": "seconds", "tokens_per_second": "count", "mfu": "share", "peak_bytes": "bytes"}
NAMES = {"step_seconds": "step time", "tokens_per_second": "tokens/s", "mfu": "MFU", "peak_bytes": "peak memory"}
MAX_ROWS = 40


def header(facts: Tree) -> Html:
    """Return the name, the status and the main numbers of the run."""
    status, measured = facts["status"], facts["measured"] or {}
    timeline = facts["timeline"]
    title = tag("h1", None, facts["name"], tag("span", {"class": f"badge {GOOD.get(status, 'fair')}"}, status))
    lines = [tag("p", None, f"{facts['model']}; {facts['plan_words']}")]
    if facts["error"] or (status == "failed" and facts["why"]):
        lines.append(tag("p", {"class": "bad"}, _why(facts)))
    wall_clock = show_seconds(timeline["end"] - timeline["begin"]) if timeline["begin"] else ""
    tiles = [
        ("steps", f"{facts['steps']:,} of {facts['total_steps']:,}"),
        ("loss, first to last", _arrow(facts["first_loss"], facts["final_loss"])),
        ("loss on held-out data", _number(facts["held_out_loss"])),
        (f"{facts['unit']}/s, median", show_count(measured["tokens_per_second"]) if measured else ""),
        ("step time, median", show_seconds(measured["step_seconds"]) if measured else ""),
        ("MFU, median", f"{measured['mfu']:.1%}" if measured.get("mfu") else ""),
        ("peak memory", show_bytes(measured["peak_bytes"]) if measured else ""),
        ("goodput", f"{facts['goodput']:.1%}" if facts["goodput"] is not None else ""),
        ("wall-clock time", wall_clock),
        ("restarts", str(facts["restarts"]) if facts["restarts"] else ""),
    ]
    shown = [tag("div", {"class": "tile"}, tag("b", None, value), tag("span", None, name))
             for name, value in tiles if value]  # fmt: skip
    return tag("header", None, title, *lines, tag("div", {"class": "tiles"}, *shown))


def findings(facts: Tree) -> Html:
    """Return the doctor's findings: verdict, evidence, and the command that fixes it."""
    if facts["doctor_trouble"]:
        return tag("section", None, tag("h2", None, "Findings"), tag("p", {"class": "fair"}, facts["doctor_trouble"]))
    if not facts["findings"]:
        text = "The doctor found no problem." if facts["steps"] else "There is no finished step to diagnose yet."
        return tag("section", None, tag("h2", None, "Findings"), tag("p", None, text))
    return tag("section", None, tag("h2", None, "Findings"), *map(_finding, facts["findings"]))


def _finding(each: Tree) -> Html:
    evidence = [tag("li", None, f"{name.replace('_', ' ')}: {_brief(value)}")
                for name, value in each["evidence"].items()]  # fmt: skip
    gain = f"; should save {each['gain']:.0%} of a step" if each["gain"] else ""
    parts = [
        tag("h3", None, f"{each['code']}  {each['verdict']}"),
        tag("p", {"class": "quiet"}, " ".join(filter(None, [
            f"{each['severity']}, confidence {each['confidence']:.0%}{gain}.",
            f"Cause: {each['culprit']}." if each["culprit"] else "", each["expected_effect"]]))),
        tag("ul", {"class": "facts"}, *evidence),
    ]  # fmt: skip
    if each["fix"]:
        parts.append(tag("p", None, each["fix"]))
    if each["command"]:
        parts.append(tag("pre", None, each["command"]))
    return tag("article", {"class": f"finding {each['severity']}"}, *parts)


def comparison(facts: Tree) -> Html:
    """Return the predicted and the measured values, and their difference."""
    found = facts["comparison"]
    if not found:
        return tag("p", {"class": "quiet"}, "This plan has no prediction.")
    error = found["error"]
    totals = [_compared(row, UNITS[row["name"]], error, name=NAMES[row["name"]]) for row in found["totals"]]
    steps = [_compared(row, "seconds", error) for row in found["time"]]
    memory = [_compared(row, "bytes", error) for row in found["memory"]]
    columns = ["", "predicted", "measured", "difference"]
    note = f"✓: within the prediction's own error bar of {error:.0%}."
    if not any(row["measured"] is not None for row in found["memory"]):
        note += " To measure the terms of memory: trimaran profile RUN --memory."
    note += f" Rates of the prediction: {found['source']}." if found["source"] else ""
    return tag("div", None, tag("div", {"class": "side"},
        tag("div", None, table(columns, totals), table(["step time by phase", *columns[1:]], steps) if steps else ""),
        table(["memory of a rank by term", *columns[1:]], memory) if memory else "",
    ), tag("p", {"class": "quiet"}, note))  # fmt: skip


def _compared(row: Tree, unit: str, error: float, *, name: str = "") -> list[Content]:
    before, after, off = row["predicted"], row["measured"], row["difference"]
    difference: Content = "-"
    if off is not None:
        within = abs(off) <= error
        difference = tag("span", {"class": "good" if within else "bad"}, f"{off:+.0%} {'✓' if within else '!'}")
    shown = ["-" if value is None else SHOW[unit](value) for value in (before, after)]
    return [name or row["name"], *shown, difference]


def outliers(facts: Tree) -> Html:
    """Return which ranks were outliers, and how often."""
    ranks = facts["ranks_over_time"]
    if not ranks:
        return Html("")
    rows = [[f"rank {each['rank']}", each["what"].replace("_", " "), f"{each['times']} of {ranks['looked']} steps"]
            for each in ranks["outliers"]]  # fmt: skip
    return table(["outlier", "in", "how often"], rows) if rows else tag("p", None, "No rank is an outlier.")


def weights(facts: Tree) -> Html:
    """Return the latest norms and update ratios of each weight group."""
    rows = [[each["name"], _number(each["grad_norm"]), _number(each["update_ratio"])] for each in facts["groups"]]
    return table(["group", "gradient norm", "update / weight"], rows) if rows else Html("")


def ledger(facts: Tree) -> Html:
    """Return where every second since the launch went, and a timeline."""
    parts = []
    if found := facts["ledger"]:
        seconds = {name: value for name, value in found["seconds"].items() if value > 0}
        total = show_seconds(found["at_work"])
        kinds = {name: LEDGER_KINDS.get(name, "grey") for name in seconds}
        text = f"Goodput {found['goodput']:.1%}: compute and communication of steps that count, of {total}."
        parts = [tag("p", None, text), stacked_bar(seconds, kinds)]
    return Html("".join([*parts, _timeline(facts)]))


def _timeline(facts: Tree) -> Html:
    """Return a bar of time that shows attempts, checkpoints and incidents."""
    found = facts["timeline"]
    if not found["attempts"] or found["end"] <= found["begin"]:
        return Html("")
    scale = Scale(low=found["begin"], high=found["end"])
    shapes = [_attempt(each, scale) for each in found["attempts"]]
    shapes += [_event(each["time"], scale, "purple", f"checkpoint of step {each['step']}", 500, 800)
               for each in found["saved"][-2000:]]  # fmt: skip
    shapes += [_event(each["time"], scale, "red", f"{each['id']} {each['cause']}: {each['what']}", 0, SIZE)
               for each in facts["incidents"][-500:]]  # fmt: skip
    svg = tag("svg", {"viewBox": f"0 0 {SIZE} {SIZE}", "preserveAspectRatio": "none", "class": "bar", "role": "img",
                      "aria-label": "attempts, checkpoints and incidents over time"}, *shapes)  # fmt: skip
    ends = tag("div", {"class": "x-labels"}, *(tag("span", None, _clock(at)) for at in scale.ticks(2)))
    keys = [("sky", "ranks running", True), ("purple", "checkpoint", found["saved"])]
    keys.append(("red", "incident", facts["incidents"]))
    legend = [tag("li", None, swatch(kind), name) for kind, name, is_shown in keys if is_shown]
    return tag("div", None, tag("h3", None, "Timeline"), svg, ends, tag("ul", {"class": "legend"}, *legend))


def _attempt(attempt: Tree, scale: Scale) -> Html:
    begin, end = scale.position(attempt["time"]), scale.position(attempt["ended"] or scale.high)
    how = attempt["how"] or "running"
    label = f"start {attempt['number']}: {attempt['world_size']} ranks, {how}, step {attempt['step']}"
    return tag("rect", {"class": "fill sky", "x": round(begin, 1), "width": round(max(1.0, end - begin), 1), "y": 250,
                        "height": 500}, tag("title", None, label))  # fmt: skip


def _event(at: float, scale: Scale, kind: str, label: str, top: int, bottom: int) -> Html:
    x = round(scale.position(at), 1)
    return tag("line", {"class": f"mark {kind}", "x1": x, "x2": x, "y1": top, "y2": bottom}, tag("title", None, label))


def incidents(facts: Tree) -> Html:
    """Return the newest incidents with their text."""
    found = facts["incidents"]
    left = len(found) - MAX_ROWS
    more = [tag("p", {"class": "quiet"}, f"{left} earlier incidents: trimaran incidents {facts['run_dir']}")]
    return Html(
        "".join([*(more if left > 0 else []), *(tag("pre", None, each["verdict"]) for each in found[-MAX_ROWS:])])
    )


def checkpoints(facts: Tree) -> Html:
    """Return the checkpoints of the run."""
    stalls = {each["step"]: each["stall_seconds"] for each in facts["timeline"]["saved"]}
    rows = [
        [f"{each['step']}", each["status"] + (f": {each['why']}" if each["why"] else ""), show_bytes(each["bytes"]),
         show_seconds(stall) if isinstance(stall := stalls.get(each["step"]), int | float) else "-",
         _clock(each["time"]) if each["time"] else "-"]
        for each in facts["checkpoints"][-MAX_ROWS:]
    ]  # fmt: skip
    return table(["step", "state", "size", "training waited", "when"], rows) if rows else Html("")


def reproduction(facts: Tree) -> Html:
    """Return how to reproduce the run: the command, the recipe, the hosts and the versions."""
    used = [[name, ", ".join(values[:8])] for name, values in facts["machines_used"].items()]
    title = tag("summary", None, "The recipe with all defaults")
    return tag("section", None, tag("h2", None, "Reproduce it"),
        tag("p", None, "To train the same run again:"), tag("pre", None, facts["command"]),
        tag("p", {"class": "quiet"}, f"Run directory: {facts['run_dir']}"),
        table(["environment of the ranks", ""], used) if used else "",
        tag("details", None, title, tag("pre", None, facts["recipe"])),
        tag("footer", None, f"Made by trimaran {facts['version']} on {_clock(facts['made'])}. The same as JSON: ",
            tag("code", None, f"trimaran report {facts['run_dir']} --json")),
    )  # fmt: skip


def table(columns: Sequence[str], rows: Iterable[Sequence[Content]]) -> Html:
    """Return a table that scrolls horizontally if the page is too narrow."""
    head = tag("tr", None, *(tag("th", None, name) for name in columns))
    body = [tag("tr", None, *(tag("td", None, cell) for cell in row)) for row in rows]
    return tag("div", {"class": "scroll"}, tag("table", None, tag("thead", None, head), tag("tbody", None, *body)))


def _why(facts: Tree) -> str:
    error = facts["error"] or {}
    reason = error.get("what") or error.get("message") or facts["why"]
    return f"rank {error['rank']}: {reason}" if "rank" in error else str(reason)


def _arrow(first: float | None, last: float | None) -> str:
    return "" if first is None and last is None else f"{_number(first) or '-'} → {_number(last) or '-'}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _brief(value: object) -> str:
    text = _text(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
