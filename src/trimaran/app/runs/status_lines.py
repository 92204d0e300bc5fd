"""The status lines of a run's panel: findings, goodput, incidents, ranks, memory and machines."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from trimaran.app.runs.decisions_view import last_decision_text
from trimaran.app.runs.run_findings import FindingsPoller, RunFinding
from trimaran.app.runs.run_state import RunState
from trimaran.app.show.text_chart import GREEN, ORANGE, RED, SKY
from trimaran.core import show_bytes, show_count, show_rows, show_seconds
from trimaran.runs import is_number, read_measured_links


def unread_texts(state: RunState) -> list[str]:
    """Return a line for each damaged line, and one if steps were estimated."""
    texts = [
        f"{each.file}: a line of {show_bytes(each.num_bytes)} at byte {each.offset:,} is damaged and was skipped"
        for each in state.long_lines
    ]
    if state.num_estimated:
        name, count = state.run.metrics_index.name, show_count(state.num_estimated)
        texts.append(f"{name} is missing or incomplete: {count} steps were not read, sums and curves are estimates")
    return texts


def loss_bound_text(bound: Mapping[str, Any], *, total_steps: int) -> str:
    """Return a sentence about the data of a `loss_bound` event of a run of `total_steps`; empty if there is none."""
    if not bound:
        return ""
    rank, node = (
        _cost(bound.get(f"{prefix}steps"), bound.get(f"{prefix}seconds"), total_steps) for prefix in ("", "node_")
    )
    return f"repeated after a fault of a rank: {rank}; after the loss of the node: {node}"


def _cost(steps: Any, seconds: Any, total_steps: int) -> str:
    if not is_number(steps) or not is_number(seconds) or steps >= total_steps:
        return "everything since the last checkpoint"
    return f"at most {round(steps)} steps (about {show_seconds(seconds)})"


def store_notes(state: RunState) -> Iterator[str]:
    """Yield what the current attempt took from the store, and how far the upload is that it waits for at its end."""
    if not (url := state.recipe.checkpoint.store):
        return
    for event in state.current_events("resume"):
        if event.data.get("tier") == "store":
            yield f"step {event.step} was fetched from {url}: this run directory had no newer state"
    for event in state.current_events("upload"):
        if (fraction := event.data.get("sent")) is not None:
            yield f"uploading step {event.step} to {url}: {fraction:.0%}"


def store_summary(state: RunState) -> str:
    """Return what the store has of this run at its end; an empty text if the run has no store."""
    url = state.recipe.checkpoint.store
    ended = [event for event in state.events_of_kind("upload") if "sent" not in event.data]
    if not url or not ended:
        return ""
    last, done = ended[-1], [event for event in ended if "failed" not in event.data]
    if "failed" in last.data:
        newest = f"it has step {done[-1].step}" if done else "it has no checkpoint of this run"
        return f"step {last.step} is not in {url}, {newest}: {last.data['failed']}"
    took = f"{show_bytes(last.data['bytes'])} in {show_seconds(last.data['seconds'])}"
    return f"step {last.step} is also in {url} ({took})"


Tree = dict[str, Any]
SEVERITY = {"fault": ("✗", RED), "warning": ("!", ORANGE), "note": ("i", SKY)}  # a sign each, not only a colour
SPREADS = {
    "busy_seconds": ("work", show_seconds),
    "wait_seconds": ("wait", show_seconds),
    "tokens": ("tokens", show_count),
}
MAX_OUTLIERS = 3
MAX_TIME_LOSSES = 3
FULL_MEMORY_FRACTION = 0.92
POWER_CAP, AT_LIMIT = "power_cap", "at the power limit"  # normal for a busy GPU, not a problem


def status_lines(state: RunState, poller: FindingsPoller | None = None) -> list[Text]:
    """Return the lines, the most important first; without data there is no line."""
    found: list[Text] = []
    if poller:
        for each in poller.findings:
            sign, color = SEVERITY[each.finding.severity]
            head = (f"{sign} {each.finding.code} ", color)
            found.append(_line("finding", Text.assemble(head, each.finding.verdict)))
        if poller.error:
            found.append(_line("doctor", Text(poller.error, style=ORANGE)))
        if ledger := state.ledger:
            others = ("compute", "communication", "idle")
            lost = {name: seconds / ledger.at_work for name, seconds in ledger.seconds.items() if name not in others}
            most = sorted(lost, key=lost.__getitem__, reverse=True)[:MAX_TIME_LOSSES]
            losses = ", ".join(f"{name} {lost[name]:.0%}" for name in most if lost[name] >= 0.01)
            good = Text(f"{ledger.goodput:.1%}", style=GREEN if ledger.goodput >= 0.9 else "bold")
            text = Text.assemble(good, f" of {show_seconds(ledger.at_work)}", f"; {losses}" if losses else "")
            found.append(_line("goodput", text))
    found += [_line("files", Text(each, style=ORANGE)) for each in unread_texts(state)]
    if decisions := state.decisions:
        last = max(decisions, key=lambda each: each.id)
        kept = sum(each.outcome == "kept" for each in decisions)
        found.append(_line("autopilot", Text(f"{kept} of {len(decisions)} kept; last: {last_decision_text(last)}")))
    if incidents := state.incidents:
        newest = incidents[-1]
        count = f"{len(incidents)} so far"
        restarts = f", {state.restarts} restart{'' if state.restarts == 1 else 's'}" if state.restarts else ""
        about = f"{count}{restarts}; last: {newest.id} {newest.cause}: {newest.what}"
        found.append(_line("incident", Text(about, style=ORANGE)))
    found += [*_change(state), *_ranks(state), *_memory(state)]
    if groups := read_measured_links(state.run).groups:  # fast links between nodes, where that makes a difference
        found.append(_line("links", Text(f"faster among {'; '.join(', '.join(group) for group in groups)}")))
    return [*found, *_machines(state)]


def finding_lines(found: RunFinding) -> list[Text]:
    """Return a finding in lines that can be copied: verdict, fix, and its expected effect."""
    finding = found.finding
    sign, color = SEVERITY[finding.severity]
    statement, colon, details = finding.verdict.partition(": ")  # details may be messages and source lines
    head = Text.assemble((f"{sign} {finding.code} ", f"bold {color}"), (statement, "bold"), colon + details)
    rows = {"fix": found.command or finding.fix, "expect": finding.expected_effect}
    return [head, *(Text(f"  {name}: {text}") for name, text in rows.items() if text)]


def _change(state: RunState) -> Iterator[Text]:
    if (event := state.last_change) is None:
        return
    fields = ", ".join(f"{name}={value}" for name, value in _tree(event.data.get("patch")).items())
    text, seconds = f"{event.data.get('status')} after step {event.step}: {fields}", event.data.get("pause_seconds")
    if event.data.get("status") == "applied":
        paused = f"; paused for {show_seconds(seconds)}" if isinstance(seconds, int | float) else ""
        yield _line("change", Text(f"{text}{paused}"))
    else:
        why = _tree(event.data.get("error")).get("what", "")
        yield _line("change", Text(f"{text}; {why}", style=ORANGE))


def _ranks(state: RunState) -> Iterator[Text]:
    ranks = _tree(state.latest.get("ranks"))
    parts = []
    for name, (label, show) in SPREADS.items():
        spread = _tree(ranks.get(name))
        if all(is_number(spread.get(figure)) for figure in ("min", "median", "max")):
            parts.append(Text.assemble((f"{label} ", "dim"), _spread(spread, show)))
    if parts:
        yield _line("ranks", Text("   ").join(parts))
    rows = [each for each in _listed(state.measured_rows.get("micro_batches")) if isinstance(each, int)]
    if rows:
        yield _line("rows", Text(f"{show_rows(rows)} (data ranks x rows), by measured speed"))
    for each in map(_tree, _listed(ranks.get("outliers"))[:MAX_OUTLIERS]):
        name, value, median = str(each.get("what")), each.get("value"), each.get("median")
        if is_number(value) and is_number(median) and median:
            label, show = SPREADS.get(name, (name, "{:.4g}".format))
            what = f"{label} {show(value)}, {value / median:.1f} x the median"
            yield _line("", Text(f"rank {each.get('rank')} is an outlier: {what}", style=ORANGE))


def _spread(spread: Tree, show: Any) -> Text:
    at = f" (rank {spread['at']})" if isinstance(spread.get("at"), int) else ""
    if spread["min"] == spread["max"]:
        return Text(show(spread["median"]), style="bold")
    return Text.assemble((show(spread["median"]), "bold"), f" {show(spread['min'])}..{show(spread['max'])}{at}")


def _memory(state: RunState) -> Iterator[Text]:
    memory = _tree(state.latest.get("memory"))
    used = memory.get("reserved", memory.get("allocated"))
    if not is_number(used):
        return
    text, style = show_bytes(used), ""
    if is_number(total := memory.get("total")) and total > 0:
        text += f" of {show_bytes(total)} ({used / total:.0%})"
        style = RED if used > FULL_MEMORY_FRACTION * total else ""
    if is_number(memory.get("reserved")) and is_number(memory.get("allocated")):
        text += f", {show_bytes(memory['allocated'])} in tensors"
    if is_number(memory.get("fragmentation")) and memory["fragmentation"] >= 0.01:
        text += f", {memory['fragmentation']:.0%} fragmented"
    counts = [f"{memory[name]} {name}" for name in ("retries", "ooms") if memory.get(name)]
    if counts:
        text, style = f"{text}, {', '.join(counts)}", ORANGE
    yield _line("memory", Text(text, style=style))


def _machines(state: RunState) -> Iterator[Text]:
    samples = list(state.samples.values())
    if not samples:
        return
    hosts = [
        ("cpu", _range([each.get("cpu") for each in samples], "{:.0%}".format)),
        ("ram", _range([_fraction(each.get("ram_used"), each.get("ram")) for each in samples], "{:.0%}".format)),
        ("disk free", _range([each.get("disk_free") for each in samples], show_bytes)),
    ]
    yield from _pairs("machine" if len(samples) == 1 else f"{len(samples)} nodes", hosts)
    gpus = [_tree(gpu) for each in samples for gpu in _listed(each.get("gpus"))]
    reasons = {str(why) for gpu in gpus for why in _listed(gpu.get("throttle"))}
    rows = [
        ("busy", _range([gpu.get("utilisation") for gpu in gpus], "{:.0%}".format)),
        ("memory", _range([_fraction(gpu.get("memory_used"), gpu.get("memory")) for gpu in gpus], "{:.0%}".format)),
        ("", _range([gpu.get("power") for gpu in gpus], "{:.0f} W".format)),
        ("", _range([gpu.get("temperature") for gpu in gpus], "{:.0f} °C".format)),
        ("", AT_LIMIT if POWER_CAP in reasons else ""),
        ("throttled by", ", ".join(sorted(reasons - {POWER_CAP}))),
    ]
    yield from _pairs("gpu" if len(gpus) == 1 else f"{len(gpus)} gpus", rows)


def _pairs(name: str, rows: Sequence[tuple[str, str]]) -> Iterator[Text]:
    parts = [f"{label} {value}".strip() for label, value in rows if value]
    if parts:
        yield _line(name, Text(", ".join(parts)))


def _range(values: Sequence[object], show: Any) -> str:
    numbers = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not numbers:
        return ""
    low, high = show(min(numbers)), show(max(numbers))
    return low if low == high else f"{low}..{high}"


def _fraction(part: object, total: object) -> float | None:
    return part / total if is_number(part) and is_number(total) and total else None


def _line(name: str, text: Text) -> Text:
    """Return one line: the name in the first column, then the text; a line that is too long ends in dots."""
    line = Text.assemble((f"{name:9} ", "dim"), text, no_wrap=True, overflow="ellipsis")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tree(value: object) -> Tree:
    return value if isinstance(value, dict) else {}
