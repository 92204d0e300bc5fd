"""The status lines of the panel: findings, ranks, memory, machines, goodput."""

import io
import itertools
import json
import shlex
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.runs import finished_run, new_run, start_ranks, step_metrics
from trimaran.app import (
    CleanConsole,
    FindingsPoller,
    RunDiagnosis,
    RunFinding,
    RunState,
    draw,
    follow,
    main,
    status_lines,
)
from trimaran.core import Finding
from trimaran.runs import (
    AttemptLog,
    IncidentLog,
    Journal,
    MeasuredLinks,
    RunDirectory,
    append_line,
    write_measured_links,
)
from trimaran.ui import MAX_STEPS, detailed_steps

GIB = 2**30
RANKS = {
    "step": 9,
    "busy_seconds": {"min": 0.4, "median": 0.5, "max": 1.5, "at": 1},
    "wait_seconds": {"min": 0.0, "median": 1.0, "max": 1.1, "at": 0},
    "outliers": [{"rank": 1, "what": "busy_seconds", "value": 1.5, "median": 0.5}],
}
MEMORY = {
    "allocated": 60 * GIB,
    "reserved": 75 * GIB,
    "fragmentation": 0.12,
    "retries": 3,
    "ooms": 0,
    "total": 80 * GIB,
}
GPU = {
    "utilisation": 0.9,
    "memory_used": 75,
    "memory": 80,
    "power": 650.0,
    "temperature": 71,
    "throttle": ["power_cap"],
}
SLOW = RunFinding(
    finding=Finding(code="F001", severity="warning", verdict="the loader is too slow: " + "data " * 40,
                    culprit="rank 0", patch={"data.loader.workers": 4}, expected_effect="steps 30% shorter", gain=0.3),
    command="trimaran train runs/toy/recipe.yaml --set data.loader.workers=4" + " --set train.seed=1" * 5,
)  # fmt: skip


def detailed_run(path: Path) -> RunDirectory:
    """Return a run with data for every status line."""
    run = new_run(path, steps=100)
    AttemptLog(run).begin(world_size=2)
    start_ranks(run)
    with Journal(run, 0) as journal:
        for step in range(1, 11):
            journal.step(replace(step_metrics(step, loss=2.0), time=time.time(),
                                 details={"ranks": RANKS, "memory": MEMORY} if step == 9 else {}))  # fmt: skip
    IncidentLog(run).notice("crash", "rank 1 died of SIGKILL", step=4, action="restarted")
    for node in (0, 1):
        host = {"cpu": 0.25 + node / 2, "ram_used": 1, "ram": 4, "disk_free": 50 * GIB}
        append_line(run.samples(node), {"time": 1.0, "node": node, "gpus": [GPU]} | host)
    return run


def state_of(run: RunDirectory) -> RunState:
    state = RunState(run)
    state.refresh()
    return state


def poller_of(run: RunDirectory, *findings: RunFinding) -> FindingsPoller:
    """Return a poller whose doctor reports `findings`."""
    poller = FindingsPoller(run, at_once=True, read=lambda _: RunDiagnosis([*findings]))
    poller.poll()
    return poller


def text_of(panel: Any, width: int) -> str:
    console = CleanConsole(file=io.StringIO(), width=width)
    console.print(panel)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_each_kind_of_data_has_a_line(tmp_path: Path) -> None:
    run = detailed_run(tmp_path / "run")
    lines = [each.plain for each in status_lines(state_of(run), poller_of(run, SLOW))]
    assert lines[0].startswith("finding   ! F001 the loader is too slow")
    assert lines[2:] == [
        "incident  1 so far; last: i-0001 crash: rank 1 died of SIGKILL",
        "ranks     work 500 ms 400 ms..1.5 s (rank 1)   wait 1.0 s 0 ms..1.1 s (rank 0)",
        "          rank 1 is an outlier: work 1.5 s, 3.0 x the median",
        "memory    75.0 GiB of 80.0 GiB (94%), 60.0 GiB in tensors, 12% fragmented, 3 retries",
        "2 nodes   cpu 25%..75%, ram 25%, disk free 50.0 GiB",
        "2 gpus    busy 90%, memory 94%, 650 W, 71 °C, at the power limit",
    ]
    assert lines[1].startswith("goodput   ")


def test_groups_of_nodes_by_measured_links_have_a_line(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    write_measured_links(run, MeasuredLinks(order=("a", "c", "b", "d")))
    assert status_lines(state_of(run)) == [], "all links are alike"
    write_measured_links(run, MeasuredLinks(groups=(("a", "c"), ("b", "d")), order=("a", "c", "b", "d")))
    assert [each.plain for each in status_lines(state_of(run))] == ["links     faster among a, c; b, d"]


def test_a_run_of_an_older_version_has_no_lines(tmp_path: Path) -> None:
    assert status_lines(state_of(finished_run(tmp_path / "run"))) == []


@pytest.mark.parametrize("key", ["ranks", "memory"])
@pytest.mark.parametrize("value", [None, "word", [], {"busy_seconds": "x", "outliers": [{}, 1], "reserved": "y"}])
def test_invalid_data_is_skipped(tmp_path: Path, key: str, value: Any) -> None:
    run = finished_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        journal.step(replace(step_metrics(11, loss=1.0), details={key: value}))
    append_line(run.samples(0), {"cpu": "x", "gpus": [1, {"throttle": 3}], "ram": 0, "ram_used": 1})
    assert status_lines(state_of(run)) == []


@pytest.mark.parametrize(("width", "height"), [(60, 24), (80, 30), (130, 24), (60, 60)])
def test_the_panel_never_outgrows_its_window(tmp_path: Path, width: int, height: int) -> None:
    run = detailed_run(tmp_path / "run")
    state = state_of(run)
    extra = status_lines(state, poller_of(run, SLOW))
    rows = text_of(draw(state, width=width, height=height, extra=extra), width).splitlines()
    assert len(rows) <= height
    assert {len(row) for row in rows} == {width}
    assert any("F001" in row for row in rows)
    assert any("2 gpus" in row for row in rows) == (height > 24 or width == 130)


def test_a_finding_is_printed_once_with_its_command_on_one_line(tmp_path: Path) -> None:
    run = detailed_run(tmp_path / "run")
    console = CleanConsole(file=io.StringIO(), width=60)
    ended = iter([False, False, True])
    follow(RunState(run), console, has_ended=lambda: next(ended), poller=poller_of(run, SLOW))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("F001") == 1
    assert f"\n  fix: {SLOW.command}\n  expect: steps 30% shorter\n" in text
    assert shlex.split(SLOW.command)[:2] == ["trimaran", "train"]
    assert "\x1b" not in text


def test_a_finding_is_new_once_and_again_if_it_becomes_a_fault(tmp_path: Path) -> None:
    poller = poller_of(finished_run(tmp_path / "run"))
    fault = replace(SLOW, finding=replace(SLOW.finding, severity="fault", verdict="worse now"))
    other = replace(SLOW, finding=replace(SLOW.finding, culprit="rank 1"))
    new = []
    for findings in ([SLOW], [replace(SLOW, command="another")], [fault], [SLOW, fault], [], [SLOW, other]):
        poller.findings = findings
        new.append(poller.new_findings())
    assert new == [[SLOW], [], [fault], [], [], [other]]


def test_a_doctor_that_fails_is_reported_once_and_the_run_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, console = finished_run(tmp_path / "run"), CleanConsole(file=io.StringIO(), width=60)
    state, ended, seconds = RunState(run), iter([False, True]), itertools.count(step=1000.0)
    run.plan.write_text("{}")
    poller = FindingsPoller(run, at_once=True, clock=lambda: next(seconds))
    follow(state, console, has_ended=lambda: next(ended), poller=poller)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("the doctor failed: ") == 1
    assert "step 10/10" in text
    assert capsys.readouterr().err == "", "no traceback over the panel"
    assert any("the doctor failed" in each.plain for each in status_lines(state, poller))


def test_the_doctor_is_polled_every_ten_seconds_and_less_often_if_it_is_slow(tmp_path: Path) -> None:
    clock, polls = [100.0], []

    def read(run: RunDirectory) -> RunDiagnosis:
        polls.append(clock[0])
        clock[0] += 2.0  # a twentieth of a core: not again within 40 s
        return RunDiagnosis([])

    poller = FindingsPoller(finished_run(tmp_path / "run"), at_once=False, read=read, clock=lambda: clock[0])
    for _ in range(80):
        poller.poll()
        clock[0] += 1.0
    assert polls == [110.0, 150.0]


def test_watch_json_has_what_watch_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(detailed_run(tmp_path / "run").path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ranks"] == RANKS
    assert answer["memory"] == MEMORY
    assert [each["node"] for each in answer["machines"]] == [0, 1]
    assert isinstance(answer["findings"], list)


def test_details_are_kept_evenly_over_a_long_run(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    lines = [json.dumps(step_metrics(step, loss=1.0).as_dict() | {"number": step}) for step in range(1, 5001)]
    run.metrics.write_text("\n".join(lines) + "\n")
    found = detailed_steps(run)
    assert MAX_STEPS / 2 <= len(found) < MAX_STEPS
    assert {after - before for (before, _), (after, _) in pairwise(found)} == {8}
    assert all(details == {"number": step} for step, details in found)
    assert state_of(run).latest == {"number": 5000}
