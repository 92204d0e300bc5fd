"""The life of a run from its own files: attempts, events of rank 0, incidents, checkpoints and decisions."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from trimaran.app import RunState
from trimaran.app.runs.run_state import ACTIVE_STATUSES
from trimaran.core import Event, read_regular_text
from trimaran.runs import MARKER, RunDirectory
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.subject import PhaseSpan, RunLife

MAX_SPANS = 400  # of one phase; of more, the newest
MAX_FILE_BYTES = 1 << 18
LAUNCH_FOLDER = "launch"


def life_of(run: RunDirectory, *, now: float | None = None) -> RunLife:
    state = RunState(run, only_status=True)
    state.refresh()
    now = time.time() if now is None else now
    events = [event for event in state.events if event.rank == 0]
    begin = min([_created(run), *(each.time for each in state.attempts.attempts), *(each.time for each in events[:1])])
    is_active = state.status in ACTIVE_STATUSES
    end = now if is_active else max([begin, *(each.time for each in events), *_ends(state)])
    spans = [*_starts(state, events, begin, end), *_saves(events), *_incidents(state), *_changes(state, events)]
    moved = [each._replace(start=max(0.0, each.start - begin), end=max(0.0, each.end - begin)) for each in spans]
    return RunLife(
        name=run.path.name,
        status=state.status,
        step=state.step,
        total_steps=state.recipe.train.steps,
        seconds=end - begin,
        spans=(PhaseSpan("plan", 0.0, 0.0, as_is(state.plan)), *_newest(moved)),
        files=_launch_files(run.path / LAUNCH_FOLDER),
    )


def _newest(spans: Sequence[PhaseSpan]) -> Iterator[PhaseSpan]:
    for phase in dict.fromkeys(each.phase for each in spans):
        yield from [each for each in spans if each.phase == phase][-MAX_SPANS:]


def _created(run: RunDirectory) -> float:
    marker = run.path / MARKER
    try:
        return float(json.loads(read_regular_text(marker))["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return os.stat(marker).st_mtime


def _ends(state: RunState) -> list[float]:
    ended = [each.ended for each in state.attempts.attempts if each.ended is not None]
    return [*ended, *([state.attempts.over_time] if state.attempts.over is not None else [])]


def _starts(state: RunState, events: Sequence[Event], begin: float, end: float) -> Iterator[PhaseSpan]:
    """Yield launch, init and training of each attempt. Without a supervisor the events of rank 0 say when each was."""
    numbers = dict.fromkeys([*(each.number for each in state.attempts.attempts), *(each.attempt for each in events)])
    by_supervisor = {each.number: each for each in state.attempts.attempts}
    before = begin
    for number in numbers:
        own = [event for event in events if event.attempt == number]
        kept = by_supervisor.get(number)
        first = kept.time if kept else own[0].time
        if number == next(iter(numbers)):
            yield PhaseSpan("launch", before, first, say("the run directory is created, ranks are started"))
        ready = next((event.time for event in own if event.kind == "ready"), None)
        last = kept.ended if kept and kept.ended is not None else max([first, *(event.time for event in own)])
        is_last = number == list(numbers)[-1]
        if is_last and kept is not None and kept.ended is None:
            last = end
        yield PhaseSpan("init", first, ready if ready is not None else last, say("start {number}", number=number + 1))
        if ready is not None:
            reached = kept.step if kept and kept.ended is not None else state.step
            yield PhaseSpan(
                "train", ready, last, say("start {number}, to step {step}", number=number + 1, step=reached)
            )


def _saves(events: Sequence[Event]) -> Iterator[PhaseSpan]:
    for event in events:
        if event.kind == "checkpoint":
            seconds = float(event.data.get("seconds", 0.0))
            yield PhaseSpan("save", event.time - seconds, event.time, say("checkpoint of step {step}", step=event.step))
        elif event.kind == "saved":
            seconds = float(event.data.get("seconds", 0.0))
            yield PhaseSpan("save", event.time - seconds, event.time, say("the trained weights"))


def _incidents(state: RunState) -> Iterator[PhaseSpan]:
    for each in state.incidents:
        took = each.cost.get("seconds_to_recover", 0.0)
        label = say("{cause}: {what}", cause=say(each.cause), what=each.what)
        yield PhaseSpan("incident", each.time, each.time + took, label)


def _changes(state: RunState, events: Sequence[Event]) -> Iterator[PhaseSpan]:
    """Yield the changes of the plan that ranks applied, and the decisions behind them."""
    for event in events:
        if event.kind == "change":
            patch = json.dumps(event.data.get("patch", {}))
            label = say("{status}: {patch}", status=say(str(event.data.get("status", ""))), patch=patch)
            yield PhaseSpan("adapt", event.time, event.time, label)
    for decision in state.decisions:
        label = say("decision {id}, {outcome}: {patch}", id=decision.id, outcome=say(decision.outcome),
                    patch=json.dumps(decision.patch))  # fmt: skip
        yield PhaseSpan("adapt", decision.time, decision.time, label)


def _launch_files(folder: Path) -> dict[str, str]:
    """Return the files that the run was launched with; empty if it was not started by `trimaran launch`."""
    if not folder.is_dir() or folder.is_symlink():
        return {}
    names = sorted(each for each in folder.iterdir() if each.name not in ("recipe.yaml", "plan.json"))
    files = [
        each for each in names if each.is_file() and not each.is_symlink() and each.stat().st_size <= MAX_FILE_BYTES
    ]
    texts = {}
    for file in files:
        try:
            texts[file.name] = read_regular_text(file)
        except (OSError, ValueError):  # not text: it is not one of the launch files
            continue
    return texts
