"""What every rank does now: lag, memory, last heartbeat; from the newest samples, events and the table of ranks."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from trimaran.app.runs.run_state import ACTIVE_STATUSES, RunState
from trimaran.core import Event
from trimaran.runs.read.rank_table import RankTable
from trimaran.runs.record_types import is_number
from trimaran.ui.report.curves import number, tree

Tree = dict[str, Any]
LATE_FRACTION = 0.1  # of a step: a rank that is later than the median of its stage by more is late
SILENT_SECONDS = 30.0  # without a heartbeat; samples are a few seconds apart
ENDED = ("done", "error", "stop")  # kinds of events after which a rank has no heartbeat


def ranks_now(state: RunState, table: RankTable | None) -> Tree:
    """Return a list for each quantity, with a value for each rank; empty before any rank has started.

    `lag_seconds` is how much later than the median rank of its stage a rank finished its own work of step
    `measured_step`. `heartbeat_time` is when the rank was last known to live. `state` is one of `late`, `silent`,
    `ended`, `failed`, `missing` (it has not started) and `ok`.
    """
    world_size = state.plan.mesh.world_size
    started = {event.rank: event for event in state.current_events("start")}
    if not started:
        return {}
    measures = table.measures if table is not None and _has_rows(table, world_size) else {}
    lags = _lags(measures, state.plan.mesh.pp) if measures else []
    samples = _rank_samples(state)
    rows = [_row(rank, state, samples.get(rank), started) for rank in range(world_size)]
    for rank, row in enumerate(rows):
        row["lag_seconds"] = lags[rank] if lags else None
        row["memory_bytes"] = measures["peak_bytes"][rank] if "peak_bytes" in measures else row["memory_bytes"]
        if row["state"] == "ok" and lags and lags[rank] > LATE_FRACTION * _step_seconds(state):
            row["state"] = "late"
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    about = {"world_size": world_size, "measured_step": table.step if measures and table else None}
    about |= {"per_node": _per_node(state, world_size), "memory_total": _memory_total(state)}
    return about | {"step_seconds": _step_seconds(state), "is_live": state.status in ACTIVE_STATUSES} | columns


def _has_rows(table: RankTable, world_size: int) -> bool:
    """Whether the table is of this plan, which a change may have replaced."""
    return all(len(column) == world_size for column in table.measures.values())


def _lags(measures: Tree, stages: int) -> list[float]:
    ready = [busy + data for busy, data in zip(measures["busy_seconds"], measures["data_seconds"], strict=True)]
    size = max(1, len(ready) // stages)
    middles = [median(ready[first : first + size]) for first in range(0, len(ready), size)]
    return [max(0.0, each - middles[min(rank // size, len(middles) - 1)]) for rank, each in enumerate(ready)]


def _rank_samples(state: RunState) -> dict[int, Tree]:
    """Return the newest sample of each rank, with the time and the node of its node's sample."""
    found: dict[int, Tree] = {}
    for sample in state.samples.values():
        at = number(sample.get("time"))
        for rank, each in tree(sample.get("ranks")).items():
            if rank.isdecimal() and at == at:
                found[int(rank)] = tree(each) | {"time": at, "node": sample.get("node")}
    return found


def _row(rank: int, state: RunState, sample: Tree | None, started: Mapping[int, Event]) -> Tree:
    events = state.events_of_rank(rank)
    last = max((event.time for event in events), default=None)
    row: Tree = {"heartbeat_time": last, "progress_seconds": None, "section": None, "step": None, "node": None,
                 "memory_bytes": None, "cpu": None}  # fmt: skip
    if sample is not None:
        at = sample["time"] - (sample["heartbeat_seconds"] if is_number(sample.get("heartbeat_seconds")) else 0.0)
        row["heartbeat_time"] = max(at, last or 0.0)
        names = {"memory_bytes": "ram", "progress_seconds": "progress_seconds", "cpu": "cpu", "step": "step"}
        row |= {name: value for name, key in names.items() if is_number(value := sample.get(key))}
        row |= {"section": str(sample["section"])} if isinstance(sample.get("section"), str) else {}
        row |= {"node": sample["node"]} if isinstance(sample.get("node"), int) else {}
    return row | {"state": _state(rank, events, row, state, started)}


def _state(rank: int, events: Sequence[Event], row: Tree, state: RunState, started: Mapping[int, Event]) -> str:
    if rank not in started:
        return "missing"
    kinds = {event.kind for event in events}
    if "error" in kinds:
        return "failed"
    if kinds & {"done", "stop"}:
        return "ended"
    newest = max((number(sample.get("time")) for sample in state.samples.values()), default=0.0)
    is_silent = row["heartbeat_time"] is not None and newest - row["heartbeat_time"] > SILENT_SECONDS
    if state.status in ACTIVE_STATUSES:
        return "silent" if is_silent else "ok"
    return "ended"


def _step_seconds(state: RunState) -> float:
    return state.measured.step_seconds if state.measured else 0.0


def _per_node(state: RunState, world_size: int) -> int:
    """Return how many ranks a node has: rows of the matrix are nodes; 0 if that is not known."""
    counts = [len(tree(sample.get("ranks"))) for sample in state.samples.values()]
    return max(counts, default=0) if counts and world_size % max(1, max(counts)) == 0 else 0


def _memory_total(state: RunState) -> float | None:
    """Return the memory of a rank's device; that of the whole machine is shared by its ranks."""
    gpus = [gpu for sample in state.samples.values() for gpu in sample.get("gpus") or () if isinstance(gpu, dict)]
    totals = [float(gpu["memory"]) for gpu in gpus if is_number(gpu.get("memory"))]
    return min(totals) if totals else None
