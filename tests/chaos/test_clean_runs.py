"""Healthy runs under load: none is restarted, none fails, and no incident is reported.

About 50 runs on 2 cores. The deadlines are lowered where a run would otherwise have to last for minutes: an activity
that reports no progress within one unit would then be called a hang.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.chaos.fault_run import start_run
from tests.fault.harness import Supervised, wait_for
from trimaran.core import EXIT_DONE

pytestmark = pytest.mark.chaos

SHORT = ("train.steps=12", "train.evaluate.batches=2", "train.evaluate.every=5", "train.sample={tokens: 20}")
EIGHT_RANKS = ("cluster=8xcpu", "plan={mesh: {tp: 2, pp: 2, dp_replicate: 2}, grad_accum: 2}")
BUSY_LOOPS = 6
CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
QUOTA_MICROSECONDS, PERIOD_MICROSECONDS = 20_000, 100_000  # 10 % of two cores


def assert_clean(supervised: Supervised, seconds: float = 240.0) -> None:
    """Fail unless the run ends with 0, in one attempt, without an incident."""
    code = supervised.wait(seconds)
    log = supervised.run.agent_log.read_text()
    assert supervised.incidents == [], log
    assert code == EXIT_DONE, log
    assert supervised.attempts() == 1
    assert len(supervised.events(0, "done")) == 1


def send_to_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for each in processes:
        each.send_signal(number)


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Run `count` endless loops with a higher priority than the ranks."""
    with ExitStack() as stack:
        for _ in range(count):
            loop = subprocess.Popen([sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.nice(-10))
            stack.callback(loop.wait)
            stack.callback(loop.kill)
        yield


@contextmanager
def cpu_quota() -> Iterator[Path]:
    """Make a control group that may use a fifth of a core."""
    mine = next(line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":cpu:" in line)
    (folder := CPU_GROUPS / mine.lstrip("/") / f"trimaran-{os.getpid()}").mkdir()
    try:
        (folder / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
        (folder / "cpu.cfs_quota_us").write_text(str(QUOTA_MICROSECONDS))
        yield folder
    finally:
        wait_for(lambda: not (folder / "cgroup.procs").read_text(), 30)
        folder.rmdir()


@pytest.mark.parametrize("seed", range(6))
def test_eight_ranks_on_two_cores(tmp_path: Path, seed: int) -> None:
    """Tensor, pipeline and data parallelism of 2, eight steps, with an evaluation and a sample at the end."""
    settings = (*EIGHT_RANKS, "train.steps=8", "train.evaluate.batches=2", "train.sample={tokens: 40}")
    with start_run(tmp_path / "run", *settings, f"train.seed={seed}", ranks=8, pause=0.0) as supervised:
        assert_clean(supervised)


@pytest.mark.skipif(
    os.geteuid() != 0 or not (CPU_GROUPS / "cpu.cfs_quota_us").exists(), reason="needs root and control groups v1"
)
@pytest.mark.parametrize("seed", range(4))
def test_a_cpu_quota_of_ten_percent(tmp_path: Path, seed: int) -> None:
    """From the start of the supervisor on, or from a step on, after deadlines were learnt at full speed."""
    with cpu_quota() as group, start_run(tmp_path / "run", *SHORT, f"train.seed={seed}") as supervised:
        if seed % 2:
            supervised.wait_for_step(6)
        for each in (psutil.Process(supervised.process.pid), *supervised.processes()):
            (group / "cgroup.procs").write_text(str(each.pid))  # with all its threads; later children follow
        assert_clean(supervised, 400)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a higher priority")
@pytest.mark.parametrize("seed", range(6))
def test_six_busy_loops(tmp_path: Path, seed: int) -> None:
    with busy_loops(BUSY_LOOPS), start_run(tmp_path / "run", *SHORT, f"train.seed={seed}") as supervised:
        assert_clean(supervised)


@pytest.mark.parametrize("seed", range(6))
def test_a_suspension_of_all_processes_for_20_seconds(tmp_path: Path, seed: int) -> None:
    """At a random moment, from the first step to the sample at the end."""
    generator = random.Random(seed)
    with start_run(tmp_path / "run", *SHORT, f"train.seed={seed}") as supervised:
        supervised.wait_for_events(0, "ready", 1)
        time.sleep(generator.uniform(0.0, 1.2))
        processes = [psutil.Process(supervised.process.pid), *supervised.processes()]
        generator.shuffle(processes)
        send_to_all(processes, signal.SIGSTOP)
        time.sleep(20)
        generator.shuffle(processes)
        send_to_all(processes, signal.SIGCONT)
        assert_clean(supervised)


@pytest.mark.parametrize("seed", range(5))
def test_a_supervisor_that_resumes_before_its_ranks(tmp_path: Path, seed: int) -> None:
    """The ranks are stopped for 16 s, the supervisor for 12 s of these; it resumes 2 s before them."""
    with start_run(tmp_path / "run", *SHORT, "train.steps=60", f"train.seed={seed}") as supervised:
        supervised.wait_for_step(5 + 5 * seed)
        ranks = [psutil.Process(supervised.pid(rank)) for rank in (0, 1)]
        send_to_all(ranks, signal.SIGSTOP)
        time.sleep(2)
        supervised.process.send_signal(signal.SIGSTOP)
        time.sleep(12)
        supervised.process.send_signal(signal.SIGCONT)
        time.sleep(2)
        send_to_all(ranks, signal.SIGCONT)
        assert_clean(supervised)


@pytest.mark.parametrize(
    ("ranks", "seconds", "deadline"), [(1, 40, 900), (2, 40, 900), (1, 20, 12), (2, 20, 12), (1, 25, 12), (2, 25, 12)]
)
def test_long_sampling(tmp_path: Path, ranks: int, seconds: int, deadline: int) -> None:
    """Beyond the 30 s that an evaluation batch may take, and beyond the deadline of every section."""
    settings = ("train.steps=8", "train.evaluate.batches=2", f"train.sample={{tokens: 60000, seconds: {seconds}}}",
                f"faults.start_seconds={deadline}")  # fmt: skip
    with start_run(tmp_path / "run", *settings, ranks=ranks, pause=0.0) as supervised:
        assert_clean(supervised)
    (sample,) = supervised.events(0, "sample")
    assert f"after {seconds} s" in sample["data"]["cut_short"]


@pytest.mark.parametrize(("batches", "batch_seconds"), [(8, 2), (5, 3), (40, 0.4), (150, 0.1), (3, 6)])
def test_long_evaluation(tmp_path: Path, batches: int, batch_seconds: float) -> None:
    """Many batches, and slow ones: in the middle of training, where steps take 50 ms, and after it."""
    settings = ("train.steps=12", f"train.evaluate={{every: 6, batches: {batches}}}", "faults.start_seconds=12")
    with start_run(tmp_path / "run", *settings, evaluation_seconds=str(batch_seconds)) as supervised:
        assert_clean(supervised)
    assert len(supervised.events(0, "evaluation")) == 2


@pytest.mark.parametrize(("ranks", "tensor_seconds"), [(1, 1.0), (2, 1.0), (2, 1.2), (2, 2.0), (1, 3.0)])
def test_long_export(tmp_path: Path, ranks: int, tensor_seconds: float) -> None:
    """The model has 20 tensors: each takes less than the deadline, all together take longer."""
    settings = ("train.steps=6", "faults.start_seconds=12")
    with start_run(tmp_path / "run", *settings, ranks=ranks, export_seconds=str(tensor_seconds)) as supervised:
        assert_clean(supervised)
    (saved,) = supervised.events(0, "saved")
    assert saved["data"]["seconds"] > 12


@pytest.mark.parametrize(
    ("disk_seconds", "asynchronous"),
    [(1.0, "true"), (2.0, "true"), (3.0, "true"), (1.0, "false"), (2.0, "false"), (3.0, "false"), (5.0, "true")],
)
def test_slow_disk(tmp_path: Path, disk_seconds: float, asynchronous: str) -> None:
    """Every sync takes seconds, and a checkpoint has six of them: longer than the deadline of a piece."""
    settings = ("train.steps=24", "checkpoint.every=8", f"checkpoint.asynchronous={asynchronous}",
                "faults.start_seconds=12")  # fmt: skip
    with start_run(tmp_path / "run", *settings, disk_seconds=str(disk_seconds)) as supervised:
        assert_clean(supervised)
