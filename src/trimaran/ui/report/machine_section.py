"""The machines of a run and their GPUs as they were sampled last."""

from typing import Any

from trimaran.core import show_bytes
from trimaran.runs.record_types import is_number
from trimaran.ui.report.curves import tree
from trimaran.ui.report.markup import Html
from trimaran.ui.report.tables import clock, note, table
from trimaran.ui.report.words import say

Tree = dict[str, Any]
MAX_NODES, MAX_GPUS = 16, 32  # rows; the rest is in the plots and in the matrix of ranks


def machine_tables(facts: Tree) -> Html:
    """Return a table of the nodes and one of the GPUs; nothing without samples."""
    nodes = sorted((each for each in facts["machines"] if isinstance(each, dict)), key=_node_number)
    if not nodes:
        return Html("")
    rows = [_node(each) for each in nodes[:MAX_NODES]]
    gpus = [(str(each.get("host", "")), tree(gpu)) for each in nodes for gpu in each.get("gpus") or ()]
    columns = ("node", "cores", "load", "CPU", "RAM in use", "free disk", "sampled")
    parts = [table([say(each) for each in columns], rows)]
    if gpus:
        names = ("GPU", "node", "busy", "memory in use", "power", "temperature", "clock", "slowed by")
        parts.append(table([say(each) for each in names], [_gpu(host, gpu) for host, gpu in gpus[:MAX_GPUS]]))
    left = max(0, len(nodes) - MAX_NODES), max(0, len(gpus) - MAX_GPUS)
    if any(left):
        parts.append(note(say("{nodes} more nodes and {gpus} more GPUs: trimaran watch RUN --json", nodes=left[0],
                              gpus=left[1])))  # fmt: skip
    return Html("".join(parts))


def _node_number(each: Tree) -> float:
    return each["node"] if is_number(each.get("node")) else 0


def _node(each: Tree) -> list[str]:
    at = each.get("time")
    return [str(each.get("host", "")), _text(each.get("cores"), "{:.0f}"), _text(each.get("load"), "{:.1f}"),
            _text(each.get("cpu"), "{:.0%}"), _used(each.get("ram_used"), each.get("ram")),
            show_bytes(free) if is_number(free := each.get("disk_free")) else "-",
            clock(at) if is_number(at) else "-"]  # fmt: skip


def _gpu(host: str, gpu: Tree) -> list[str]:
    reasons = gpu.get("throttle")
    return [f"{gpu.get('index', '')} {gpu.get('name', '')}".strip(), host, _text(gpu.get("utilisation"), "{:.0%}"),
            _used(gpu.get("memory_used"), gpu.get("memory")), _text(gpu.get("power"), "{:.0f} W"),
            _text(gpu.get("temperature"), "{:.0f} °C"), _share(gpu.get("sm_clock"), gpu.get("sm_clock_max")),
            ", ".join(map(str, reasons)) if isinstance(reasons, list) else ""]  # fmt: skip


def _text(value: object, form: str) -> str:
    return form.format(value) if is_number(value) else "-"


def _used(part: object, total: object) -> str:
    if not is_number(part) or not is_number(total) or not total:
        return "-"
    return f"{show_bytes(part)} / {show_bytes(total)} ({part / total:.0%})"


def _share(part: object, total: object) -> str:
    return f"{part / total:.0%}" if is_number(part) and is_number(total) and total else "-"
