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
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    incarnation.step()
    incarnation.event("started", step=1, compile={"seconds": 0.5})
    incarnation.truth["compute"] -= 0.5
    incarnation.truth["compile"] += 0.5
    incarnation.step()
    incarnation.spend("evaluation", 2.0)
    incarnation.event("evaluation", step=2)
    for _ in range(20):
        incarnation.step()
    for what, kind, seconds in (("save", "checkpoint", 1.0), ("save", "saved", 0.5), ("evaluation", "sample", 0.25)):
        incarnation.spend(what, seconds)
        incarnation.event(kind, step=22)
    incarnation.event("done", step=22)
    incarnation.spend("init", 0.125)
    incarnation.end("done")
    incarnation.over()
    ledger = ledger_of(incarnation.run)
    incarnation.check(ledger)
    moved = ledger.seconds["compute"] + ledger.seconds["communication"]
    assert ledger.goodput == pytest.approx(moved / ledger.total)


starts = st.tuples(st.floats(0.1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 8), st.floats(0.5, 60))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(starts, min_size=1, max_size=5), st.booleans())
def test_what_is_lost_in_trouble_is_told_from_what_counts(troubles: list[tuple], is_resumed: bool) -> None:
    with TemporaryDirectory() as folder:
        incarnation = Voyage(RunDirectory(Path(folder)))
        lead = "init"
        books = Books(incarnation.run)
        for seconds, steps, unwritten, lost, noticing in troubles:
            incarnation.begin(lead=lead, seconds=seconds, start=max(0, incarnation.done - lost))
            for number in range(steps + 3):
                incarnation.step(written=number < steps + 3 - unwritten)
            incarnation.spend("restart", noticing)
            incarnation.forget(unwritten)  # whether a start from memory finds them or not, they leave no line
            incarnation.end("trouble")
            incarnation.done -= unwritten
            books.ledger()  # who looks often sees the same
            incarnation.spend("restart", 0.25)
            lead = "restart"
        incarnation.begin(lead="restart", seconds=1.0, start=incarnation.done)
        incarnation.step()
        incarnation.end("stopped")
        incarnation.over()
        if is_resumed:
            incarnation.spend("idle", 3600.0)
            incarnation.begin(lead="init", seconds=4.0, start=incarnation.done)
            incarnation.step()
            incarnation.end("done")
            incarnation.over()
        incarnation.check(ledger_of(incarnation.run))
        incarnation.check(books.ledger())


def test_every_view_and_every_sink_shows_the_same_goodput(tmp_path: Path) -> None:
    incarnation = Voyage(new_run(tmp_path / "run", steps=20))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    for _ in range(12):
        incarnation.step()
    incarnation.spend("restart", 1.0)
    incarnation.end("trouble")
    incarnation.begin(lead="restart", seconds=2.0, start=8)
    for _ in range(4):
        incarnation.step()
    incarnation.end("stopped")
    incarnation.over()
    incarnation.spend("idle", 3600.0)  # which is nobody's loss
    incarnation.begin(lead="init", seconds=2.0, start=12)
    for _ in range(8):
        incarnation.step()
    incarnation.end("done")
    incarnation.over()
    incarnation.check(ledger := ledger_of(incarnation.run))
    moved = incarnation.truth["compute"] + incarnation.truth["communication"]
    assert ledger.goodput == pytest.approx(moved / (incarnation.now - 1000.0 - 3600.0))
    assert 0.3 < ledger.goodput < 0.8
    check_goodput(incarnation.run, ledger.goodput)


def test_a_look_reads_only_what_is_new_and_the_same_steps_are_yielded_and_entered(tmp_path: Path) -> None:
    incarnation = Voyage(new_run(tmp_path / "run"))
    books, seen = Books(incarnation.run), []

    def look() -> bool:
        anew = books.look()
        seen.append([line.step for line in books.steps()])
        incarnation.check(books.balance())
        return anew

    incarnation.begin(lead="init", seconds=3.0, start=0)
    for _ in range(3):
        incarnation.step()
    assert not look()
    incarnation.step()
    assert not look()
    incarnation.spend("restart", 1.0)
    incarnation.end("trouble")
    incarnation.begin(lead="restart", seconds=1.0, start=2)
    incarnation.step()
    assert look(), "lines were taken back"
    incarnation.step()
    assert not look()
    assert seen == [[1, 2, 3], [4], [1, 2, 3], [4]]


def test_ranks_that_are_gone_and_not_yet_started_again_cost_time(tmp_path: Path) -> None:
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    incarnation.step()
    incarnation.end("trouble")
    incarnation.spend("restart", 30.0)
    incarnation.check(ledger_of(incarnation.run, now=incarnation.now))


def test_files_that_make_no_sense_are_no_reason_to_fail(tmp_path: Path) -> None:
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    incarnation.step()
    for event in ({"time": "soon"}, {"data": []}, {"kind": "replay"}, {"kind": "started", "data": {"compile": 1}}):
        append_line(incarnation.run.events(0), {"kind": "ready", "time": incarnation.now, "step": 1} | event)
    append_line(incarnation.run.attempts, {"world_size": 2, "time": None})
    line = step_metrics(2, loss=1.0).as_dict()
    for wrong in ({"phases": {"data": "x"}, "step_seconds": None}, {"waits": 3, "phases": {}, "step_seconds": 0}):
        append_line(incarnation.run.metrics, line | wrong | {"time": incarnation.now})
    incarnation.run.metrics.write_bytes(
        incarnation.run.metrics.read_bytes()
        + json.dumps(line | {"step_seconds": 1e308}).encode().replace(b"1e+308", b"1e999")
    )
    incarnation.end("done")
    incarnation.over()
    incarnation.check(ledger_of(incarnation.run))


def test_a_supervisor_that_was_killed_costs_a_restart(tmp_path: Path) -> None:
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    for _ in range(5):
        incarnation.step()
    incarnation.spend("restart", 50.0)
    incarnation.begin(lead="restart", seconds=2.0, start=5)
    incarnation.step()
    incarnation.end("done")
    incarnation.over()
    incarnation.check(ledger_of(incarnation.run))


def test_lines_that_no_rank_has_written_are_passed_over(tmp_path: Path) -> None:
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    incarnation.step()
    append_line(incarnation.run.events(0), {"kind": "ready"})
    append_line(incarnation.run.metrics, {"step": 2})
    incarnation.end("done")
    incarnation.over()
    incarnation.check(ledger_of(incarnation.run))


def test_a_run_that_goes_back_by_itself_loses_what_it_takes_back(tmp_path: Path) -> None:
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    for _ in range(10):
        incarnation.step()
    incarnation.spend("restart", 1.0)
    incarnation.end("trouble")
    incarnation.begin(lead="restart", seconds=2.0, start=10)
    for _ in range(4):
        incarnation.step()
    incarnation.spend("restart", 0.5)
    incarnation.event("rewind", step=14, to_step=6)  # to before where this attempt began
    lost = forget_steps_after(6, incarnation.run.metrics)
    incarnation.event("replay", step=6, steps=len(lost), seconds=sum(lost))
    incarnation.forget(8)
    incarnation.done = 6
    for _ in range(8):
        incarnation.step()
    incarnation.end("done")
    incarnation.over()
    incarnation.check(ledger_of(incarnation.run))


def test_a_run_at_work_is_accounted_for_up_to_now_and_one_that_stands_still_is_told(tmp_path: Path) -> None:
    incarnation = Voyage(RunDirectory(tmp_path))
    incarnation.begin(lead="init", seconds=3.0, start=0)
    for _ in range(5):
        incarnation.step()
    incarnation.check(ledger_of(incarnation.run))
    incarnation.spend("compute", 1.5)
    incarnation.check(ledger_of(incarnation.run, now=incarnation.now))
    incarnation.truth["compute"] -= 1.5
    incarnation.truth["restart"] += 1.5
    incarnation.spend("restart", 60.0)
    incarnation.check(ledger_of(incarnation.run, now=incarnation.now))


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
    incarnation = Voyage(RunDirectory(tmp_path), attempts=1)
    for start in (0, 3):
        incarnation.event("start")
        incarnation.spend("init", 2.0)
        incarnation.event("ready", step=start)
        for _ in range(3):
            incarnation.step()
        incarnation.event("done" if start else "stop", step=start + 3)
        if not start:
            incarnation.spend("idle", 100.0)
    incarnation.check(ledger_of(incarnation.run))
