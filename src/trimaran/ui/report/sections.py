"""The sections of a report that are text and tables: the result, findings, prediction, weights, commands."""

from collections.abc import Sequence
from typing import Any

from trimaran.core import Mesh, show_bytes, show_count, show_seconds
from trimaran.ui.report.axis_scale import SHOW
from trimaran.ui.report.markup import Content, Html, tag
from trimaran.ui.report.tables import clock, command, message, note, section, table
from trimaran.ui.report.words import say

Tree = dict[str, Any]
GOOD = {"done": "good", "training": "good", "failed": "bad", "vanished": "bad"}
UNITS = {"step_seconds": "seconds", "tokens_per_second": "count", "mfu": "share", "peak_bytes": "bytes"}
NAMES = {"step_seconds": "step time", "tokens_per_second": "tokens/s", "mfu": "MFU", "peak_bytes": "peak memory"}
MAX_TITLE = 160  # characters of a heading
SIGNS = {"fault": "✗", "warning": "!", "note": "i"}  # a sign each, not only a colour


def header(facts: Tree) -> Html:
    """Return the name and the status of the run, its result in one sentence, and its main numbers."""
    status = facts["status"]
    badge = tag("span", {"class": f"badge {GOOD.get(status, 'fair')}"}, say(status))
    lines = [tag("p", {"class": "lead"}, headline(facts)), tag("p", {"class": "quiet"}, facts["model"])]
    if facts["error"] or (status == "failed" and facts["why"]):
        lines.insert(0, tag("p", {"class": "why"}, _why(facts)))
    return tag("header", None, tag("h1", None, facts["name"], " ", badge), *lines, *unread(facts), tiles(facts))


def unread(facts: Tree) -> list[Html]:
    """Return what could not be read of the run's files, or was not read: a paragraph each."""
    texts = [
        say(
            "{file}: a line of {size} at byte {offset} is damaged and was skipped.",
            file=each["file"],
            size=show_bytes(each["num_bytes"]),
            offset=f"{each['offset']:,}",
        )
        for each in facts["skipped_lines"]
    ]
    if facts["estimated_steps"]:
        count = show_count(facts["estimated_steps"])
        texts.append(
            say(
                "The index of the metrics is missing or incomplete: {count} steps were not read, and sums and curves "
                "are estimates. The page of an ended run rebuilds it while it is open.",
                count=count,
            )
        )
    return [tag("p", {"class": "fair"}, text) for text in texts]


def _accuracy(facts: Tree) -> list[tuple[str, str]]:
    counts = {name: f" / {count:,.0f}" for name, count in facts["accuracy_counts"].items()}
    shares = facts["accuracy"].items()
    return [(say("{name} on held-out data", name=name), f"{share:.1%}{counts.get(name, '')}") for name, share in shares]


def tiles(facts: Tree) -> Html:
    """Return the main numbers of the run."""
    measured, unit = facts["measured"] or {}, say(facts["unit"])
    found = [
        (say("loss, first to last"), _arrow(facts["first_loss"], facts["final_loss"])),
        (say("loss on held-out data"), _number(facts["held_out_loss"])),
        *_accuracy(facts),
        (say("{unit}/s, median", unit=unit), show_count(measured["tokens_per_second"]) if measured else ""),
        (say("step time, median"), show_seconds(measured["step_seconds"]) if measured else ""),
        (say("MFU, median"), f"{measured['mfu']:.1%}" if measured.get("mfu") else ""),
        (say("peak memory of a rank"), show_bytes(measured["peak_bytes"]) if measured else ""),
        (say("goodput"), f"{facts['goodput']:.1%}" if facts["goodput"] is not None else ""),
        (say("restarts"), str(facts["restarts"]) if facts["restarts"] else ""),
        (say("changes of the plan"), _changes(facts["changes"])),
    ]
    shown = [tag("div", {"class": "tile first" if "→" in value else "tile"}, tag("b", None, value),
                 tag("span", None, name)) for name, value in found if value]  # fmt: skip
    return tag("div", {"class": "tiles"}, *shown)


def _changes(changes: Sequence[Tree]) -> str:
    """Return how many changes of the running run were applied, and how long training paused for them."""
    pauses = [each.get("pause_seconds") or 0.0 for each in changes if each.get("status") == "applied"]
    return say("{count}, paused for {time}", count=len(pauses), time=show_seconds(sum(pauses))) if pauses else ""


def headline(facts: Tree) -> str:
    """Return the result of the run in one sentence."""
    timeline, ranks = facts["timeline"], Mesh.model_validate(facts["plan"]["mesh"]).world_size
    where = say("1 rank") if ranks == 1 else say("{count} ranks", count=ranks)
    if not facts["steps"]:
        return say("No step has finished yet; the plan has {ranks}.", ranks=where)
    values: Tree = {"done": f"{facts['steps']:,}", "total": f"{facts['total_steps']:,}", "ranks": where}
    values["time"] = show_seconds(timeline["end"] - timeline["begin"]) if timeline["begin"] else ""
    if facts["steps"] == facts["total_steps"]:
        text = "{done} steps on {ranks} in {time}." if timeline["begin"] else "{done} steps on {ranks}."
    else:
        text = "{done} of {total} steps on {ranks} in {time}." if timeline["begin"] else "{done} of {total} steps."
    return say(text, **values)


def findings(facts: Tree) -> Html:
    """Return the doctor's findings: verdict, evidence, and the command that fixes it."""
    title = say("Findings")
    if facts["doctor_trouble"]:
        return section(title, tag("p", {"class": "fair"}, facts["doctor_trouble"]))
    if not facts["findings"]:
        none = "The doctor found no problem." if facts["steps"] else "There is no finished step to diagnose yet."
        return section(title, tag("p", None, say(none)), *_targets(facts))
    return section(title, *map(_finding, facts["findings"]), *_targets(facts))


def _targets(facts: Tree) -> list[Html]:
    """Return the targets that were measured, each with whether it is met; nothing without any."""
    rows = [tag("li", {"class": "good" if each["met"] else "fair"},
                say("Target met: {what}", what=each["text"]) if each["met"]
                else say("Target missed: {what}", what=each["text"])) for each in facts["targets"]]  # fmt: skip
    return [tag("ul", {"class": "targets"}, *rows)] if rows else []


def _finding(each: Tree) -> Html:
    """Return a finding as a card. Only its heading is bold: what follows may hold messages and source lines."""
    title, detail = split_verdict(each["verdict"])
    severity = each["severity"]
    head = tag("h3", None,
               tag("span", {"class": f"severity {severity}"}, f"{SIGNS.get(severity, '')} {say(severity)}"), " ",
               title, " ", tag("code", None, each["code"]))  # fmt: skip
    evidence = [tag("li", None, tag("span", None, name.replace("_", " ")), brief(name, value))
                for name, value in each["evidence"].items() if value not in ({}, [], "", None)]  # fmt: skip
    sure, gain = f"{each['confidence']:.0%}", f"{each['gain']:.0%}" if each["gain"] else ""
    about = [say("Cause: {culprit}.", culprit=each["culprit"]) if each["culprit"] else "",
             say("Expected: {effect}.", effect=each["expected_effect"]) if each["expected_effect"] else "",
             say("Confidence {sure}, should save {gain} of a step.", sure=sure, gain=gain) if gain
             else say("Confidence {sure}.", sure=sure)]  # fmt: skip
    parts = [head, message(detail), tag("p", None, " ".join(filter(None, about)))]
    parts += [tag("ul", {"class": "stats"}, *evidence)] if evidence else []
    parts += [tag("p", None, say("Fix: {fix}", fix=each["fix"]))] if each["fix"] else []
    parts += [tag("p", None, say("This command fixes it:")), command(each["command"])] if each["command"] else []
    return tag("article", {"class": f"card {severity}"}, *parts)


def split_verdict(verdict: str) -> tuple[str, str]:
    """Return the statement of a verdict and its details: messages, source lines, or nothing."""
    line, _, rest = verdict.partition("\n")
    title, colon, detail = line.partition(": ")
    title = title[:1].upper() + title[1:]
    return title[:MAX_TITLE], "\n".join(filter(None, [title[MAX_TITLE:], detail if colon else "", rest]))


def comparison(facts: Tree) -> Html:
    """Return the predicted and the measured values, and their difference."""
    found = facts["comparison"]
    if not found:
        return tag("p", {"class": "quiet"}, say("This plan has no prediction."))
    totals = [_compared(row, UNITS[row["name"]], name=say(NAMES[row["name"]])) for row in found["totals"]]
    units = {"time": "seconds", "comm": "seconds", "memory": "bytes"}
    steps, axes, memory = (
        [_compared(row, unit, name=say(row["name"])) for row in found[name]] for name, unit in units.items()
    )
    columns = ["", say("predicted"), say("measured"), say("difference")]
    left = [table(columns, totals)]
    left += [table([say("step time by phase"), *columns[1:]], steps)] if steps else []
    left += [table([say("exposed communication by axis"), *columns[1:]], axes)] if axes else []
    right = table([say("memory of a rank by term"), *columns[1:]], memory) if memory else Html("")
    return tag("div", None, tag("div", {"class": "side"}, tag("div", None, *left), right), note(_remarks(facts, found)))


def _remarks(facts: Tree, found: Tree) -> str:
    error, of_memory = f"{found['error']:.0%}", f"{found['memory_error']:.0%}"
    within = "✓: within the prediction's own error bar, ±{error} (memory ±{memory})."
    if found["memory_error"] == found["error"]:
        within = "✓: within the prediction's own error bar, ±{error}."
    parts = [say(within, error=error, memory=of_memory)]
    parts += [say("No MFU: {why}.", why=facts["no_mfu"])] if facts["no_mfu"] else []
    if not any(row["measured"] is not None for row in found["memory"]):
        parts.append(say("To measure the terms of memory: trimaran profile RUN --memory."))
    parts += [say("Rates of the prediction: {source}.", source=found["source"])] if found["source"] else []
    return " ".join(parts)


def _compared(row: Tree, unit: str, *, name: str) -> list[Content]:
    before, after, off = row["predicted"], row["measured"], row["difference"]
    difference: Content = "-"
    if off is not None:
        within = abs(off) <= row["error"]
        difference = tag("span", {"class": "good" if within else "bad"}, f"{off:+.0%} {'✓' if within else '!'}")
    shown = ["-" if value is None else SHOW[unit](value) for value in (before, after)]
    return [name, *shown, difference]


def outliers(facts: Tree) -> Html:
    """Return which ranks were outliers, and how often."""
    ranks = facts["ranks_over_time"]
    if not ranks:
        return Html("")
    rows = [[say("rank {rank}", rank=each["rank"]), each["what"].replace("_", " "),
             say("{times} of {count} steps", times=each["times"], count=ranks["looked"])]
            for each in ranks["outliers"]]  # fmt: skip
    none = tag("p", None, say("No rank is an outlier."))
    return table([say("outlier"), say("in"), say("how often")], rows) if rows else none


def weights(facts: Tree) -> Html:
    """Return the latest norms and update ratios of each weight group."""
    rows = [[each["name"], _number(each["grad_norm"]), _number(each["update_ratio"])] for each in facts["groups"]]
    return table([say("group"), say("gradient norm"), say("update / weight")], rows) if rows else Html("")


def commands(facts: Tree) -> Html:
    """Return the commands behind the page, each with what it is for."""
    rows = [tag("div", {"class": "command-row"}, tag("p", None, _sentence(say(each["purpose"]))),
                command(each["command"])) for each in facts["commands"]]  # fmt: skip
    return tag("div", {"class": "commands"}, *rows)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}:"


def reproduction(facts: Tree) -> Html:
    """Return how to reproduce the run: the command, the recipe, the hosts and the versions."""
    used = [[name, ", ".join(values[:8])] for name, values in facts["machines_used"].items()]
    title = tag("summary", None, say("The recipe with all defaults"))
    return tag("section", None, tag("h2", None, say("Reproduce it")),
        tag("p", None, say("To train the same run again:")), command(facts["command"]),
        note(say("Run directory: {folder}", folder=facts["run_dir"])),
        table([say("environment of the ranks"), ""], used) if used else "",
        tag("details", None, title, tag("pre", None, facts["recipe"])),
        tag("footer", None,
            say("Made by trimaran {version} on {date}.", version=facts["version"], date=clock(facts["made"])), " ",
            say("The same as JSON:"), " ", tag("code", None, f"trimaran report {facts['run_dir']} --json")),
    )  # fmt: skip


def _why(facts: Tree) -> str:
    error = facts["error"] or {}
    reason = error.get("what") or error.get("message") or facts["why"]
    return f"rank {error['rank']}: {reason}" if "rank" in error else str(reason)


def _arrow(first: float | None, last: float | None) -> str:
    return "" if first is None and last is None else f"{_number(first) or '-'} → {_number(last) or '-'}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def brief(name: str, value: object) -> str:
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
