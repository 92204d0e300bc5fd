"""Reads what `trimaran viz` is asked about: a plan, a run with its life, or the example; and the files of a launch."""

import json
import os
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from trimaran.app import Request, RunState, find_run, read_plan_request
from trimaran.app.plan.simulate_answer import PLAN_FILE, read_simulate_request
from trimaran.app.runs.run_state import ACTIVE_STATUSES
from trimaran.app.train.launch_answer import launch_request, preview_options, resolve_launch
from trimaran.core import Event, UserError, read_regular_text
from trimaran.launch import TARGET_CLASSES, open_target
from trimaran.machine import read_comm_result
from trimaran.runs import MARKER, RunDirectory, last_lines
from trimaran.runs.journal import parse_lines
from trimaran.runs.record_types import is_number
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.subject import (
    Launches,
    LaunchText,
    MeasuredSteps,
    PhaseSpan,
    RankSpread,
    RunLife,
    RunMedians,
    Subject,
)

EXAMPLE = {"what": "llama-3.1-8b", "cluster": "2x8xH100"}
MEASURED_STEPS = 100  # whose medians are shown


def read_subject(
    plan: str | None,
    run: str | None,
    cluster: str | None,
    settings: Sequence[str],
    controls: Sequence[str],
    comm: Path | None = None,
) -> Subject:
    """Return what the view is about. Without a plan and a run, that is an 8B model on 16 GPUs."""
    if plan is not None and run is not None:
        raise UserError("V004.view-plan-run", where="--plan, --run")
    directory = find_run(run) if run is not None else None
    asked = cluster, settings
    subject = run_subject(directory, *asked) if directory is not None else plan_subject(plan, *asked)
    settings_of_view = {}
    for each in controls:
        name, separator, value = each.partition("=")
        if not separator:
            raise UserError("V002.not-control-value", where="--with", each=each[:60])
        settings_of_view[name.strip()] = value.strip()
    measured = read_comm_result(comm) if comm is not None else None
    return replace(subject, settings=settings_of_view, comm=measured)


def plan_subject(what: str | None, cluster: str | None, settings: Sequence[str]) -> Subject:
    if what is None and not settings:
        what, cluster = EXAMPLE["what"], cluster or EXAMPLE["cluster"]
    shortcuts = {"cluster": cluster}
    request = read_simulate_request(what, shortcuts, settings)
    launches: Launches = {}
    if not (what and PLAN_FILE.search(what)):
        asked = read_plan_request(what, shortcuts, settings)
        launches = launches_of(asked.file, asked.settings)
    return Subject(question=request.question, cluster=request.cluster, plan=request.plan, launches=launches)


def run_subject(run: RunDirectory, cluster: str | None = None, settings: Sequence[str] = ()) -> Subject:
    request = read_simulate_request(str(run.path), {"cluster": cluster}, settings)
    given = [f"cluster={cluster}"] if cluster else []
    plan, own = request.plan, run.read_plan()
    if own.model_copy(update={"prediction": None}) == plan and not cluster and not settings:
        plan = own  # with the prediction of its start, whatever was measured on this machine since
    return Subject(
        question=request.question,
        cluster=request.cluster,
        plan=plan,
        run=measured_of(run),
        life=life_of(run),
        launches=launches_of(str(run.recipe), [*given, *settings]),
    )


def measured_of(run: RunDirectory) -> RunMedians | None:
    """Return what the run's last steps have measured; None before its first step."""
    lines = [each for each in parse_lines(last_lines(run.metrics, MEASURED_STEPS)) if each.get("step_seconds")]
    if not lines:
        return None
    compared = [(line.get("ranks") or {}).get("busy_seconds") for line in lines]
    # Not every step has the times of the stages of a pipeline.
    stages = [
        bubble for line in lines if isinstance(bubble := line.get("bubble"), dict) and bubble.get("stage_seconds")
    ]
    newest = stages[-1] if stages else {}
    return RunMedians(
        name=run.path.name,
        steps=int(lines[-1]["step"]),
        step_seconds=median(each["step_seconds"] for each in lines),
        peak_bytes=max(_peak(each) for each in lines),
        tokens_per_second=median(float(each.get("tokens_per_second") or 0.0) for each in lines),
        phases=_medians(lines, "phases"),
        comm_seconds=_medians(lines, "comm_seconds"),
        ranks=_spreads(lines),
        slowest=Counter(int(busy["at"]) for busy in compared if isinstance(busy, dict) and is_number(busy.get("at"))),
        last=MeasuredSteps(
            numbers=tuple(int(each["step"]) for each in lines),
            seconds=tuple(float(each["step_seconds"]) for each in lines),
            peak_bytes=tuple(map(_peak, lines)),
            comm=tuple(float((each.get("phases") or {}).get("comm") or 0.0) for each in lines),
        ),
        stage_seconds=tuple(newest.get("stage_seconds", ())),
        stage_layers=tuple(newest.get("stage_layers", ())),
    )


def _spreads(lines: Sequence[Mapping[str, Any]]) -> dict[str, RankSpread]:
    """Return the newest comparison of the ranks: the least, the median and the most of each measure."""
    found = [ranks for line in lines if isinstance(ranks := line.get("ranks"), dict)]
    spreads = {}
    for name, each in found[-1].items() if found else ():
        if isinstance(each, dict) and all(is_number(each.get(key)) for key in ("min", "median", "max", "at")):
            spreads[name] = RankSpread(each["min"], each["median"], each["max"], int(each["at"]))
    return spreads


def _peak(line: Mapping[str, Any]) -> float:
    ranks = line.get("ranks") or {}
    return float(max(line.get("peak_bytes") or 0, (ranks.get("peak_bytes") or {}).get("max") or 0))


def _medians(lines: Sequence[Mapping[str, Any]], field: str) -> dict[str, float]:
    names = dict.fromkeys(name for line in lines for name in line.get(field) or {})
    found = {name: [value for line in lines if (value := (line.get(field) or {}).get(name)) is not None]
             for name in names}  # fmt: skip
    return {name: median(values) for name, values in found.items() if values}


def launches_of(file: str | None, settings: Sequence[str]) -> Launches:
    """Return the launch of a recipe on each target; a call plans it, and the plan is kept for the other targets."""

    @cache
    def planned() -> Request:
        return resolve_launch(file, settings)

    @cache
    def launch(target: str) -> LaunchText:
        found = open_target(target)
        options = preview_options(found)
        files = found.render(launch_request(found, planned(), options))
        words = [*([file] if file else []), *(word for each in settings for word in ("--set", each))]
        words += [word for each in options.site for word in ("--site", each)]
        return LaunchText(
            command=shlex.join(["trimaran", "launch", *words, "--on", target]),
            files=dict(files.files),
            main=files.main,
            submit=tuple(shlex.join(each) for each in files.submit),
        )

    return {target: (lambda target=target: launch(target)) for target in TARGET_CLASSES}


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
    ended = [each.ended for each in state.attempts.attempts if each.ended is not None]
    ended += [state.attempts.over_time] if state.attempts.over is not None else []
    end = now if is_active else max([begin, *(each.time for each in events), *ended])
    spans = [*_starts(state, events, begin, end), *_happenings(state, events)]
    moved = [each._replace(start=max(0.0, each.start - begin), end=max(0.0, each.end - begin)) for each in spans]
    newest = [span for phase in dict.fromkeys(each.phase for each in moved)
              for span in [each for each in moved if each.phase == phase][-MAX_SPANS:]]  # fmt: skip
    files, folder = {}, run.path / LAUNCH_FOLDER
    for file in sorted(folder.iterdir()) if folder.is_dir() and not folder.is_symlink() else ():
        is_one = file.name not in ("recipe.yaml", "plan.json") and file.is_file() and not file.is_symlink()
        if is_one and file.stat().st_size <= MAX_FILE_BYTES:
            with suppress(OSError, ValueError):  # not text: it is not one of the launch files
                files[file.name] = read_regular_text(file)
    return RunLife(
        name=run.path.name,
        status=state.status,
        step=state.step,
        total_steps=state.recipe.train.steps,
        seconds=end - begin,
        spans=(PhaseSpan("plan", 0.0, 0.0, as_is(state.plan)), *newest),
        files=files,
    )


def _created(run: RunDirectory) -> float:
    marker = run.path / MARKER
    try:
        return float(json.loads(read_regular_text(marker))["created"])
    except (OSError, ValueError, KeyError, TypeError):
        return os.stat(marker).st_mtime


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


def _happenings(state: RunState, events: Sequence[Event]) -> Iterator[PhaseSpan]:
    """Yield saves, incidents and changes of the plan."""
    for event in events:
        if event.kind in ("checkpoint", "saved"):
            start = event.time - float(event.data.get("seconds", 0.0))
            is_checkpoint = event.kind == "checkpoint"
            label = say("checkpoint of step {step}", step=event.step) if is_checkpoint else say("the trained weights")
            yield PhaseSpan("save", start, event.time, label)

    for each in state.incidents:
        took = each.cost.get("seconds_to_recover", 0.0)
        label = say("{cause}: {what}", cause=say(each.cause), what=each.what)
        yield PhaseSpan("incident", each.time, each.time + took, label)

    for event in events:
        if event.kind == "change":
            patch = json.dumps(event.data.get("patch", {}))
            label = say("{status}: {patch}", status=say(str(event.data.get("status", ""))), patch=patch)
            yield PhaseSpan("adapt", event.time, event.time, label)
    for decision in state.decisions:
        label = say("decision {id}, {outcome}: {patch}", id=decision.id, outcome=say(decision.outcome),
                    patch=json.dumps(decision.patch))  # fmt: skip
        yield PhaseSpan("adapt", decision.time, decision.time, label)
