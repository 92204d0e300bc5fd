"""The sections of a report that are text and tables."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from trimaran.app.report.axis_scale import SHOW, SIZE, Scale
from trimaran.app.report.markup import Content, Html, tag
from trimaran.app.report.plot import stacked_bar, swatch
from trimaran.core import Mesh, show_bytes, show_count, show_seconds

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
MAX_TITLE = 160  # characters of a heading
SIGNS = {"fault": "✗", "warning": "!", "note": "i"}  # a sign each, not only a colour


def header(facts: Tree) -> Html:
    """Return the name and the status of the run, its result in one sentence, and its main numbers."""
    status, measured = facts["status"], facts["measured"] or {}
    title = tag("h1", None, facts["name"], " ", tag("span", {"class": f"badge {GOOD.get(status, 'fair')}"}, status))
    lines = [tag("p", {"class": "lead"}, headline(facts)), tag("p", {"class": "quiet"}, facts["model"])]
    if facts["error"] or (status == "failed" and facts["why"]):
        lines.insert(0, tag("p", {"class": "why"}, _why(facts)))
    tiles = [
        ("loss, first to last", _arrow(facts["first_loss"], facts["final_loss"])),
        ("loss on held-out data", _number(facts["held_out_loss"])),
        *((f"{name} on held-out data", f"{fraction:.1%}") for name, fraction in facts["accuracy"].items()),
        (f"{facts['unit']}/s, median", show_count(measured["tokens_per_second"]) if measured else ""),
        ("step time, median", show_seconds(measured["step_seconds"]) if measured else ""),
        ("MFU, median", f"{measured['mfu']:.1%}" if measured.get("mfu") else ""),
        ("peak memory of a rank", show_bytes(measured["peak_bytes"]) if measured else ""),
        ("goodput", f"{facts['goodput']:.1%}" if facts["goodput"] is not None else ""),
        ("restarts", str(facts["restarts"]) if facts["restarts"] else ""),
        ("changes of the plan", _changes(facts["changes"])),
    ]
    shown = [tag("div", {"class": "tile first" if "→" in value else "tile"}, tag("b", None, value),
                 tag("span", None, name)) for name, value in tiles if value]  # fmt: skip
    return tag("header", None, title, *lines, tag("div", {"class": "tiles"}, *shown))


def _changes(changes: Sequence[Tree]) -> str:
    """Return how many changes of the running run were applied, and how long training paused for them."""
    pauses = [each.get("pause_seconds") or 0.0 for each in changes if each.get("status") == "applied"]
    return f"{len(pauses)}, paused for {show_seconds(sum(pauses))}" if pauses else ""


def headline(facts: Tree) -> str:
    """Return the result of the run in one sentence."""
    timeline, ranks = facts["timeline"], Mesh.model_validate(facts["plan"]["mesh"]).world_size
    where = f"{ranks} rank{'' if ranks == 1 else 's'}"
    took = f" in {show_seconds(timeline['end'] - timeline['begin'])}" if timeline["begin"] else ""
    if not facts["steps"]:
        return f"No step has finished yet; the plan has {where}."
    done = f"{facts['steps']:,}" + ("" if facts["steps"] == facts["total_steps"] else f" of {facts['total_steps']:,}")
    return f"{done} steps on {where}{took}."


def findings(facts: Tree) -> Html:
    """Return the doctor's findings: verdict, evidence, and the command that fixes it."""
    if facts["doctor_trouble"]:
        return tag("section", None, tag("h2", None, "Findings"), tag("p", {"class": "fair"}, facts["doctor_trouble"]))
    if not facts["findings"]:
        text = "The doctor found no problem." if facts["steps"] else "There is no finished step to diagnose yet."
        return tag("section", None, tag("h2", None, "Findings"), tag("p", None, text))
    return tag("section", None, tag("h2", None, "Findings"), *map(_finding, facts["findings"]))


def last_decision(facts: Tree) -> Html:
    """Return the autopilot's last decision, and where the others are; nothing if it decided nothing."""
    if not facts["last_decision"]:
        return Html("")
    kept = sum(each["outcome"] == "kept" for each in facts["decisions"])
    text = f"{kept} of {len(facts['decisions'])} decisions were kept. Decision {facts['last_decision']}."
    return tag("section", None, tag("h2", None, "Autopilot"), tag("p", None, text))


def _finding(each: Tree) -> Html:
    """Return a finding as a card. Only its heading is bold: what follows may hold messages and source lines."""
    title, detail = split_verdict(each["verdict"])
    gain = f", should save {each['gain']:.0%} of a step" if each["gain"] else ""
    severity = each["severity"]
    head = tag("h3", None, tag("span", {"class": f"severity {severity}"}, f"{SIGNS.get(severity, '')} {severity}"), " ",
               title, " ", tag("code", None, each["code"]))  # fmt: skip
    evidence = [tag("li", None, tag("span", None, name.replace("_", " ")), _brief(name, value))
                for name, value in each["evidence"].items() if value not in ({}, [], "", None)]  # fmt: skip
    about = [f"Cause: {each['culprit']}." if each["culprit"] else "",
             f"Expected: {each['expected_effect']}." if each["expected_effect"] else "",
             f"Confidence {each['confidence']:.0%}{gain}."]  # fmt: skip
    parts = [head, _message(detail), tag("p", None, " ".join(filter(None, about)))]
    parts += [tag("ul", {"class": "stats"}, *evidence)] if evidence else []
    parts += [tag("p", None, f"Fix: {each['fix']}")] if each["fix"] else []
    parts += [tag("p", None, "This command fixes it:"), tag("pre", {"class": "command"}, each["command"])] if each[
        "command"] else []  # fmt: skip
    return tag("article", {"class": f"card {severity}"}, *parts)


def split_verdict(verdict: str) -> tuple[str, str]:
    """Return the statement of a verdict and its details: messages, source lines, or nothing."""
    line, _, rest = verdict.partition("\n")
    title, colon, detail = line.partition(": ")
    title = title[:1].upper() + title[1:]
    return title[:MAX_TITLE], "\n".join(filter(None, [title[MAX_TITLE:], detail if colon else "", rest]))


def _message(text: str) -> Html:
    """Return a message of a program: several lines as they are, one line as text."""
    if not text:
        return Html("")
    return tag("pre", None, text) if "\n" in text else tag("p", None, text)


def comparison(facts: Tree) -> Html:
    """Return the predicted and the measured values, and their difference."""
    found = facts["comparison"]
    if not found:
        return tag("p", {"class": "quiet"}, "This plan has no prediction.")
    totals = [_compared(row, UNITS[row["name"]], name=NAMES[row["name"]]) for row in found["totals"]]
    steps = [_compared(row, "seconds") for row in found["time"]]
    axes = [_compared(row, "seconds") for row in found["comm"]]
    memory = [_compared(row, "bytes") for row in found["memory"]]
    columns = ["", "predicted", "measured", "difference"]
    note = f"✓: within the prediction's own error bar, ±{found['error']:.0%}"
    note += f" (memory ±{found['memory_error']:.0%})." if found["memory_error"] != found["error"] else "."
    note += f" No MFU: {facts['no_mfu']}." if facts["no_mfu"] else ""
    if not any(row["measured"] is not None for row in found["memory"]):
        note += " To measure the terms of memory: trimaran profile RUN --memory."
    note += f" Rates of the prediction: {found['source']}." if found["source"] else ""
    return tag("div", None, tag("div", {"class": "side"},
        tag("div", None, table(columns, totals), table(["step time by phase", *columns[1:]], steps) if steps else "",
            table(["exposed communication by axis", *columns[1:]], axes) if axes else ""),
        table(["memory of a rank by term", *columns[1:]], memory) if memory else "",
    ), tag("p", {"class": "quiet"}, note))  # fmt: skip


def _compared(row: Tree, unit: str, *, name: str = "") -> list[Content]:
    before, after, off = row["predicted"], row["measured"], row["difference"]
    difference: Content = "-"
    if off is not None:
        within = abs(off) <= row["error"]
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
    begin, *later = scale.ticks(2)
    texts = [_clock(begin), *(f"+ {show_seconds(at - begin)}" for at in later)]
    ends = tag("div", {"class": "x-labels"}, *(tag("span", None, text) for text in texts))
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
    """Return the newest incidents as cards: what happened, and the lines about it."""
    found = facts["incidents"]
    left = len(found) - MAX_ROWS
    more = [tag("p", {"class": "quiet"}, f"{left} earlier incidents: trimaran incidents {facts['run_dir']}")]
    return Html("".join([*(more if left > 0 else []), *map(_incident, found[-MAX_ROWS:])]))


def _incident(each: Tree) -> Html:
    first, _, rest = each["verdict"].partition("\n")
    title, detail = split_verdict(first)
    lines = "\n".join(line.removeprefix("  ") for line in rest.splitlines())
    action = tag("span", {"class": "severity warning"}, each["action"] or "open")
    head = tag("h3", None, action, " ", title)
    return tag("article", {"class": "card warning"}, head, _message(detail), tag("pre", None, lines) if lines else "")


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
        tag("p", None, "To train the same run again:"), tag("pre", {"class": "command"}, facts["command"]),
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


def _brief(name: str, value: object) -> str:
    """Return a value of the evidence with its unit, which is the end of its name."""
    unit = next((unit for end, unit in (("_bytes", "bytes"), ("_seconds", "seconds")) if name.endswith(end)), "")
    text = SHOW[unit](value) if unit and isinstance(value, int | float) else _text(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{str(key).replace('_', ' ')} {_text(each)}" for key, each in value.items())
    return ", ".join(map(_text, value)) if isinstance(value, list | tuple) else str(value)


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
