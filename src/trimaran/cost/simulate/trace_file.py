"""The simulated step and the simulated job as traces for Perfetto and chrome://tracing."""

from collections.abc import Iterator
from typing import Any

from trimaran.cost.simulate.job_history import JobHistory
from trimaran.cost.simulate.step_simulation import SimulatedStep

MICROSECONDS = 1e6
TRACKS = ("compute", "send", "gather", "reduce", "update")


def step_trace(step: SimulatedStep) -> dict[str, Any]:
    """Return one step: a process for each pipeline rank, with a track for passes, messages and each collective."""
    events = [event for rank in range(step.ranks) for event in _names(rank, f"pipeline rank {rank}", TRACKS)]
    for span in step.spans:
        if span.end > span.start:
            number = f" {span.micro_batch}" if span.micro_batch >= 0 else ""
            where = {"stage": span.stage} if span.stage >= 0 else {}
            events.append(_span(span.rank, TRACKS.index(span.track) + 1, f"{span.name}{number}", span.start, span.end)
                          | {"cat": span.track, "args": where})  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def job_trace(history: JobHistory) -> dict[str, Any]:
    """Return the job: one track of training and outages, each with its cause."""
    events = list(_names(0, "job", ("what it does",)))
    for each in history.segments:
        events.append(_span(0, 1, each.activity, each.start, each.end)
                      | {"cat": "job", "args": {"cause": each.cause, "step": each.step}})  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _span(process: int, track: int, name: str, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": process, "tid": track, "ts": start * MICROSECONDS,
            "dur": (end - start) * MICROSECONDS}  # fmt: skip


def _names(process: int, name: str, tracks: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    ids = {"pid": process, "tid": 0}
    yield {"ph": "M", "name": "process_name", **ids, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", **ids, "args": {"sort_index": process}}
    for number, track in enumerate(tracks, start=1):
        ids = {"pid": process, "tid": number}
        yield {"ph": "M", "name": "thread_name", **ids, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", **ids, "args": {"sort_index": number}}
