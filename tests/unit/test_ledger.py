"""Every second of a run is accounted for, whatever happened to it."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.goodput import check_goodput
from tests.runs import new_run, step_metrics
from trimaran.run import Journal, RunDirectory, append_line
from trimaran.run.journal import forget_steps_after
from trimaran.telemetry.ledger import CATEGORIES, IN_STEPS, Books, Ledger, ledger_of, split
from trimaran.telemetry.step_lines import read_step

STEP = {"data": 0.05, "forward": 0.25, "backward": 0.5, "comm": 0.125, "optimizer": 0.05, "checkpoint": 0.025}
STEP_SECONDS = sum(STEP.values())


@dataclass
class Voyage:
    """Writes the files of a run as if it had taken place, by a clock of its own, and knows the truth about it."""

    run: RunDirectory
    now: float = 1000.0
    done: int = 0
    attempts: int = 0
    truth: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))

    def spend(self, what: str, seconds: float) -> None:
        self.now += seconds
        self.truth[what] += seconds

    def event(self, kind: str, *, step: int = 0, **data: Any) -> None:
        record = {"kind": kind, "rank": 0, "time": self.now, "step": step, "attempt": self.attempts - 1, "data": data}
        append_line(self.run.events(0), record)

    def begin(self, *, lead: str, seconds: float, start: int) -> None:
        """Start the ranks, which go on from step `start`; what was done after it is done again."""
        about = {"world_size": 2, "host": "here", "pid": 1}
        append_line(self.run.attempts, {"attempt": self.attempts, "time": self.now} | about)
        self.attempts += 1
        self.spend(lead, seconds)
        if lost := forget_steps_after(start, self.run.metrics) if self.run.metrics.exists() else []:
            self.event("replay", step=start, steps=len(lost), seconds=sum(lost))
        self.forget(self.done - start)
        self.done = start
        self.event("ready", step=start)

    def forget(self, steps: int) -> None:
        """The steps were for nothing."""
        for name, phases in BOOKS.items():
            self.truth[name] -= steps * sum(STEP[phase] for phase in phases)
        self.truth["replay"] += steps * STEP_SECONDS

    def step(self, *, written: bool = True) -> None:
        self.done += 1
        for name, phases in BOOKS.items():
            self.spend(name, sum(STEP[phase] for phase in phases))
        if written:
            step = replace(step_metrics(self.done, loss=1.0, seconds=STEP_SECONDS), phases=STEP, time=self.now)
            append_line(self.run.metrics, step.as_dict())

    def end(self, how: str) -> None:
        append_line(self.run.attempts, {"attempt": 0, "ended": self.now, "how": how, "step": self.done})

    def over(self) -> None:
        append_line(self.run.attempts, {"over": 0, "why": "", "time": self.now})

    def check(self, ledger: Ledger) -> None:
        assert sum(ledger.seconds.values()) == pytest.approx(ledger.total)
        assert ledger.total == pytest.approx(self.now - 1000.0)
        assert ledger.seconds == pytest.approx(self.truth, abs=1e-6)


BOOKS = {
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("comm",),
    "data": ("data",),
    "save": ("checkpoint",),
}


def test_a_run_without_trouble_adds_up_and_its_end_is_told_by_its_events(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    voyage.step()
    voyage.event("started", step=1, compile={"seconds": 0.5})
    voyage.truth["compute"] -= 0.5
    voyage.truth["compile"] += 0.5
    voyage.step()
    voyage.spend("evaluation", 2.0)
    voyage.event("evaluation", step=2)
    for _ in range(20):
        voyage.step()
    for what, kind, seconds in (("save", "checkpoint", 1.0), ("save", "saved", 0.5), ("evaluation", "sample", 0.25)):
        voyage.spend(what, seconds)
        voyage.event(kind, step=22)
    voyage.event("done", step=22)
    voyage.spend("init", 0.125)
    voyage.end("done")
    voyage.over()
    ledger = ledger_of(voyage.run)
    voyage.check(ledger)
    moved = ledger.seconds["compute"] + ledger.seconds["communication"]
    assert ledger.goodput == pytest.approx(moved / ledger.total)


starts = st.tuples(st.floats(0.1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 8), st.floats(0.5, 60))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(starts, min_size=1, max_size=5), st.booleans())
def test_what_is_lost_in_trouble_is_told_from_what_counts(troubles: list[tuple], is_resumed: bool) -> None:
    with TemporaryDirectory() as folder:
        voyage = Voyage(RunDirectory(Path(folder)))
        lead = "init"
        books = Books(voyage.run)
        for seconds, steps, unwritten, lost, noticing in troubles:
            voyage.begin(lead=lead, seconds=seconds, start=max(0, voyage.done - lost))
            for number in range(steps + 3):
                voyage.step(written=number < steps + 3 - unwritten)
            voyage.spend("restart", noticing)
            voyage.forget(unwritten)  # whether a start from memory finds them or not, they leave no line
            voyage.end("trouble")
            voyage.done -= unwritten
            books.ledger()  # who looks often sees the same
            voyage.spend("restart", 0.25)
            lead = "restart"
        voyage.begin(lead="restart", seconds=1.0, start=voyage.done)
        voyage.step()
        voyage.end("stopped")
        voyage.over()
        if is_resumed:
            voyage.spend("idle", 3600.0)
            voyage.begin(lead="init", seconds=4.0, start=voyage.done)
            voyage.step()
            voyage.end("done")
            voyage.over()
        voyage.check(ledger_of(voyage.run))
        voyage.check(books.ledger())


def test_every_view_and_every_sink_shows_the_same_goodput(tmp_path: Path) -> None:
    voyage = Voyage(new_run(tmp_path / "run", steps=20))
    voyage.begin(lead="init", seconds=3.0, start=0)
    for _ in range(12):
        voyage.step()
    voyage.spend("restart", 1.0)
    voyage.end("trouble")
    voyage.begin(lead="restart", seconds=2.0, start=8)
    for _ in range(4):
        voyage.step()
    voyage.end("stopped")
    voyage.over()
    voyage.spend("idle", 3600.0)  # which is nobody's loss
    voyage.begin(lead="init", seconds=2.0, start=12)
    for _ in range(8):
        voyage.step()
    voyage.end("done")
    voyage.over()
    voyage.check(ledger := ledger_of(voyage.run))
    moved = voyage.truth["compute"] + voyage.truth["communication"]
    assert ledger.goodput == pytest.approx(moved / (voyage.now - 1000.0 - 3600.0))
    assert 0.3 < ledger.goodput < 0.8
    check_goodput(voyage.run, ledger.goodput)


def test_a_look_reads_only_what_is_new_and_the_same_steps_are_yielded_and_entered(tmp_path: Path) -> None:
    voyage = Voyage(new_run(tmp_path / "run"))
    books, seen = Books(voyage.run), []

    def look() -> bool:
        anew = books.look()
        seen.append([line.step for line in books.steps()])
        voyage.check(books.balance())
        return anew

    voyage.begin(lead="init", seconds=3.0, start=0)
    for _ in range(3):
        voyage.step()
    assert not look()
    voyage.step()
    assert not look()
    voyage.spend("restart", 1.0)
    voyage.end("trouble")
    voyage.begin(lead="restart", seconds=1.0, start=2)
    voyage.step()
    assert look(), "lines were taken back"
    voyage.step()
    assert not look()
    assert seen == [[1, 2, 3], [4], [1, 2, 3], [4]]


def test_ranks_that_are_gone_and_not_yet_started_again_cost_time(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    voyage.step()
    voyage.end("trouble")
    voyage.spend("restart", 30.0)
    voyage.check(ledger_of(voyage.run, now=voyage.now))


def test_files_that_make_no_sense_are_no_reason_to_fail(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    voyage.step()
    for event in ({"time": "soon"}, {"data": []}, {"kind": "replay"}, {"kind": "started", "data": {"compile": 1}}):
        append_line(voyage.run.events(0), {"kind": "ready", "time": voyage.now, "step": 1} | event)
    append_line(voyage.run.attempts, {"world_size": 2, "time": None})
    line = step_metrics(2, loss=1.0).as_dict()
    for wrong in ({"phases": {"data": "x"}, "step_seconds": None}, {"waits": 3, "phases": {}, "step_seconds": 0}):
        append_line(voyage.run.metrics, line | wrong | {"time": voyage.now})
    voyage.run.metrics.write_bytes(
        voyage.run.metrics.read_bytes()
        + json.dumps(line | {"step_seconds": 1e308}).encode().replace(b"1e+308", b"1e999")
    )
    voyage.end("done")
    voyage.over()
    voyage.check(ledger_of(voyage.run))


def test_a_supervisor_that_was_killed_costs_a_restart(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    for _ in range(5):
        voyage.step()
    voyage.spend("restart", 50.0)
    voyage.begin(lead="restart", seconds=2.0, start=5)
    voyage.step()
    voyage.end("done")
    voyage.over()
    voyage.check(ledger_of(voyage.run))


def test_lines_that_no_rank_has_written_are_passed_over(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    voyage.step()
    append_line(voyage.run.events(0), {"kind": "ready"})
    append_line(voyage.run.metrics, {"step": 2})
    voyage.end("done")
    voyage.over()
    voyage.check(ledger_of(voyage.run))


def test_a_run_that_goes_back_by_itself_loses_what_it_takes_back(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    for _ in range(10):
        voyage.step()
    voyage.spend("restart", 1.0)
    voyage.end("trouble")
    voyage.begin(lead="restart", seconds=2.0, start=10)
    for _ in range(4):
        voyage.step()
    voyage.spend("restart", 0.5)
    voyage.event("rewind", step=14, to_step=6)  # to before where this attempt began
    lost = forget_steps_after(6, voyage.run.metrics)
    voyage.event("replay", step=6, steps=len(lost), seconds=sum(lost))
    voyage.forget(8)
    voyage.done = 6
    for _ in range(8):
        voyage.step()
    voyage.end("done")
    voyage.over()
    voyage.check(ledger_of(voyage.run))


def test_a_run_at_work_is_accounted_for_up_to_now_and_one_that_stands_still_is_told(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path))
    voyage.begin(lead="init", seconds=3.0, start=0)
    for _ in range(5):
        voyage.step()
    voyage.check(ledger_of(voyage.run))
    voyage.spend("compute", 1.5)
    voyage.check(ledger_of(voyage.run, now=voyage.now))
    voyage.truth["compute"] -= 1.5
    voyage.truth["restart"] += 1.5
    voyage.spend("restart", 60.0)
    voyage.check(ledger_of(voyage.run, now=voyage.now))


def spent(**waits: float) -> dict[str, float]:
    """Return what a step of `STEP` is split into where rank 0 waited so long."""
    step = replace(step_metrics(1, loss=1.0, seconds=STEP_SECONDS), phases=STEP, details={"waits": waits})
    line = read_step(json.dumps(step.as_dict(), separators=(",", ":")).encode() + b"\n")
    assert line is not None
    return dict(zip(IN_STEPS, split(line), strict=True))


def test_waiting_for_the_slowest_rank_is_told_from_communication() -> None:
    found = spent(data=0.05, comm=0.025, straggler=0.1)
    assert (found["straggler"], found["communication"]) == pytest.approx((0.1, 0.025))
    assert sum(found.values()) == pytest.approx(STEP_SECONDS)
    hidden = spent(comm=0.2, straggler=0.3)  # in a backward that waits for its buckets
    assert (hidden["straggler"], hidden["communication"]) == pytest.approx((0.3, 0.2))
    assert sum(hidden.values()) == pytest.approx(STEP_SECONDS)


def test_a_journal_tells_what_the_steps_had_cost_that_are_done_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with Journal(run, 0) as journal:
        for step in range(1, 6):
            journal.step(step_metrics(step, loss=1.0, seconds=0.5))
        journal.resume(3)
        journal.resume(3)
    (event,) = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert (event["kind"], event["step"], event["data"]) == ("replay", 3, {"steps": 2, "seconds": 1.0})


def test_a_run_that_has_not_begun_has_an_empty_ledger(tmp_path: Path) -> None:
    ledger = ledger_of(RunDirectory(tmp_path))
    assert (ledger.total, ledger.goodput, set(ledger.seconds.values())) == (0.0, 0.0, {0.0})


def test_ranks_that_nobody_supervises_are_accounted_for_by_their_events(tmp_path: Path) -> None:
    voyage = Voyage(RunDirectory(tmp_path), attempts=1)
    for start in (0, 3):
        voyage.event("start")
        voyage.spend("init", 2.0)
        voyage.event("ready", step=start)
        for _ in range(3):
            voyage.step()
        voyage.event("done" if start else "stop", step=start + 3)
        if not start:
            voyage.spend("idle", 100.0)
    voyage.check(ledger_of(voyage.run))
