"""The sections of a report that are text and tables: the result, findings, events, commands, machines."""

import time
from typing import Any

from trimaran.app import readable_sample
from trimaran.core import Mesh, show_bytes, show_count, show_seconds
from trimaran.runs import is_number
from trimaran.ui.language import say
from trimaran.ui.report.curves import tree
from trimaran.ui.report.figure_axis import SHOW
from trimaran.ui.report.markup import Content, Html, clock, command, known, message, note, section, table, tag

Tree = dict[str, Any]
GOOD = {"done": "good", "training": "good", "failed": "bad", "vanished": "bad"}
UNITS = {"step_seconds": "seconds", "tokens_per_second": "count", "mfu": "share", "peak_bytes": "bytes"}
NAMES = {"step_seconds": "step time", "tokens_per_second": "tokens/s", "mfu": "MFU", "peak_bytes": "peak memory"}
MAX_TITLE = 160  # characters of a heading
SIGNS = {"fault": "✗", "warning": "!", "note": "i"}  # a sign each, not only a colour


def header(facts: Tree) -> Html:
    status = facts["status"]
    badge = tag("span", {"class": f"badge {GOOD.get(status, 'fair')}"}, say(status))
    lines = [tag("p", {"class": "lead"}, headline(facts)), tag("p", {"class": "quiet"}, facts["model"])]
    if facts["error"] or (status == "failed" and facts["why"]):
        error = facts["error"] or {}
        reason = error.get("what") or error.get("message") or facts["why"]
        rank = f"rank {error['rank']}: " if "rank" in error else ""
        lines.insert(0, tag("p", {"class": "why"}, f"{rank}{reason}"))
    return tag("header", None, tag("h1", None, facts["name"], " ", badge), *lines, *unread(facts), tiles(facts))


def unread(facts: Tree) -> list[Html]:
    """Return what could not be read of the run's files, or was not read: a paragraph each."""
    texts = [
        say("{file}: a line of {size} at byte {offset} is damaged and was skipped.", file=each["file"],
            size=show_bytes(each["num_bytes"]), offset=f"{each['offset']:,}")
        for each in facts["skipped_lines"]
    ]  # fmt: skip
    if facts["estimated_steps"]:
        count = show_count(facts["estimated_steps"])
        texts.append(
            say(
                "The index of the metrics is missing or incomplete: {count} steps were not read, and sums and "
                "curves are estimates. The page of an ended run rebuilds it while it is open.",
                count=count,
            )
        )
    return [tag("p", {"class": "fair"}, text) for text in texts]


def tiles(facts: Tree) -> Html:
    measured, unit = facts["measured"] or {}, say(facts["unit"])
    losses = [_number(facts[name]) for name in ("first_loss", "final_loss")]
    counts = {name: f" / {count:,.0f}" for name, count in facts["accuracy_counts"].items()}
    pauses = [each.get("pause_seconds") or 0.0 for each in facts["changes"] if each.get("status") == "applied"]
    paused = say("{count}, paused for {time}", count=len(pauses), time=show_seconds(sum(pauses)))
    found = [
        (say("loss, first to last"), " → ".join(each or "-" for each in losses) if any(losses) else ""),
        (say("loss on held-out data"), _number(facts["held_out_loss"])),
        *((say("{name} on held-out data", name=name), f"{share:.1%}{counts.get(name, '')}")
          for name, share in facts["accuracy"].items()),
        (say("{unit}/s, median", unit=unit), show_count(measured["tokens_per_second"]) if measured else ""),
        (say("step time, median"), show_seconds(measured["step_seconds"]) if measured else ""),
        (say("MFU, median"), f"{measured['mfu']:.1%}" if measured.get("mfu") else ""),
        (say("peak memory of a rank"), show_bytes(measured["peak_bytes"]) if measured else ""),
        (say("goodput"), f"{facts['goodput']:.1%}" if facts["goodput"] is not None else ""),
        (say("restarts"), str(facts["restarts"]) if facts["restarts"] else ""),
        (say("changes of the plan"), paused if pauses else ""),
    ]  # fmt: skip
    shown = [tag("div", {"class": "tile first" if "→" in value else "tile"}, tag("b", None, value),
                 tag("span", None, name)) for name, value in found if value]  # fmt: skip
    return tag("div", {"class": "tiles"}, *shown)


def headline(facts: Tree) -> str:
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
    if facts["doctor_trouble"]:
        return section(say("Findings"), tag("p", {"class": "fair"}, facts["doctor_trouble"]))
    cards = [_finding(each) for each in facts["findings"]]
    if not cards:
        none = "The doctor found no problem." if facts["steps"] else "There is no finished step to diagnose yet."
        cards.append(tag("p", None, say(none)))
    rows = [tag("li", {"class": "good" if each["met"] else "fair"},
                say("Target met: {what}", what=each["text"]) if each["met"]
                else say("Target missed: {what}", what=each["text"])) for each in facts["targets"]]  # fmt: skip
    return section(say("Findings"), *cards, tag("ul", {"class": "targets"}, *rows) if rows else Html(""))


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
    error, of_memory = f"{found['error']:.0%}", f"{found['memory_error']:.0%}"
    within = "✓: within the prediction's own error bar, ±{error} (memory ±{memory})."
    if found["memory_error"] == found["error"]:
        within = "✓: within the prediction's own error bar, ±{error}."
    parts = [say(within, error=error, memory=of_memory)]
    parts += [say("No MFU: {why}.", why=facts["no_mfu"])] if facts["no_mfu"] else []
    if not any(row["measured"] is not None for row in found["memory"]):
        parts.append(say("To measure the terms of memory: trimaran profile RUN --memory."))
    parts += [say("Rates of the prediction: {source}.", source=found["source"])] if found["source"] else []
    remarks = note(" ".join(parts))
    return tag("div", None, tag("div", {"class": "side"}, tag("div", None, *left), right), remarks)


def _compared(row: Tree, unit: str, *, name: str) -> list[Content]:
    before, after, off = row["predicted"], row["measured"], row["difference"]
    difference: Content = "-"
    if off is not None:
        within = abs(off) <= row["error"]
        difference = tag("span", {"class": "good" if within else "bad"}, f"{off:+.0%} {'✓' if within else '!'}")
    shown = ["-" if value is None else SHOW[unit](value) for value in (before, after)]
    return [name, *shown, difference]


def outliers(facts: Tree) -> Html:
    ranks = facts["ranks_over_time"]
    if not ranks:
        return Html("")
    rows = [[say("rank {rank}", rank=each["rank"]), each["what"].replace("_", " "),
             say("{times} of {count} steps", times=each["times"], count=ranks["looked"])]
            for each in ranks["outliers"]]  # fmt: skip
    none = tag("p", None, say("No rank is an outlier."))
    return table([say("outlier"), say("in"), say("how often")], rows) if rows else none


def weights(facts: Tree) -> Html:
    rows = [[each["name"], _number(each["grad_norm"]), _number(each["update_ratio"])] for each in facts["groups"]]
    return table([say("group"), say("gradient norm"), say("update / weight")], rows) if rows else Html("")


def commands(facts: Tree) -> Html:
    rows = [tag("div", {"class": "command-row"}, purposed(each)) for each in facts["commands"]]
    return tag("div", {"class": "commands"}, *rows)


def purposed(each: Tree, *, kind: str | None = None) -> Html:
    purpose = say(each["purpose"])
    title = tag("p", {"class": kind}, f"{purpose[:1].upper()}{purpose[1:]}:")
    return Html(title + command(each["command"]))


def reproduction(facts: Tree) -> Html:
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


MAX_ROWS = 40
OUTCOMES = {  # of a decision: its class in page.css and what it means
    "kept": ("good", "kept: steps became shorter"),
    "rolled-back": ("fair", "rolled back: steps did not become shorter"),
    "refused": ("bad", "refused: the run did not accept it"),
    "failed": ("bad", "failed: the change was undone"),
    "trying": ("fair", "on trial"),
    "advised": ("fair", "advised: not applied"),
    "undone": ("fair", "taken back by the user"),
}
STATUSES = {"complete": "good", "damaged": "bad", "refused": "bad"}


def incidents(facts: Tree) -> Html:
    found = facts["incidents"]
    left = len(found) - MAX_ROWS
    more = say("{count} earlier incidents: trimaran incidents {run}", count=left, run=facts["run_dir"])
    cards = [note(more)] if left > 0 else []
    for each in found[-MAX_ROWS:]:
        first, _, rest = each["verdict"].partition("\n")
        identifier, _, text = first.partition("  ")
        title, _, detail = text.partition(": ")
        lines = "\n".join(line.removeprefix("  ") for line in rest.splitlines())
        action = tag("span", {"class": "severity warning"}, say(each["action"] or "open"))
        head = tag("h3", None, action, " ", tag("code", None, identifier), " ", title[:MAX_TITLE])
        about = tag("pre", None, lines) if lines else ""
        cards.append(tag("article", {"class": "card warning"}, head, message(detail), about))
    return Html("".join(cards))


def last_decision(facts: Tree) -> Html:
    if not facts["last_decision"]:
        return Html("")
    kept = sum(each["outcome"] == "kept" for each in facts["decisions"])
    text = say("{kept} of {count} decisions were kept. Decision {last}.", kept=kept, count=len(facts["decisions"]),
               last=facts["last_decision"])  # fmt: skip
    cards = [_decision(each) for each in reversed(facts["decisions"][-MAX_ROWS:])]
    return section(say("Autopilot"), tag("p", None, text), Html("".join(cards)))


def _decision(each: Tree) -> Html:
    kind, meaning = OUTCOMES.get(each["outcome"], ("fair", each["outcome"]))
    badge = tag("span", {"class": f"badge {kind}"}, say(meaning))
    where = say("decision {number}, after step {step}", number=each["id"], step=f"{each['step']:,}")
    changes: list[list[Content]] = [[name.removeprefix("plan."), str(each["undo"].get(name)), str(value)]
               for name, value in each["patch"].items() if each["undo"].get(name) != value]  # fmt: skip
    expected, measured, before = each["expected"], each["measured"] or {}, each["baseline"].get("step_seconds")
    effect: list[list[Content]] = []
    if before:
        effect.append([say("before"), show_seconds(before), show_seconds(before)])
    if "step_seconds" in expected or "step_seconds" in measured:
        effect.append([say("after"), *(known(each.get("step_seconds"), show_seconds) for each in (expected, measured))])
    if "gain" in expected or "gain" in measured:
        effect.append(
            [say("shorter by"), *(known(each.get("gain"), "{:+.1%}".format) for each in (expected, measured))]
        )
    if "uncertainty" in expected or "confidence" in measured:
        error = f"±{expected['uncertainty']:.0%}" if "uncertainty" in expected else "-"
        sure = say("{sure} sure", sure=f"{measured['confidence']:.1%}") if "confidence" in measured else "-"
        effect.append([say("certainty"), error, sure])
    parts = [tag("h3", None, where, " ", badge), message(each["reason"])]
    tables = [table([say("setting"), say("before"), say("after")], changes)] if changes else []
    tables += [table([say("step time"), say("expected"), say("measured")], effect)] if effect else []
    parts.append(tag("div", {"class": "side"}, *tables))
    if each["outcome"] in ("kept", "advised"):
        said = "This command takes it back:" if each["outcome"] == "kept" else "This command applies it:"
        parts += [tag("p", None, say(said)), command(each["command"])]
    return tag("article", {"class": f"card {'note' if kind == 'good' else 'warning'}"}, *parts)


def checkpoints(facts: Tree) -> Html:
    stalls = {each["step"]: each["stall_seconds"] for each in facts["timeline"]["saved"]}
    rows: list[list[Content]] = []
    for each in reversed(facts["checkpoints"][-MAX_ROWS:]):
        stall = stalls.get(each["step"])
        state = say(each["status"]) + (f": {each['why']}" if each["why"] else "")
        checked = say("read back at a resume") if each["restored"] else say("length of every file")
        tiers = ", ".join(say(name) for name in each["tiers"])
        nodes = f" ({', '.join(each['on_nodes'])})" if each["on_nodes"] else ""
        took = show_seconds(stall) if isinstance(stall, int | float) else "-"
        rows.append([f"{each['step']:,}", tag("span", {"class": STATUSES.get(each["status"], "fair")}, state),
                     checked if each["status"] == "complete" else "-", tiers + nodes, show_bytes(each["bytes"]),
                     show_bytes(each["written_bytes"]), took,
                     show_seconds(max(0.0, time.time() - each["time"])) if each["time"] else "-",
                     clock(each["time"]) if each["time"] else "-"])  # fmt: skip
    if not rows:
        return Html("")
    columns = ["step", "state", "checked", "where", "size", "new on disk", "training waited", "age", "when"]
    left = len(facts["checkpoints"]) - len(rows)
    parts = [table([say(each) for each in columns], rows)]
    parts += [note(say("{count} older checkpoints are not shown.", count=left))] if left else []
    if drafts := facts["checkpoint_drafts"]:
        parts.append(note(say("{count} being written, or left by a run that died.", count=drafts)))
    verify = next((each["command"] for each in facts["commands"] if " verify " in each["command"]), "")
    parts += [note(say("To read every file and compare it with its checksum:")), command(verify)] if verify else []
    return Html("".join(parts))


def samples(facts: Tree) -> Html:
    return Html("".join(_sample(each) for each in reversed(facts["samples"][-MAX_ROWS:]) if "text" in each))


def _sample(each: Tree) -> Html:
    title = say("after step {step}", step=f"{each['step']:,}")
    if "expected" in each:
        is_right = bool(each.get("right"))
        verdict = tag(
            "span", {"class": f"badge {'good' if is_right else 'bad'}"}, say("right" if is_right else "wrong")
        )
        rows = [(say("question"), str(each.get("prompt", ""))), (say("answer"), str(each["text"])),
                (say("expected"), str(each["expected"]))]  # fmt: skip
        return tag("article", {"class": "card note"}, tag("h3", None, title, " ", verdict), table(["", ""], rows))
    short = note(say("cut short: {why}", why=each["cut_short"])) if isinstance(each.get("cut_short"), str) else Html("")
    text = readable_sample(str(each["text"]))
    return tag("article", {"class": "card note"}, tag("h3", None, title), tag("pre", None, text), short)


MAX_NODES, MAX_GPUS = 16, 32  # rows; the rest is in the plots and in the matrix of ranks


def machine_tables(facts: Tree) -> Html:
    nodes = [each for each in facts["machines"] if isinstance(each, dict)]
    nodes.sort(key=lambda each: each["node"] if is_number(each.get("node")) else 0)
    if not nodes:
        return Html("")
    rows = []
    for each in nodes[:MAX_NODES]:
        free, at = each.get("disk_free"), each.get("time")
        rows.append([str(each.get("host", "")), _formatted(each.get("cores"), "{:.0f}"),
                     _formatted(each.get("load"), "{:.1f}"), _formatted(each.get("cpu"), "{:.0%}"),
                     _used(each.get("ram_used"), each.get("ram")), show_bytes(free) if is_number(free) else "-",
                     clock(at) if is_number(at) else "-"])  # fmt: skip
    gpus = [(str(each.get("host", "")), tree(gpu)) for each in nodes for gpu in each.get("gpus") or ()]
    columns = ("node", "cores", "load", "CPU", "RAM in use", "free disk", "sampled")
    parts = [table([say(each) for each in columns], rows)]
    if gpus:
        names = ("GPU", "node", "busy", "memory in use", "power", "temperature", "clock", "slowed by")
        rows = []
        for host, gpu in gpus[:MAX_GPUS]:
            reasons = gpu.get("throttle")
            rows.append([f"{gpu.get('index', '')} {gpu.get('name', '')}".strip(), host,
                         _formatted(gpu.get("utilisation"), "{:.0%}"), _used(gpu.get("memory_used"), gpu.get("memory")),
                         _formatted(gpu.get("power"), "{:.0f} W"), _formatted(gpu.get("temperature"), "{:.0f} °C"),
                         _used(gpu.get("sm_clock"), gpu.get("sm_clock_max"), "{share:.0%}"),
                         ", ".join(map(str, reasons)) if isinstance(reasons, list) else ""])  # fmt: skip
        parts.append(table([say(each) for each in names], rows))
    left = max(0, len(nodes) - MAX_NODES), max(0, len(gpus) - MAX_GPUS)
    if any(left):
        parts.append(note(say("{nodes} more nodes and {gpus} more GPUs: trimaran watch RUN --json", nodes=left[0],
                              gpus=left[1])))  # fmt: skip
    return Html("".join(parts))


def _formatted(value: object, form: str) -> str:
    return form.format(value) if is_number(value) else "-"


def _used(part: object, total: object, form: str = "{part} / {total} ({share:.0%})") -> str:
    if not is_number(part) or not is_number(total) or not total:
        return "-"
    return form.format(part=show_bytes(part), total=show_bytes(total), share=part / total)
