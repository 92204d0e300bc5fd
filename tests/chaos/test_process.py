"""Processes that die, hang, run slow or are asked to stop; the faults `rank-killed` to `repeated-fault` of the guide.

Every run has a real supervisor, fork server and ranks; steps take 50 ms. Faults that `make test` covers are left out:
`loader-sigterm`, `rank-exit` (exit and abort), `repeated-fault`.
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
    inject_fault,
    kill_supervisor,
    remove_pause,
    resume_run,
    resumes,
    start_run,
)
from tests.fault.harness import lines, wait_for
from trimaran.core import EXIT_AGAIN, EXIT_DONE

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("first_seed", [0, 10])
def test_twenty_killed_ranks_cost_one_step_each_and_do_not_change_the_weights(tmp_path: Path, first_seed: int) -> None:
    settings = ("train.steps=300", "train.global_batch=12", "checkpoint.every=20", "checkpoint.memory=1")
    with start_run(tmp_path / "run", *settings, ranks=3) as supervised:
        supervised.wait_for_step(5)
        for known, seed in enumerate(range(first_seed, first_seed + 10)):
            generator = random.Random(seed)
            time.sleep(generator.uniform(0.0, 1.5))
            rank = generator.choice((1, 2))
            killed = supervised.send_signal(rank, signal.SIGKILL)
            incident = supervised.wait_for_fault(known, 30)
            assert (incident.cause, incident.suspects, incident.action) == ("crash", (rank,), "restarted")
            assert incident.time - killed < DETECT_SECONDS
            assert incident.cost["lost_steps"] <= 1
            recovered = first_time_after(supervised, incident.step) - killed
            assert recovered < RECOVER_SECONDS
            print(f"seed {seed}: rank {rank} after step {incident.step}: detected {incident.time - killed:.2f} s, "
                  f"new step {recovered:.2f} s, lost {incident.cost['lost_steps']:.0f}")  # fmt: skip
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert len(supervised.faults) == 10
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_several_deaths_at_once_and_in_a_row_are_separate_incidents(tmp_path: Path) -> None:
    """Faults `rank-0-killed` and `two-ranks-killed`, from disk only: steps after the last checkpoint are lost."""
    settings = ("train.steps=150", "train.global_batch=12", "checkpoint.every=10", "checkpoint.memory=0")
    with start_run(tmp_path / "run", *settings, ranks=3) as supervised:
        supervised.wait_for_step(15)
        supervised.send_signal(0, signal.SIGKILL)
        first = supervised.wait_for_fault(0)
        assert (first.cause, first.suspects, first.action) == ("crash", (0,), "restarted")

        time.sleep(1)
        supervised.send_signal(1, signal.SIGKILL)
        supervised.send_signal(2, signal.SIGKILL)
        both = supervised.wait_for_fault(1)
        assert (both.cause, both.suspects, both.victims) == ("crash", (1, 2), (0,))

        time.sleep(1)
        starts = len(supervised.events(2, "start"))
        supervised.send_signal(1, signal.SIGKILL)
        wait_for(lambda: len(supervised.events(2, "start")) > starts)  # some 300 ms
        supervised.send_signal(2, signal.SIGKILL)  # while it restores its state
        one, other = supervised.wait_for_fault(2), supervised.wait_for_fault(3)
        assert (one.suspects, other.suspects) == ((1,), (2,))
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert [each.action for each in supervised.faults] == ["restarted"] * 4  # the policy did not give up
    for incident in supervised.faults:
        assert incident.cost["lost_steps"] <= 12  # the interval, and a checkpoint in progress
        assert incident.cost["seconds_to_recover"] < 2 * RECOVER_SECONDS
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_without_its_fork_server_a_run_restarts_and_without_its_supervisor_it_ends(tmp_path: Path) -> None:
    """Faults `supervisor-killed` and `memory-lost`: copies in memory end with the supervisor; the disk remains."""
    with start_run(tmp_path / "run", "train.steps=150", "checkpoint.every=10", "checkpoint.memory=1") as supervised:
        supervised.wait_for_step(25)
        fork_server = supervised.fork_server()
        killed = time.time()
        fork_server.kill()
        cold = supervised.wait_for_fault(0)
        assert (cold.cause, cold.action) == ("host", "restarted")
        assert cold.time - killed < DETECT_SECONDS
        assert cold.cost["seconds_to_recover"] < RECOVER_SECONDS
        assert (
            resumes(supervised.run)[-1]["tier"] == "memory"
        )  # owned by the supervisor, so it outlives the fork server
        assert cold.cost["lost_steps"] <= 1
        supervised.wait_for_step(supervised.step() + 25)
        kill_supervisor(supervised)
    kept = sorted(supervised.run.checkpoints.glob("step-*"))
    time.sleep(1)
    assert sorted(supervised.run.checkpoints.glob("step-*")) == kept  # no process is left that writes
    with resume_run(supervised.run) as again:
        remove_pause(again)
        assert again.wait() == EXIT_DONE
    assert resumes(supervised.run)[-1]["tier"] == "disk"
    assert resumes(supervised.run)[-1]["from_step"] == int(kept[-1].name.removeprefix("step-"))
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_hung_ranks_are_named_with_their_stacks(tmp_path: Path) -> None:
    """Faults `rank-stopped`, `rank-hung`, `rank-exit`: SIGSTOP, an endless regex, a native deadlock; and a segfault."""
    with start_run(tmp_path / "run", "train.steps=400", "checkpoint.memory=1") as supervised:
        supervised.wait_for_step(25)
        for known, (fault, rank) in enumerate((("stop", 1), ("regex", 0), ("deadlock", 1))):
            before = time.time()
            inject_fault(supervised, rank, fault)
            incident = supervised.wait_for_fault(known, 30)
            assert (incident.cause, incident.suspects, incident.victims) == ("hang", (rank,), (1 - rank,))
            assert incident.action == "restarted"
            assert incident.time + incident.cost["seconds_to_detect"] - before < NAME_SECONDS + 10
            assert incident.cost["seconds_to_detect"] < NAME_SECONDS
            assert incident.cost["seconds_to_recover"] < RESUME_SECONDS
            assert incident.cost["lost_steps"] <= 1
            folder = supervised.run.incident(incident.id)
            assert (folder / f"rank-{rank}.stacks.txt").stat().st_size
            assert (folder / f"rank-{1 - rank}.json").exists()
            print(f"{fault}: named {incident.cost['seconds_to_detect']:.1f} s, "
                  f"recovered {incident.cost['seconds_to_recover']:.1f} s: {incident.what}")  # fmt: skip
            supervised.wait_for_step(supervised.step() + 25)
        inject_fault(supervised, 0, "segfault")
        crash = supervised.wait_for_fault(3)
        assert (crash.cause, crash.suspects) == ("crash", (0,))
        assert "SIGSEGV" in crash.what
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE


def test_a_slow_rank_is_reported_and_not_restarted(tmp_path: Path) -> None:
    """Fault `rank-slow`: steps take 100 ms longer for 5 s because of one rank."""
    with start_run(tmp_path / "run", "train.steps=300") as supervised:
        supervised.wait_for_step(40)
        before = supervised.step()
        inject_fault(supervised, 1, "slow")
        incident = wait_for(lambda: [each for each in supervised.incidents if each.cause == "straggler"], 20)[0]
        supervised.wait_for_step(incident.step)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    seconds = {each["step"]: each["step_seconds"] for each in lines(supervised.run.metrics)}
    usual = statistics.median(seconds[step] for step in range(before - 20, before))
    slowdown = statistics.median(seconds[step] for step in range(incident.step - 7, incident.step)) / usual
    print(
        f"flagged after {incident.step - before} steps: {incident.evidence['slowdown']:.2f} times, was {slowdown:.2f}"
    )
    assert (incident.suspects, incident.action) == ((1,), "continued")
    assert incident.step - before <= 25  # 20, and the few until the fault begins and the incident is written
    assert incident.evidence["slowdown"] == pytest.approx(slowdown, rel=0.2)
    assert supervised.attempts() == 1
    assert supervised.faults == []


def test_a_run_that_is_asked_to_stop_at_any_moment_loses_no_step(tmp_path: Path) -> None:
    """Fault `sigterm`: during the start, an evaluation and a save; then the run is resumed to its end."""
    settings = ("train.steps=60", "train.evaluate.every=10", "train.evaluate.batches=8", "checkpoint.every=15")
    moments = {
        "start": lambda run: lines(run.events(0)),
        "evaluation": lambda run: [each for each in lines(run.events(0)) if each["kind"] == "evaluation"],
        "save": lambda run: [each for each in lines(run.metrics) if each["step"] >= 29],
    }
    supervised = start_run(tmp_path / "run", *settings, disk_seconds="0.3")
    for number, is_reached in enumerate(moments.values()):
        with supervised:
            wait_for(partial(is_reached, supervised.run))
            supervised.process.terminate()
            assert supervised.wait(30) == EXIT_AGAIN
        last = supervised.incidents[-1]
        assert (len(supervised.incidents), last.cause, last.action) == (number + 1, "preempted", "saved")
        assert last.cost["lost_steps"] == 0
        steps = {each["step"] for rank in (0, 1) for each in supervised.events(rank, "stop")[-1:]}
        assert steps == {last.step}
        assert (supervised.run.checkpoints / f"step-{last.step:08d}" / "manifest.json").exists()
        supervised = resume_run(supervised.run, disk_seconds="0.3")
    with supervised:
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    starts = [each["step"] for each in supervised.events(0, "ready")]
    assert starts == [0, *(each.step for each in supervised.incidents)]
    assert_as_undisturbed(supervised.run, tmp_path / "calm")


def test_a_second_ctrl_c_ends_the_run_at_once_and_keeps_its_checkpoints(tmp_path: Path) -> None:
    with start_run(tmp_path / "run", "train.steps=1000", "checkpoint.every=10", disk_seconds="0.4") as supervised:
        wait_for(lambda: list(supervised.run.checkpoints.glob("step-*")))
        supervised.process.send_signal(signal.SIGINT)
        wait_for(lambda: supervised.incidents)
        supervised.process.send_signal(signal.SIGINT)
        assert supervised.wait(10) == 128 + signal.SIGINT
        assert supervised.processes() == []
    (incident,) = supervised.incidents
    assert (incident.cause, incident.action) == ("preempted", "stopped")
    newest = max(int(each.name.removeprefix("step-")) for each in supervised.run.checkpoints.glob("step-*"))
    with resume_run(supervised.run) as again:
        again.wait_for_events(0, "ready", 2)
    assert resumes(supervised.run)[-1] | {"seconds": 0} == {
        "seconds": 0, "tier": "disk", "from_step": newest, "refused": []
    }  # fmt: skip


@pytest.mark.parametrize("fault", ["oom", "memory"])
def test_an_oom_changes_the_plan_once_and_not_the_global_batch(tmp_path: Path, fault: str) -> None:
    """Fault `out-of-memory`: raised by torch as on a device, and by the kernel (RLIMIT_AS)."""
    settings = ("train.steps=60", "plan.micro_batch=4", "plan.grad_accum=1", "checkpoint.memory=1")
    with start_run(tmp_path / "run", *settings) as supervised:
        before = supervised.run.read_plan()
        supervised.wait_for_step(10)
        inject_fault(supervised, 1, fault)
        incident = supervised.wait_for_fault(0, 30)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert (incident.cause, incident.suspects, incident.action) == ("oom", (1,), "replanned")
    assert incident.cost["lost_steps"] <= 1
    after = supervised.run.read_plan()
    assert after.model_copy(update={"prediction": None}) != before.model_copy(update={"prediction": None})
    assert after.global_batch == before.global_batch
    assert len(supervised.faults) == 1


GROUPS = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group with a memory limit of its own."""
    mine = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    (folder := GROUPS / mine.lstrip("/") / f"trimaran-{os.getpid()}").mkdir()
    yield folder
    wait_for(lambda: not (folder / "cgroup.procs").read_text(), 10)
    folder.rmdir()


@pytest.mark.skipif(
    os.geteuid() != 0 or not (GROUPS / "memory.limit_in_bytes").exists(),
    reason="needs root and control groups v1",
)
def test_a_rank_that_the_oom_killer_kills_is_an_oom(tmp_path: Path, group: Path) -> None:
    """Fault `out-of-memory` in a container that is too small."""
    settings = ("train.steps=60", "plan.micro_batch=4", "plan.grad_accum=1", "checkpoint.memory=1")
    with start_run(tmp_path / "run", *settings) as supervised:
        (group / "cgroup.procs").write_text(str(supervised.process.pid))
        for each in supervised.processes():
            (group / "cgroup.procs").write_text(str(each.pid))
        supervised.wait_for_step(10)
        for rank in (0, 1):
            (group / "cgroup.procs").write_text(str(supervised.pid(rank)))
        used = int((group / "memory.usage_in_bytes").read_text())
        (group / "memory.limit_in_bytes").write_text(str(used + (200 << 20)))
        inject_fault(supervised, 1, "exhaust")
        incident = supervised.wait_for_fault(0, 30)
        remove_pause(supervised)
        assert supervised.wait() == EXIT_DONE
    assert (incident.cause, incident.suspects, incident.action) == ("oom", (1,), "replanned")
