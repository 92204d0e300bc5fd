"""The ledger accounts for every second of a run, with restarts, replays and damaged files."""

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
from trimaran.runs import (
    CATEGORIES,
    STEP_CATEGORIES,
    Journal,
    Ledger,
    LedgerReader,
    RunDirectory,
    StepLine,
    append_line,
    forget_steps_after,
    read_ledger,
    read_step,
    split_step,
)

STEP = {"data": 0.05, "forward": 0.25, "backward": 0.5, "comm": 0.125, "optimizer": 0.05, "checkpoint": 0.025}
STEP_SECONDS = sum(STEP.values())


@dataclass
class SimulatedRun:
    """Writes the files of a run with a simulated clock, and knows the true seconds by category."""

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
        """Start an attempt that resumes from step `start`; later steps are replayed."""
        attempt = {"world_size": 2, "host": "here", "pid": 1}
        append_line(self.run.attempts, {"attempt": self.attempts, "time": self.now} | attempt)
        self.attempts += 1
        self.spend(lead, seconds)
        if lost := forget_steps_after(start, self.run.metrics) if self.run.metrics.exists() else []:
            self.event("replay", step=start, steps=len(lost), seconds=sum(lost))
        self.forget(self.done - start)
        self.done = start
        self.event("ready", step=start)

    def forget(self, steps: int) -> None:
        """Count the last `steps` as replayed."""
        for name, phases in PHASES_BY_CATEGORY.items():
            self.truth[name] -= steps * sum(STEP[phase] for phase in phases)
        self.truth["replay"] += steps * STEP_SECONDS

    def step(self, *, written: bool = True) -> None:
        self.done += 1
        for name, phases in PHASES_BY_CATEGORY.items():
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


PHASES_BY_CATEGORY = {
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("comm",),
    "data": ("data",),
    "save": ("checkpoint",),
}


def test_a_run_without_faults_adds_up(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    simulated.step()
    simulated.event("started", step=1, compile={"seconds": 0.5})
    simulated.truth["compute"] -= 0.5
    simulated.truth["compile"] += 0.5
    simulated.step()
    simulated.spend("evaluation", 2.0)
    simulated.event("evaluation", step=2)
    for _ in range(20):
        simulated.step()
    for what, kind, seconds in (("save", "checkpoint", 1.0), ("save", "saved", 0.5), ("evaluation", "sample", 0.25)):
        simulated.spend(what, seconds)
        simulated.event(kind, step=22)
    simulated.event("done", step=22)
    simulated.spend("init", 0.125)
    simulated.end("done")
    simulated.over()
    ledger = read_ledger(simulated.run)
    simulated.check(ledger)
    productive = ledger.seconds["compute"] + ledger.seconds["communication"]
    assert ledger.goodput == pytest.approx(productive / ledger.total)


starts = st.tuples(st.floats(0.1, 30), st.integers(1, 12), st.integers(0, 2), st.integers(0, 8), st.floats(0.5, 60))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.lists(starts, min_size=1, max_size=5), st.booleans())
def test_lost_time_is_separated_from_productive_time(faults: list[tuple], is_resumed: bool) -> None:
    with TemporaryDirectory() as folder:
        simulated = SimulatedRun(RunDirectory(Path(folder)))
        lead = "init"
        reader = LedgerReader(simulated.run)
        for seconds, steps, unwritten, lost, noticing in faults:
            simulated.begin(lead=lead, seconds=seconds, start=max(0, simulated.done - lost))
            for number in range(steps + 3):
                simulated.step(written=number < steps + 3 - unwritten)
            simulated.spend("restart", noticing)
            simulated.forget(unwritten)  # they were not written, whether a restart from memory has them or not
            simulated.end("trouble")
            simulated.done -= unwritten
            reader.read()  # polling in between does not change the result
            simulated.spend("restart", 0.25)
            lead = "restart"
        simulated.begin(lead="restart", seconds=1.0, start=simulated.done)
        simulated.step()
        simulated.end("stopped")
        simulated.over()
        if is_resumed:
            simulated.spend("idle", 3600.0)
            simulated.begin(lead="init", seconds=4.0, start=simulated.done)
            simulated.step()
            simulated.end("done")
            simulated.over()
        simulated.check(read_ledger(simulated.run))
        simulated.check(reader.read())


def test_every_view_and_every_sink_shows_the_same_goodput(tmp_path: Path) -> None:
    simulated = SimulatedRun(new_run(tmp_path / "run", steps=20))
    simulated.begin(lead="init", seconds=3.0, start=0)
    for _ in range(12):
        simulated.step()
    simulated.spend("restart", 1.0)
    simulated.end("trouble")
    simulated.begin(lead="restart", seconds=2.0, start=8)
    for _ in range(4):
        simulated.step()
    simulated.end("stopped")
    simulated.over()
    simulated.spend("idle", 3600.0)  # idle time does not lower goodput
    simulated.begin(lead="init", seconds=2.0, start=12)
    for _ in range(8):
        simulated.step()
    simulated.end("done")
    simulated.over()
    simulated.check(ledger := read_ledger(simulated.run))
    moved = simulated.truth["compute"] + simulated.truth["communication"]
    assert ledger.goodput == pytest.approx(moved / (simulated.now - 1000.0 - 3600.0))
    assert 0.3 < ledger.goodput < 0.8
    check_goodput(simulated.run, ledger.goodput)


def test_a_poll_reads_only_new_lines_and_yields_each_step_once(tmp_path: Path) -> None:
    simulated = SimulatedRun(new_run(tmp_path / "run"))
    reader, seen = LedgerReader(simulated.run), []

    def poll() -> bool:
        anew = reader.poll()
        seen.append([line.step for line in reader.new_steps() if isinstance(line, StepLine)])
        simulated.check(reader.compute())
        return anew

    simulated.begin(lead="init", seconds=3.0, start=0)
    for _ in range(3):
        simulated.step()
    assert not poll()
    simulated.step()
    assert not poll()
    simulated.spend("restart", 1.0)
    simulated.end("trouble")
    simulated.begin(lead="restart", seconds=1.0, start=2)
    simulated.step()
    assert poll(), "lines were taken back"
    simulated.step()
    assert not poll()
    assert seen == [[1, 2, 3], [4], [1, 2, 3], [4]]


def test_the_time_until_ranks_are_restarted_is_counted(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    simulated.step()
    simulated.end("trouble")
    simulated.spend("restart", 30.0)
    simulated.check(read_ledger(simulated.run, now=simulated.now))


def test_damaged_files_do_not_fail(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    simulated.step()
    for event in ({"time": "soon"}, {"data": []}, {"kind": "replay"}, {"kind": "started", "data": {"compile": 1}}):
        append_line(simulated.run.events(0), {"kind": "ready", "time": simulated.now, "step": 1} | event)
    append_line(simulated.run.attempts, {"world_size": 2, "time": None})
    line = step_metrics(2, loss=1.0).as_dict()
    for wrong in ({"phases": {"data": "x"}, "step_seconds": None}, {"waits": 3, "phases": {}, "step_seconds": 0}):
        append_line(simulated.run.metrics, line | wrong | {"time": simulated.now})
    simulated.run.metrics.write_bytes(
        simulated.run.metrics.read_bytes()
        + json.dumps(line | {"step_seconds": 1e308}).encode().replace(b"1e+308", b"1e999")
    )
    simulated.end("done")
    simulated.over()
    simulated.check(read_ledger(simulated.run))


def test_a_killed_supervisor_costs_a_restart(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    for _ in range(5):
        simulated.step()
    simulated.spend("restart", 50.0)
    simulated.begin(lead="restart", seconds=2.0, start=5)
    simulated.step()
    simulated.end("done")
    simulated.over()
    simulated.check(read_ledger(simulated.run))


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    simulated.step()
    append_line(simulated.run.events(0), {"kind": "ready"})
    append_line(simulated.run.metrics, {"step": 2})
    simulated.end("done")
    simulated.over()
    simulated.check(read_ledger(simulated.run))


def test_a_rewind_costs_the_replayed_steps(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    for _ in range(10):
        simulated.step()
    simulated.spend("restart", 1.0)
    simulated.end("trouble")
    simulated.begin(lead="restart", seconds=2.0, start=10)
    for _ in range(4):
        simulated.step()
    simulated.spend("restart", 0.5)
    simulated.event("rewind", step=14, to_step=6)  # to before the start of this attempt
    lost = forget_steps_after(6, simulated.run.metrics)
    simulated.event("replay", step=6, steps=len(lost), seconds=sum(lost))
    simulated.forget(8)
    simulated.done = 6
    for _ in range(8):
        simulated.step()
    simulated.end("done")
    simulated.over()
    simulated.check(read_ledger(simulated.run))


def test_a_live_run_is_counted_up_to_now_and_a_hang_is_lost_time(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path))
    simulated.begin(lead="init", seconds=3.0, start=0)
    for _ in range(5):
        simulated.step()
    simulated.check(read_ledger(simulated.run))
    simulated.spend("compute", 1.5)
    simulated.check(read_ledger(simulated.run, now=simulated.now))
    simulated.truth["compute"] -= 1.5
    simulated.truth["restart"] += 1.5
    simulated.spend("restart", 60.0)
    simulated.check(read_ledger(simulated.run, now=simulated.now))


def spent(**waits: float) -> dict[str, float]:
    """Return the seconds of a step of `STEP` by category, if rank 0 waited so long."""
    step = replace(step_metrics(1, loss=1.0, seconds=STEP_SECONDS), phases=STEP, details={"waits": waits})
    line = read_step(json.dumps(step.as_dict(), separators=(",", ":")).encode() + b"\n")
    assert line is not None
    return dict(zip(STEP_CATEGORIES, split_step(line), strict=True))


def test_the_wait_for_the_slowest_rank_is_separated_from_communication() -> None:
    found = spent(data=0.05, comm=0.025, straggler=0.1)
    assert (found["straggler"], found["communication"]) == pytest.approx((0.1, 0.025))
    assert sum(found.values()) == pytest.approx(STEP_SECONDS)
    hidden = spent(comm=0.2, straggler=0.3)  # backward waits for its buckets
    assert (hidden["straggler"], hidden["communication"]) == pytest.approx((0.3, 0.2))
    assert sum(hidden.values()) == pytest.approx(STEP_SECONDS)


def test_the_journal_records_the_cost_of_replayed_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    with Journal(run, 0) as journal:
        for step in range(1, 6):
            journal.step(step_metrics(step, loss=1.0, seconds=0.5))
        journal.resume(3)
        journal.resume(3)
    (event,) = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    assert (event["kind"], event["step"], event["data"]) == ("replay", 3, {"steps": 2, "seconds": 1.0})


def test_a_run_that_has_not_started_has_an_empty_ledger(tmp_path: Path) -> None:
    ledger = read_ledger(RunDirectory(tmp_path))
    assert (ledger.total, ledger.goodput, set(ledger.seconds.values())) == (0.0, 0.0, {0.0})


def test_ranks_without_a_supervisor_are_counted_by_their_events(tmp_path: Path) -> None:
    simulated = SimulatedRun(RunDirectory(tmp_path), attempts=1)
    for start in (0, 3):
        simulated.event("start")
        simulated.spend("init", 2.0)
        simulated.event("ready", step=start)
        for _ in range(3):
            simulated.step()
        simulated.event("done" if start else "stop", step=start + 3)
        if not start:
            simulated.spend("idle", 100.0)
    simulated.check(read_ledger(simulated.run))


def test_no_category_is_negative_if_the_clock_goes_back_by_an_hour_after_the_last_step(tmp_path: Path) -> None:
    simulated = SimulatedRun(new_run(tmp_path / "run"))
    simulated.begin(lead="init", seconds=1.0, start=0)
    simulated.step()
    simulated.now += 7200.0
    simulated.event("checkpoint", step=1)
    simulated.now -= 3600.0
    simulated.event("evaluation", step=1)
    simulated.now += 7200.0
    simulated.end("done")
    simulated.over()
    ledger = read_ledger(simulated.run)
    assert min(ledger.seconds.values()) >= 0
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total)
