"""Processes that die, stand still, run slow or are asked to end. F01 to F12 of the fault matrix.

Every run is a supervisor, a fork server and ranks for real; steps take 50 ms. What `make test` shows already is not shown
again: F09 (signals to loaders), F11 (exit and abort), F12 (a fault that always comes back).
"""

import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.chaos.fault_run import (
    DETECT_SECONDS,
    NAME_SECONDS,
    RECOVER_SECONDS,
    RESUME_SECONDS,
    assert_as_undisturbed,
    first_time_after,
    hurry,
    lose,
    order,
    resumes,
    sail,
    sail_on,
)
from tests.fault.harness import lines, wait_for
from trimaran.core import EXIT_AGAIN, EXIT_DONE

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("first_seed", [0, 10])
def test_twenty_killed_ranks_cost_a_step_each_and_leave_the_weights_as_they_were(
    tmp_path: Path, first_seed: int
) -> None:
    settings = ("train.steps=300", "train.global_batch=12", "checkpoint.every=20", "checkpoint.memory=1")
    with sail(tmp_path / "run", *settings, ranks=3) as sailing:
        sailing.wait_for_step(5)
        for known, seed in enumerate(range(first_seed, first_seed + 10)):
            chance = random.Random(seed)
            time.sleep(chance.uniform(0.0, 1.5))
            rank = chance.choice((1, 2))
            killed = sailing.strike(rank, signal.SIGKILL)
            incident = sailing.wait_for_trouble(known, 30)
            assert (incident.cause, incident.suspects, incident.action) == ("crash", (rank,), "restarted")
            assert incident.time - killed < DETECT_SECONDS
            assert incident.cost["lost_steps"] <= 1
            recovered = first_time_after(sailing, incident.step) - killed
            assert recovered < RECOVER_SECONDS
            print(f"seed {seed}: rank {rank} after step {incident.step}: noticed {incident.time - killed:.2f} s, "
                  f"new step {recovered:.2f} s, lost {incident.cost['lost_steps']:.0f}")  # fmt: skip
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert len(sailing.troubles) == 10
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


def test_several_deaths_at_once_and_in_a_row_are_told_apart(tmp_path: Path) -> None:
    """From disk alone: what is lost is what came after the last checkpoint. F02, F03."""
    settings = ("train.steps=150", "train.global_batch=12", "checkpoint.every=10", "checkpoint.memory=0")
    with sail(tmp_path / "run", *settings, ranks=3) as sailing:
        sailing.wait_for_step(15)
        sailing.strike(0, signal.SIGKILL)
        first = sailing.wait_for_trouble(0)
        assert (first.cause, first.suspects, first.action) == ("crash", (0,), "restarted")

        time.sleep(1)
        sailing.strike(1, signal.SIGKILL)
        sailing.strike(2, signal.SIGKILL)
        both = sailing.wait_for_trouble(1)
        assert (both.cause, both.suspects, both.victims) == ("crash", (1, 2), (0,))

        time.sleep(1)
        starts = len(sailing.events(2, "start"))
        sailing.strike(1, signal.SIGKILL)
        wait_for(lambda: len(sailing.events(2, "start")) > starts)  # some 300 ms
        sailing.strike(2, signal.SIGKILL)  # it is still looking for its state
        one, other = sailing.wait_for_trouble(2), sailing.wait_for_trouble(3)
        assert (one.suspects, other.suspects) == ((1,), (2,))
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert [each.action for each in sailing.troubles] == ["restarted"] * 4  # nobody has lost patience
    for incident in sailing.troubles:
        assert incident.cost["lost_steps"] <= 12  # the interval, and what was being written
        assert incident.cost["seconds_to_recover"] < 2 * RECOVER_SECONDS
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


def test_without_its_supervisor_or_its_nursery_a_run_ends_or_starts_cold(tmp_path: Path) -> None:
    """F04, F25: what is in memory goes with its owner, and the disk has the rest."""
    with sail(tmp_path / "run", "train.steps=150", "checkpoint.every=10", "checkpoint.memory=1") as sailing:
        sailing.wait_for_step(25)
        fork_server = next(each for each in sailing.processes() if "nursery" in " ".join(each.cmdline()))
        killed = time.time()
        fork_server.kill()
        cold = sailing.wait_for_trouble(0)
        assert (cold.cause, cold.action) == ("host", "restarted")
        assert cold.time - killed < DETECT_SECONDS
        assert cold.cost["seconds_to_recover"] < RECOVER_SECONDS
        assert resumes(sailing.run)[-1]["tier"] == "memory"  # the supervisor's, so it outlives the fork server
        assert cold.cost["lost_steps"] <= 1
        sailing.wait_for_step(sailing.step() + 25)
        lose(sailing)
    kept = sorted(sailing.run.checkpoints.glob("step-*"))
    time.sleep(1)
    assert sorted(sailing.run.checkpoints.glob("step-*")) == kept  # nobody is left who writes
    with sail_on(sailing.run) as again:
        hurry(again)
        assert again.wait() == EXIT_DONE
    assert resumes(sailing.run)[-1]["tier"] == "disk"
    assert resumes(sailing.run)[-1]["from_step"] == int(kept[-1].name.removeprefix("step-"))
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


def test_ranks_that_stand_still_are_named_with_their_stacks(tmp_path: Path) -> None:
    """F05, F06, F11: stopped, in a regular expression without end, locked out in native code; and a bad pointer."""
    with sail(tmp_path / "run", "train.steps=400", "checkpoint.memory=1") as sailing:
        sailing.wait_for_step(25)
        for known, (fault, rank) in enumerate((("stop", 1), ("regex", 0), ("deadlock", 1))):
            before = time.time()
            order(sailing, rank, fault)
            incident = sailing.wait_for_trouble(known, 30)
            assert (incident.cause, incident.suspects, incident.victims) == ("hang", (rank,), (1 - rank,))
            assert incident.action == "restarted"
            assert incident.time + incident.cost["seconds_to_detect"] - before < NAME_SECONDS + 10
            assert incident.cost["seconds_to_detect"] < NAME_SECONDS
            assert incident.cost["seconds_to_recover"] < RESUME_SECONDS
            assert incident.cost["lost_steps"] <= 1
            folder = sailing.run.incident(incident.id)
            assert (folder / f"rank-{rank}.stacks.txt").stat().st_size
            assert (folder / f"rank-{1 - rank}.json").exists()
            print(f"{fault}: named {incident.cost['seconds_to_detect']:.1f} s, "
                  f"recovered {incident.cost['seconds_to_recover']:.1f} s: {incident.what}")  # fmt: skip
            sailing.wait_for_step(sailing.step() + 25)
        order(sailing, 0, "segfault")
        crash = sailing.wait_for_trouble(3)
        assert (crash.cause, crash.suspects) == ("crash", (0,))
        assert "SIGSEGV" in crash.what
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE


def test_a_slow_rank_is_named_and_left_alone(tmp_path: Path) -> None:
    """F07: steps take 100 ms longer for 5 s because of one rank."""
    with sail(tmp_path / "run", "train.steps=300") as sailing:
        sailing.wait_for_step(40)
        before = sailing.step()
        order(sailing, 1, "slow")
        told = wait_for(lambda: [each for each in sailing.incidents if each.cause == "straggler"], 20)[0]
        sailing.wait_for_step(told.step)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    seconds = {each["step"]: each["step_seconds"] for each in lines(sailing.run.metrics)}
    usual = statistics.median(seconds[step] for step in range(before - 20, before))
    slowdown = statistics.median(seconds[step] for step in range(told.step - 7, told.step)) / usual
    print(f"flagged after {told.step - before} steps: {told.evidence['slowdown']:.2f} times, was {slowdown:.2f}")
    assert (told.suspects, told.action) == ((1,), "continued")
    assert told.step - before <= 25  # 20, and the few that pass while the order is read and the answer written
    assert told.evidence["slowdown"] == pytest.approx(slowdown, rel=0.2)
    assert sailing.attempts() == 1
    assert sailing.troubles == []


def test_a_run_that_is_asked_to_end_loses_nothing_whenever_that_is(tmp_path: Path) -> None:
    """F08: while ranks are built, while they evaluate, while a checkpoint is written; then it goes on to its end."""
    settings = ("train.steps=60", "train.evaluate.every=10", "train.evaluate.batches=8", "checkpoint.every=15")
    moments = {
        "start": lambda run: lines(run.events(0)),
        "evaluation": lambda run: [each for each in lines(run.events(0)) if each["kind"] == "evaluation"],
        "save": lambda run: [each for each in lines(run.metrics) if each["step"] >= 29],
    }
    sailing = sail(tmp_path / "run", *settings, disk_seconds="0.3")
    for number, has_come in enumerate(moments.values()):
        with sailing:
            wait_for(partial(has_come, sailing.run))
            sailing.process.terminate()
            assert sailing.wait(30) == EXIT_AGAIN
        last = sailing.incidents[-1]
        assert (len(sailing.incidents), last.cause, last.action) == (number + 1, "preempted", "saved")
        assert last.cost["lost_steps"] == 0
        steps = {each["step"] for rank in (0, 1) for each in sailing.events(rank, "stop")[-1:]}
        assert steps == {last.step}
        assert (sailing.run.checkpoints / f"step-{last.step:08d}" / "manifest.json").exists()
        sailing = sail_on(sailing.run, disk_seconds="0.3")
    with sailing:
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    starts = [each["step"] for each in sailing.events(0, "ready")]
    assert starts == [0, *(each.step for each in sailing.incidents)]
    assert_as_undisturbed(sailing.run, tmp_path / "calm")


def test_a_second_ctrl_c_ends_everything_at_once_and_what_was_kept_stays(tmp_path: Path) -> None:
    with sail(tmp_path / "run", "train.steps=1000", "checkpoint.every=10", disk_seconds="0.4") as sailing:
        wait_for(lambda: list(sailing.run.checkpoints.glob("step-*")))
        sailing.process.send_signal(signal.SIGINT)
        wait_for(lambda: sailing.incidents)
        sailing.process.send_signal(signal.SIGINT)
        assert sailing.wait(10) == 128 + signal.SIGINT
        assert sailing.processes() == []
    (incident,) = sailing.incidents
    assert (incident.cause, incident.action) == ("preempted", "stopped")
    newest = max(int(each.name.removeprefix("step-")) for each in sailing.run.checkpoints.glob("step-*"))
    with sail_on(sailing.run) as again:
        again.wait_for_events(0, "ready", 2)
    assert resumes(sailing.run)[-1] | {"seconds": 0} == {
        "seconds": 0, "tier": "disk", "from_step": newest, "refused": []
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["oom", "memory"])
def test_memory_that_runs_out_changes_the_plan_once_and_not_the_batch(tmp_path: Path, fault: str) -> None:
    """F10: raised by torch as on a device, and refused by the kernel (RLIMIT_AS)."""
    settings = ("train.steps=60", "plan.micro_batch=4", "plan.grad_accum=1", "checkpoint.memory=1")
    with sail(tmp_path / "run", *settings) as sailing:
        before = sailing.run.read_plan()
        sailing.wait_for_step(10)
        order(sailing, 1, fault)
        incident = sailing.wait_for_trouble(0, 30)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert (incident.cause, incident.suspects, incident.action) == ("oom", (1,), "replanned")
    assert incident.cost["lost_steps"] <= 1
    after = sailing.run.read_plan()
    assert (after.micro_batch, after.grad_accum) == (2, 2)
    assert after.global_batch == before.global_batch
    assert len(sailing.troubles) == 1


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of its own, in which memory can be made scarce."""
    mine = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    (folder := GROUPS / mine.lstrip("/") / f"trimaran-{os.getpid()}").mkdir()
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), 10)
    folder.rmdir()


@pytest.mark.skipif(
    os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists(),
    reason="needs root and control groups of the first version",
)
def test_a_rank_that_the_kernel_kills_for_memory_is_told_from_one_that_was_killed(tmp_path: Path, group: Path) -> None:
    """F10 once more, as in a container that is too small."""
    settings = ("train.steps=60", "plan.micro_batch=4", "plan.grad_accum=1", "checkpoint.memory=1")
    with sail(tmp_path / "run", *settings) as sailing:
        (group / "cgroup.procs").write_text(str(sailing.process.pid))
        for each in sailing.processes():
            (group / "cgroup.procs").write_text(str(each.pid))
        sailing.wait_for_step(10)
        for rank in (0, 1):
            (group / "cgroup.procs").write_text(str(sailing.pid(rank)))
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + (200 << 20)))
        order(sailing, 1, "hoard")
        incident = sailing.wait_for_trouble(0, 30)
        hurry(sailing)
        assert sailing.wait() == EXIT_DONE
    assert (incident.cause, incident.suspects, incident.action) == ("oom", (1,), "replanned")
