"""Doctor, autopilot, `tune` and `history` call the same steps steady, and so measure the same step."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run, start_ranks, step_metrics
from trimaran.app import TrialWatch
from trimaran.autopilot import Controller, baseline_of
from trimaran.doctor import read_evidence, step_breakdown
from trimaran.planner import TrialLimits, read_measured_run
from trimaran.runs import MARKER, Journal, RunDirectory, median_step

RECORDED_RUNS = Path(__file__).parent / "recorded_runs"
NUM_STEPS, USUAL = 60, 0.5


def measured_by_all(run: RunDirectory) -> dict[str, float]:
    """Return the seconds of a step as each of the four measures them."""
    breakdown = step_breakdown(read_evidence(run))
    assert breakdown is not None
    watch = TrialWatch(run, TrialLimits(), began=0.0)
    watch.refresh(now=1.0)
    return {
        "doctor": breakdown.step_seconds,
        "autopilot": baseline_of(tuple(each.seconds for each in Controller(run).loop.baseline_steps())).step_seconds,
        "tune": median_step(watch.steady).step_seconds,
        "history": read_measured_run(run.path).plans[-1].steps.step_seconds,
    }


def add_event(run: RunDirectory, kind: str, *, step: int, **data: Any) -> None:
    """Write an event of rank 0 at the time of a step."""
    event = {"kind": kind, "rank": 0, "time": 1000.0 + step, "step": step, "attempt": 0, "data": data}
    with run.events(0).open("a") as file:
        file.write(json.dumps(event) + "\n")


def written_run(path: Path, seconds: Sequence[float], *, stalls: Sequence[float] = ()) -> RunDirectory:
    """Return a run with steps of these seconds, in which checkpoints stalled so long besides."""
    run = new_run(path, world_size=1, steps=len(seconds))
    start_ranks(run, world_size=1)
    with Journal(run, 0) as journal:
        for step, took in enumerate(seconds, 1):
            stall = stalls[step - 1] if stalls else 0.0
            metrics = step_metrics(step, loss=1.0, seconds=took)
            journal.step(replace(metrics, step_seconds=took + stall, phases=metrics.phases | {"checkpoint": stall}))
    return run


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED_RUNS.iterdir()))
def test_all_measure_the_same_step_of_a_recorded_run(name: str, tmp_path: Path) -> None:
    shutil.copytree(RECORDED_RUNS / name, tmp_path / name)
    run = RunDirectory(tmp_path / name)
    (run.path / MARKER).write_text('{"created": 0}')
    ranks = run.read_plan().mesh.world_size
    start = {"kind": "start", "rank": 0, "time": 1.0, "step": 0, "attempt": 0, "data": {"world_size": ranks}}
    run.events(0).write_text(json.dumps(start) + "\n" + run.events(0).read_text())
    found = measured_by_all(run)
    assert set(found.values()) == {found["doctor"]}


def test_steps_after_a_start_and_beside_a_checkpoint_do_not_count(tmp_path: Path) -> None:
    """The first five steps after both starts are slow, and so are most others, because something runs beside them."""
    seconds = [9.0 if step <= 5 or 31 <= step <= 35 else USUAL for step in range(1, NUM_STEPS + 1)]
    busy = [*range(8, 18), *range(20, 30), *range(40, 52)]
    run = written_run(tmp_path / "run", [3.0 if step in busy else each for step, each in enumerate(seconds, 1)])
    add_event(run, "upload", step=17, seconds=9.0)
    add_event(run, "evaluation", step=29, seconds=9.0)
    add_event(run, "resume", step=30)
    add_event(run, "checkpoint", step=51, seconds=11.0)
    assert measured_by_all(run) == dict.fromkeys(("doctor", "autopilot", "tune", "history"), USUAL)


def test_if_a_checkpoint_is_always_being_written_all_warm_steps_count(tmp_path: Path) -> None:
    stalls = [0.4 if step % 3 else 0.0 for step in range(1, NUM_STEPS + 1)]
    run = written_run(tmp_path / "run", [USUAL] * NUM_STEPS, stalls=stalls)
    for step in range(10, NUM_STEPS, 10):
        add_event(run, "checkpoint", step=step, seconds=10.0)
    assert measured_by_all(run) == dict.fromkeys(("doctor", "autopilot", "tune", "history"), pytest.approx(USUAL))
    assert len(Controller(run).loop.baseline_steps()) == NUM_STEPS - 5
