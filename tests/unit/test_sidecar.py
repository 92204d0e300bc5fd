"""The sidecar process: samples of the node, and sinks that may fail or hang."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.disks import mounted, remount
from tests.fault.harness import lines, wait_for
from tests.runs import step_metrics
from trimaran.core import Plan, parse_recipe
from trimaran.launch import SidecarProcess
from trimaran.machine import GpuSampler
from trimaran.runs import (
    CounterRates,
    HostSampler,
    IncidentLog,
    Journal,
    LineWriter,
    RunDirectory,
    RunTail,
    Sampler,
    SinkFeed,
    append_line,
    create_run,
    read_json_lines,
)

# An idle rank with a busy loader process.
RANK = """
import ctypes, os, time
ctypes.CDLL(None).prctl(15, b"trimaran-3")
if os.fork() == 0:
    ctypes.CDLL(None).prctl(1, 9)
    while True: pass
time.sleep(60)
"""


def new_run(path: Path, *overrides: str) -> RunDirectory:
    return create_run(path, parse_recipe("", name="test", overrides=overrides), Plan())


def test_a_sample_has_the_node_its_ranks_and_their_loaders(tmp_path: Path) -> None:
    rank = subprocess.Popen([sys.executable, "-S", "-c", RANK])
    try:
        wait_for(lambda: psutil.Process(rank.pid).name() == "trimaran-3" and psutil.Process(rank.pid).children())
        host = HostSampler(tmp_path, supervisor=os.getpid())
        time.sleep(0.3)
        sample = host.sample()
    finally:
        rank.kill()
        rank.wait()
    assert sample["ranks"].keys() == {"3"}
    assert 0 <= sample["ranks"]["3"]["cpu"] < sample["ranks"]["3"]["loader_cpu"] < 1.5
    assert sample["ranks"]["3"]["threads"] == 1
    assert 0 < sample["ranks"]["3"]["private"] < sample["ranks"]["3"]["ram"]
    assert sample["ranks"]["3"]["loader_private"] > 0
    assert 0 < sample["ranks"]["3"]["ram"] < sample["ram_used"] < sample["ram"]
    assert 0 < sample["cpu"] <= 1
    assert sample["cores"] == psutil.cpu_count()
    assert {"load", "swap_used", "disk_free", "net_received", "net_sent"} <= sample.keys()


def test_a_counter_that_is_new_or_was_reset_has_no_rate() -> None:
    rates = CounterRates()
    assert rates.of({"a": 5.0}, 1.0) == {}
    assert rates.of({"a": 9.0, "b": 1.0}, 3.0) == {"a": 2.0}
    assert rates.of({"a": 0.0, "b": 2.0}, 4.0) == {"b": 1.0}


class Nvml:
    """A fake NVML with two GPUs; the second has no ECC and runs at half its clock."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 1, 0

    def nvmlInit(self) -> None: ...  # noqa: N802

    def __getattr__(self, name: str) -> Callable[..., Any]:
        answers: dict[str, Callable[[int], Any]] = {
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetHandleByUUID": lambda uuid: int(str(uuid)[-1]),
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}".encode(),
            "nvmlDeviceGetName": lambda gpu: "H200",
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=75),
            "nvmlDeviceGetMemoryInfo": lambda gpu: SimpleNamespace(used=3 << 30, total=141 << 30),
            "nvmlDeviceGetPowerUsage": lambda gpu: 650_000,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda gpu: 700_000,
            "nvmlDeviceGetTemperature": lambda gpu: 60 + gpu,
            "nvmlDeviceGetClockInfo": lambda gpu: 1980 >> gpu,
            "nvmlDeviceGetMaxClockInfo": lambda gpu: 1980,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda gpu: 0x24 if gpu else 0x1,
            "nvmlDeviceGetTotalEccErrors": lambda gpu: [0][gpu],
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: [SimpleNamespace(pid=70 + gpu)],
        }
        if name == "nvmlDeviceGetCount":
            return lambda: 2
        return lambda gpu, *_: answers[name](gpu)


def test_unsupported_gpu_values_are_left_out() -> None:
    first, second = GpuSampler(library=Nvml()).sample()
    assert first == {
        "index": 0, "uuid": "GPU-0", "name": "H200", "utilisation": 0.75, "memory_used": 3 << 30, "memory": 141 << 30,
        "power": 650.0, "power_limit": 700.0, "power_limit_default": 700.0, "temperature": 60,
        "sm_clock": 1_980_000_000, "sm_clock_max": 1_980_000_000, "throttle": [], "ecc_uncorrected": 0, "pids": [70],
    }  # fmt: skip
    assert (second["throttle"], second["sm_clock"]) == (["power_cap", "thermal"], 990_000_000)
    assert "ecc_uncorrected" not in second


def test_gpus_are_numbered_as_the_ranks_see_them() -> None:
    assert [gpu["uuid"] for gpu in GpuSampler("GPU-1,0", library=Nvml()).sample()] == ["GPU-1", "GPU-0"]
    assert GpuSampler("", library=Nvml()).sample() == []


def test_a_machine_without_nvml_has_no_gpu_samples() -> None:
    missing = SimpleNamespace(nvmlInit=lambda: 1 / 0)
    assert GpuSampler(library=missing).sample() == []


class Recorder:
    """A sink that records its lines, and calls `before` first."""

    name = "recorder"

    def __init__(self, before: Callable[[int], Any] = lambda number: None) -> None:
        self.received: list[tuple[str, Any]] = []
        self.calls, self.closed = 0, False
        self._before = before

    def __getattr__(self, kind: str) -> Callable[[Any], None]:
        def take(line: Any) -> None:
            self.calls += 1
            self._before(self.calls)
            self.received.append((kind, line))

        return take

    def close(self) -> None:
        self.closed = True


def test_a_failing_sink_is_logged_once_and_retried_and_loses_only_failed_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(call: int) -> None:
        if call in (2, 3, 5, 6, 7):
            raise ConnectionError("connection refused")

    sink = Recorder(fail)
    feed = SinkFeed(sink, first_delay=0.01)  # pyrefly: ignore[bad-argument-type]
    for number in range(4):
        feed.put("step", {"step": number})
    wait_for(lambda: len(sink.received) == 3, 60)
    assert feed.close(seconds=60)
    assert ([line["step"] for _, line in sink.received], feed.lost, sink.closed) == ([0, 1, 3], 1, True)
    assert caplog.text.count("connection refused") == 2  # two failures, with a successful line in between


def test_a_hanging_sink_blocks_nothing_and_is_abandoned() -> None:
    for_good = threading.Event()
    feed = SinkFeed(Recorder(lambda number: for_good.wait()), max_queued=10)  # pyrefly: ignore[bad-argument-type]
    for number in range(100):
        feed.put("step", {"step": number})
    assert not feed.close(seconds=0.05)
    assert feed.lost >= 89
    for_good.set()


def test_a_tail_continues_where_the_previous_one_stopped(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    first = RunTail(run)
    with Journal(run, 0) as journal:
        journal.event("start")
        journal.step(step_metrics(1, loss=1.0))
        assert [kind for kind, _ in first.new()] == ["step", "event"]
        first.save_position()
        append_line(run.samples(1), {"time": time.time(), "node": 1})
        IncidentLog(run).notice("hang", "a rank stood still")
        journal.event("stop")
    found = [(kind, line.get("kind")) for kind, line in RunTail(run).new()]
    assert found == [("incident", None), ("event", "stop"), ("sample", None)]
    assert sorted(kind for kind, _ in first.new()) == ["event", "incident", "sample"]
    assert list(first.new()) == []


def test_a_full_disk_only_delays_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seconds = itertools.count()
    with mounted(tmp_path / "disk", "size=64k") as disk:
        run = RunDirectory(disk)
        writer = LineWriter(run.samples(0), clock=lambda: 2.0 * next(seconds))  # so that it is always time to retry
        sampler = Sampler(run, 0, supervisor=os.getpid(), visible="", writer=writer)
        remount(disk, "ro")
        sampler.take()  # the file cannot be created
        remount(disk, "rw")
        (disk / "ballast").write_bytes(bytes(60 << 10))
        for _ in range(30):
            sampler.take()
        assert len([*read_json_lines(run.samples(0))]) < 31
        assert run.samples(0).read_bytes().endswith(b"\n")
        (disk / "ballast").unlink()
        sampler.take()
        assert len([*read_json_lines(run.samples(0))]) == 32
    assert "Read-only file system" in caplog.text
    assert "node-0.jsonl cannot be written: No space left on device" in caplog.text


@contextmanager
def sidecar(run: RunDirectory) -> Iterator[SidecarProcess]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    line = SidecarProcess(run, environment, first_restart_seconds=0.0, end_seconds=60.0)
    try:
        line.start(0)
        yield line
    finally:
        line.end()


def pid_of(run: RunDirectory) -> int:
    """Return the PID of the run's sidecar, a child of this process."""
    for each in psutil.Process().children():
        with suppress(psutil.Error):
            if str(run.path) in each.cmdline():
                return each.pid
    return 0


def test_a_killed_sidecar_is_restarted_and_feeds_the_sinks_the_rest(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", "telemetry.sample_seconds=0.1", "telemetry.ecs=true")
    with Journal(run, 0) as journal, sidecar(run) as line:
        wait_for(lambda: len(lines(run.samples(0))) > 1, 20)
        first = pid_of(run)
        assert psutil.Process(first).nice() == min(19, os.nice(0) + 10)
        line.start(0)
        assert pid_of(run) == first  # it survives a restart of the ranks
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: line.restart_if_dead() or pid_of(run) not in (0, first), 20)
        count = len(lines(run.samples(0)))
        wait_for(lambda: len(lines(run.samples(0))) > count, 20)
        journal.event("done", step=9)
        ended = time.monotonic()
        line.end()
        assert time.monotonic() - ended < 60, "it was killed"
        assert pid_of(run) == 0
    done = [each for each in lines(run.path / "logs" / "ecs.jsonl") if each.get("event.action") == "done"]
    assert len(done) == 1
    assert "Traceback" not in (run.path / "logs" / "sidecar.log").read_text()


def test_a_sidecar_without_work_exits_and_is_not_restarted(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", "telemetry.sample_seconds=0")
    with sidecar(run) as line:
        wait_for(lambda: not pid_of(run), 20)
        line.restart_if_dead()
        assert not pid_of(run)
    assert not run.samples(0).exists()


def test_without_a_writable_log_there_is_no_sidecar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sidecar(RunDirectory(tmp_path / "missing")) as line:
        line.restart_if_dead()
    assert "the sidecar cannot be started" in caplog.text


def test_a_sidecar_dies_with_its_supervisor(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", "telemetry.sample_seconds=0.1")
    code = (
        "import os, sys, time; from pathlib import Path; from trimaran.runs import RunDirectory\n"
        "from trimaran.launch.supervise.side_processes import SidecarProcess\n"
        "SidecarProcess(RunDirectory(Path(sys.argv[1])), os.environ).start(0)\ntime.sleep(60)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code, str(run.path)])
    try:
        wait_for(lambda: lines(run.samples(0)), 20)
        (child,) = psutil.Process(supervisor.pid).children()
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_for(lambda: not child.is_running() or child.status() == "zombie", 60)


def test_samples_are_valid_json_lines(tmp_path: Path) -> None:
    sampler = Sampler(RunDirectory(tmp_path), 2, supervisor=os.getpid(), visible="")
    sampler.take()
    (line,) = RunDirectory(tmp_path).samples(2).read_text().splitlines()
    assert json.loads(line)["node"] == 2
    assert len(line) < 2000
