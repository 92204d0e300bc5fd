"""The controller beside a process that writes steps and answers requests; and the ledger that it writes."""

import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.answering_run import main as answer_changes
from tests.answering_run import metrics
from trimaran.autopilot import (
    Controller,
    DecisionLedger,
    Proposal,
    control,
    only_controller,
    read_answer,
    read_sample,
    undo_of,
)
from trimaran.core import Decision, Plan, parse_recipe
from trimaran.doctor import Evidence
from trimaran.launch import autopilot_process
from trimaran.runs import (
    IncidentLog,
    Journal,
    RunDirectory,
    RunReader,
    create_run,
    parse_decision,
    read_change_request,
    read_decisions,
    replace_plan,
    write_change_request,
)

FAST = {"plan.micro_batch": 2, "plan.grad_accum": 4}
SLOW = {"plan.comm.bucket_mb": 1}
NEVER = {"plan.compile": True}
SECONDS = 120.0  # far more than it takes on a busy machine


class PlannedController(Controller):
    """A controller that proposes what the test says, instead of what the cost model says."""

    patches: Sequence[dict[str, Any]] = (FAST,)

    def propose(self) -> list[Proposal]:
        settings = self.settings()
        return [
            Proposal(patch=each, undo=undo_of(each, settings) or {}, gain=0.2, uncertainty=0.05, reason="a try")
            for each in self.patches
        ]


def new_run(path: Path, mode: str = "act") -> RunDirectory:
    recipe = parse_recipe(f"autopilot: {mode}", name="test", overrides=["train.steps=100000", "train.global_batch=8"])
    return create_run(path, recipe, Plan(micro_batch=1, grad_accum=8))


@contextmanager
def ranks(run: RunDirectory) -> Iterator[None]:
    """Run the process that writes steps and answers requests."""
    process = multiprocessing.get_context("fork").Process(target=answer_changes, args=(run.path,))
    process.start()
    try:
        yield
        assert process.is_alive(), "the process has died"
    finally:
        run.stop_request.touch()
        process.join(SECONDS)
        process.kill()
        process.join()


def poll_until(controller: Controller, condition: Callable[[], bool]) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < until, read_decisions(controller.run)
        controller.poll()
        time.sleep(0.02)


def is_applied(controller: Controller) -> bool:
    """Return whether the change to FAST is applied, and the controller has read the answer."""
    return controller.run.read_plan().micro_batch == 2 and controller.loop.pending is None


def outcomes(run: RunDirectory) -> list[str]:
    return [each.outcome for each in read_decisions(run)]


def test_changes_are_tried_measured_and_kept_or_rolled_back(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with ranks(run):
        controller = PlannedController(run)
        controller.patches = (NEVER, SLOW, FAST)
        poll_until(controller, lambda: sorted(outcomes(run)) == ["kept", "refused", "rolled-back"])
    by_patch = {json.dumps(each.patch): each for each in read_decisions(run)}
    kept, slow = by_patch[json.dumps(FAST)], by_patch[json.dumps(SLOW)]
    assert kept.outcome == "kept"
    assert kept.measured is not None
    assert kept.measured["gain"] == pytest.approx(0.2, abs=0.03)
    assert slow.outcome == "rolled-back"
    assert slow.measured is not None
    assert slow.measured["gain"] < -0.3
    assert "this cannot be" in by_patch[json.dumps(NEVER)].reason
    assert run.read_plan().micro_batch == 2
    assert run.read_plan().comm.bucket_mb == 25


def test_the_best_layout_is_searched_once_for_each_plan(tmp_path: Path) -> None:
    searched = list[Plan]()

    def search(evidence: Evidence) -> dict[str, Any]:
        searched.append(evidence.plan)
        return {}

    run = new_run(tmp_path / "run")
    found = Controller(run, search_layout=search)
    for _ in range(2):  # a decision may wait for more steps before the change, and then everything is proposed again
        found.propose()
    assert searched == [run.read_plan()]
    replace_plan(run, Plan(micro_batch=2, grad_accum=4))
    found.settings()  # as in a poll: the files are read again
    found.propose()
    assert [each.micro_batch for each in searched] == [1, 2]


def test_a_controller_that_starts_again_in_a_trial_finishes_it(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with ranks(run):
        first = PlannedController(run)
        poll_until(first, lambda: is_applied(first))  # the ranks have answered once; a verdict takes three
        assert outcomes(run) == ["trying"]
        again = PlannedController(run)
        assert again.loop.trial is not None
        poll_until(again, lambda: outcomes(run) == ["kept"])


def test_a_persons_request_comes_first_and_pins_what_it_sets(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with ranks(run):
        controller = PlannedController(run)
        poll_until(controller, lambda: outcomes(run) == ["trying"])
        poll_until(controller, lambda: read_change_request(run) is None)
        write_change_request(run, {"plan.micro_batch": 4, "plan.grad_accum": 2}, by="user", reason="I know better")
        poll_until(controller, lambda: "plan.micro_batch" in controller.loop.pins)
        assert outcomes(run) != ["trying"]
        step = controller.loop.step
        poll_until(controller, lambda: controller.loop.step > step + 60)
    assert run.read_plan().micro_batch == 4
    assert len(read_decisions(run)) == 1


def test_switching_the_autopilot_off_ends_its_trial(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with ranks(run):
        controller = PlannedController(run)
        poll_until(controller, lambda: is_applied(controller))
        run.autopilot_off.touch()
        poll_until(controller, lambda: outcomes(run) == ["rolled-back"])
        assert run.read_plan().micro_batch == 1
        step = controller.loop.step
        poll_until(controller, lambda: controller.loop.step > step + 60)
    assert len(read_decisions(run)) == 1


def written_run(path: Path, mode: str = "act", steps: int = 60) -> tuple[RunDirectory, Journal]:
    run = new_run(path, mode)
    journal = Journal(run, 0)
    for step in range(1, steps + 1):
        journal.step(metrics(step, 0.1 + step % 3 * 1e-4))
    return run, journal


def test_nothing_is_decided_while_an_incident_is_open(tmp_path: Path) -> None:
    run, _ = written_run(tmp_path / "run")
    incidents = IncidentLog(run)
    incident = incidents.notice("hang", "a rank hangs")
    controller = PlannedController(run)
    controller.poll()
    assert outcomes(run) == []
    incidents.amend(incident, action="continued", cost={"seconds_to_recover": 1.0})
    controller.poll()
    assert outcomes(run) == ["trying"]


def test_a_request_that_nobody_answers_is_given_up(tmp_path: Path) -> None:
    run, _ = written_run(tmp_path / "run")
    controller = PlannedController(run)
    controller.poll()
    request = read_change_request(run)
    assert request is not None
    assert (request.id, request.by, request.patch) == (1, "autopilot", FAST)
    run.change_request.unlink()
    for _ in range(6):
        controller.poll()
    assert outcomes(run) == ["rolled-back"]
    assert "did not answer" in read_decisions(run)[0].reason


def test_a_persons_pending_request_is_never_replaced(tmp_path: Path) -> None:
    run, _ = written_run(tmp_path / "run")
    write_change_request(run, {"plan.recompute": "full"}, by="user")
    controller = PlannedController(run)
    controller.poll()
    request = read_change_request(run)
    assert request is not None
    assert request.by == "user"
    assert outcomes(run) == []


class CountingController(Controller):
    """Counts how often it diagnoses the run."""

    num_diagnoses = 0

    def propose(self) -> Sequence[Proposal]:
        self.num_diagnoses += 1
        return super().propose()


def test_an_advising_controller_diagnoses_a_real_run_and_requests_nothing(tmp_path: Path) -> None:
    run, _ = written_run(tmp_path / "run", "advise")
    now = 1000.0
    controller = CountingController(run, clock=lambda: now)
    counts = []
    # Not in the first minute. A diagnosis takes a thousand times as long to come again.
    for seconds in (0.0, 59.0, 2.0, 1.0, 1e6):
        now += seconds
        controller.poll()
        counts.append(controller.num_diagnoses)
        controller.loop.due = 0
    assert counts == [0, 0, 1, 1, 2]
    assert read_change_request(run) is None
    assert set(outcomes(run)) <= {"advised"}


def test_only_one_controller_runs_at_a_time(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with only_controller(run) as first, only_controller(run) as second:
        assert (first, second) == (True, False)
    with only_controller(run) as later:
        assert later


def test_a_controller_ends_when_it_is_told_to_and_with_mode_off_at_once(tmp_path: Path) -> None:
    run, stop = new_run(tmp_path / "run", "off"), threading.Event()
    control(run, stop)
    acting = new_run(tmp_path / "other")
    thread = threading.Thread(target=control, args=(acting, stop))
    thread.start()
    stop.set()
    thread.join(SECONDS)
    assert not thread.is_alive()


def decision(number: int, **other: Any) -> Decision:
    known: dict[str, Any] = {
        "time": 1.0,
        "step": 3,
        "finding": "F006",
        "reason": "why",
        "patch": {"plan.micro_batch": 2},
    }
    return Decision(id=number, **known | {"undo": {"plan.micro_batch": 1}} | other)


def test_the_last_line_of_a_decision_counts_and_a_torn_one_does_not(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    ledger, reader = DecisionLedger(run), RunReader(run)
    ledger.write(decision(1))
    ledger.write(decision(2, outcome="advised"))
    assert list(reader.new_decisions()) == [1, 2]
    ledger.write(decision(1, outcome="kept", measured={"gain": 0.1}))
    with run.decisions.open("ab") as file:
        file.write(b'{"id": 2, "outcome": "ke')
    assert list(reader.new_decisions()) == [1]
    found = read_decisions(run)
    assert [(each.id, each.outcome) for each in found] == [(1, "kept"), (2, "advised")]
    assert found[0] == decision(1, outcome="kept", measured={"gain": 0.1})
    ledger.write(decision(2, outcome="kept"))
    assert [each.outcome for each in read_decisions(run)] == ["kept", "kept"]


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"null", b'{"id": 1}', b"{", json.dumps(decision(1).as_dict() | {"id": "one"}).encode(),
     json.dumps(decision(1).as_dict() | {"outcome": "perhaps"}).encode(),
     json.dumps(decision(1).as_dict() | {"patch": []}).encode()],
)  # fmt: skip
def test_damaged_lines_are_skipped(line: bytes) -> None:
    assert parse_decision(line) is None


def test_damaged_events_and_steps_are_skipped() -> None:
    good = {"step": 7, "data": {"id": 1, "status": "applied", "patch": {}, "how": "in place", "pause_seconds": 0.5}}
    answer = read_answer(good)
    assert answer is not None
    assert (answer.step, answer.in_place, answer.pause_seconds, answer.by) == (7, True, 0.5, "autopilot")
    for damage in ({"data": None}, {"data": {}}, {"data": {"status": "applied", "id": "x", "patch": {}}}):
        assert read_answer(good | damage) is None
    line = {"step": 3, "step_seconds": 0.5, "phases": {"checkpoint": 0.2}, "peak_bytes": 10}
    sample = read_sample(line)
    assert sample is not None
    assert (sample.seconds, sample.seconds_with_checkpoint) == (pytest.approx(0.3), 0.5)
    assert read_sample({"step": 3}) is None
    assert read_sample({"step": "x", "step_seconds": 1.0}) is None


def test_a_supervisor_without_a_view_has_a_process_that_controls_the_run_and_ends_with_it(tmp_path: Path) -> None:
    run, _ = written_run(tmp_path / "run")

    def is_controlled() -> bool:
        with only_controller(run) as is_only:
            return not is_only

    assert not is_controlled()
    with autopilot_process(run, os.environ):
        until = time.monotonic() + SECONDS
        while not is_controlled():
            assert time.monotonic() < until
            time.sleep(0.05)
    assert not is_controlled()
    assert "Traceback" not in (run.agent_log.parent / "autopilot.log").read_text()
    advised, _ = written_run(tmp_path / "advised", "advise")
    with autopilot_process(advised, os.environ):
        assert not (advised.agent_log.parent / "autopilot.log").exists()
