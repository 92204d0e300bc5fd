"""What the panel of a run says in a line each: memory, ranks, machines, goodput, incidents and findings."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeGuard

from rich.text import Text

from trimaran.app.views.logs import printable
from trimaran.app.views.run_findings import RunFindings, Visits
from trimaran.app.views.run_state import RunState
from trimaran.app.views.text_chart import GREEN, ORANGE, RED, SKY
from trimaran.core import show_bytes, show_count, show_seconds

Tree = dict[str, Any]
SEVERITY = {"fault": ("✗", RED), "warning": ("!", ORANGE), "note": ("i", SKY)}  # a sign each: colour is not alone
SPREADS = {
    "busy_seconds": ("work", show_seconds),
    "wait_seconds": ("wait", show_seconds),
    "tokens": ("tokens", show_count),
}
NUM_OUTLIERS = 3
NUM_LOSSES = 3  # of time
TIGHT = 0.92  # of a device's memory
POWER_CAP, AT_LIMIT = "power_cap", "at the power limit"  # where a GPU that works hard belongs: nothing is wrong with it


def glances(state: RunState, visits: Visits | None = None) -> list[Text]:
    """Return the lines, what matters most first; what a run has no word about has no line."""
    found = [*_findings(visits), *_ledger(state)] if visits else []
    return [*found, *_incidents(state), *_ranks(state), *_memory(state), *_machines(state)]


def finding_lines(told: RunFindings) -> list[Text]:
    """Return a finding in lines that can be copied: verdict, what to do, and what that should bring."""
    finding = told.finding
    sign, color = SEVERITY[finding.severity]
    head = Text.assemble((f"{sign} {finding.code} ", f"bold {color}"), (printable(finding.verdict), "bold"))
    rows = {"fix": told.command or finding.fix, "expect": finding.expected_effect}
    return [head, *(Text(f"  {name}: {printable(words)}") for name, words in rows.items() if words)]


def _findings(visits: Visits) -> Iterator[Text]:
    for each in visits.told:
        sign, color = SEVERITY[each.finding.severity]
        yield _line("finding", Text.assemble((f"{sign} {each.finding.code} ", color), printable(each.finding.verdict)))
    if visits.trouble:
        yield _line("doctor", Text(printable(visits.trouble), style=ORANGE))


def _incidents(state: RunState) -> Iterator[Text]:
    if found := state.incidents:
        last = found[-1]
        words = f"{len(found)} so far" if len(found) > 1 else "1 so far"
        restarts = f", {state.restarts} restart{'' if state.restarts == 1 else 's'}" if state.restarts else ""
        yield _line(
            "incident", Text(f"{words}{restarts}; last: {last.id} {last.cause}: {printable(last.what)}", style=ORANGE)
        )


def _ranks(state: RunState) -> Iterator[Text]:
    """Yield how far the ranks are apart, and who stands out."""
    ranks = _tree(state.latest.get("ranks"))
    parts = [Text.assemble((f"{word} ", "dim"), _spread(_tree(ranks.get(name)), show))
             for name, (word, show) in SPREADS.items() if _known(_tree(ranks.get(name)))]  # fmt: skip
    if parts:
        yield _line("ranks", Text("   ").join(parts))
    for each in _listed(ranks.get("outliers"))[:NUM_OUTLIERS]:
        if words := _outlier(_tree(each)):
            yield _line("", Text(words, style=ORANGE))


def _spread(told: Tree, show: Any) -> Text:
    at = f" (rank {told['at']})" if isinstance(told.get("at"), int) else ""
    if told["min"] == told["max"]:
        return Text(show(told["median"]), style="bold")
    return Text.assemble((show(told["median"]), "bold"), f" {show(told['min'])}..{show(told['max'])}{at}")


def _outlier(each: Tree) -> str:
    what = SPREADS.get(str(each.get("what")), (str(each.get("what")), "{:.4g}".format))
    value, median = each.get("value"), each.get("median")
    if not _is_number(value) or not _is_number(median) or not median:
        return ""
    return f"rank {each.get('rank')} stands out: {what[0]} {what[1](value)}, {value / median:.1f} x the median"


def _memory(state: RunState) -> Iterator[Text]:
    """Yield how full the device is, and what of it is lost between tensors."""
    memory = _tree(state.latest.get("memory"))
    held = memory.get("reserved", memory.get("allocated"))
    if not _is_number(held):
        return
    words, style = show_bytes(held), ""
    if _is_number(total := memory.get("total")) and total > 0:
        words += f" of {show_bytes(total)} ({held / total:.0%})"
        style = RED if held > TIGHT * total else ""
    if _is_number(memory.get("reserved")) and _is_number(memory.get("allocated")):
        words += f", {show_bytes(memory['allocated'])} in tensors"
    if _is_number(memory.get("fragmentation")) and memory["fragmentation"] >= 0.01:
        words += f", {memory['fragmentation']:.0%} fragmented"
    counts = [f"{memory[name]} {name}" for name in ("retries", "ooms") if memory.get(name)]
    if counts:
        words, style = f"{words}, {', '.join(counts)}", ORANGE
    yield _line("memory", Text(words, style=style))


def _machines(state: RunState) -> Iterator[Text]:
    """Yield the hosts and the GPUs of all nodes, each with the range over them."""
    samples = list(state.samples.values())
    if not samples:
        return
    hosts = [
        ("cpu", _range([each.get("cpu") for each in samples], "{:.0%}".format)),
        ("ram", _range([_share(each.get("ram_used"), each.get("ram")) for each in samples], "{:.0%}".format)),
        ("disk free", _range([each.get("disk_free") for each in samples], show_bytes)),
    ]
    yield from _pairs("machine" if len(samples) == 1 else f"{len(samples)} nodes", hosts)
    gpus = [_tree(gpu) for each in samples for gpu in _listed(each.get("gpus"))]
    reasons = {str(why) for gpu in gpus for why in _listed(gpu.get("throttle"))}
    rows = [
        ("busy", _range([gpu.get("utilisation") for gpu in gpus], "{:.0%}".format)),
        ("memory", _range([_share(gpu.get("memory_used"), gpu.get("memory")) for gpu in gpus], "{:.0%}".format)),
        ("", _range([gpu.get("power") for gpu in gpus], "{:.0f} W".format)),
        ("", _range([gpu.get("temperature") for gpu in gpus], "{:.0f} °C".format)),
        ("", AT_LIMIT if POWER_CAP in reasons else ""),
        ("held back by", ", ".join(sorted(reasons - {POWER_CAP}))),
    ]
    yield from _pairs("gpu" if len(gpus) == 1 else f"{len(gpus)} gpus", rows)


def _ledger(state: RunState) -> Iterator[Text]:
    """Yield which share of the time moved the run on, and what took the most of the rest."""
    if (ledger := state.ledger) is None:
        return
    others = ("compute", "communication", "idle")
    lost = {name: seconds / ledger.at_work for name, seconds in ledger.seconds.items() if name not in others}
    most = sorted(lost, key=lost.__getitem__, reverse=True)[:NUM_LOSSES]
    words = ", ".join(f"{name} {lost[name]:.0%}" for name in most if lost[name] >= 0.01)
    good = Text(f"{ledger.goodput:.1%}", style=GREEN if ledger.goodput >= 0.9 else "bold")
    yield _line("goodput", Text.assemble(good, f" of {show_seconds(ledger.at_work)}", f"; {words}" if words else ""))


def _pairs(name: str, rows: Sequence[tuple[str, str]]) -> Iterator[Text]:
    words = [f"{label} {value}".strip() for label, value in rows if value]
    if words:
        yield _line(name, Text(", ".join(map(printable, words))))


def _range(values: Sequence[object], show: Any) -> str:
    known = [value for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not known:
        return ""
    low, high = show(min(known)), show(max(known))
    return low if low == high else f"{low}..{high}"


def _share(part: object, whole: object) -> float | None:
    return part / whole if _is_number(part) and _is_number(whole) and whole else None


def _line(name: str, words: Text) -> Text:
    """Return one line: a name in a column of its own, then the words; what is too long ends in dots."""
    line = Text.assemble((f"{name:9} ", "dim"), words, no_wrap=True, overflow="ellipsis")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _known(told: Tree) -> bool:
    return all(_is_number(told.get(name)) for name in ("min", "median", "max"))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _tree(value: object) -> Tree:
    return value if isinstance(value, dict) else {}
