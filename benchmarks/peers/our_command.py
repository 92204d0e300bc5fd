"""Trimaran as a user starts it: `trimaran train` with its supervisor, telemetry and memory copies.

Every window is a run of its own. Step times are those of `metrics.jsonl`; CPU seconds are those of all processes of the
run, from the end of the untimed steps to the end of the last step.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from benchmarks.peers.ours import read_metrics, result_of, settings, times_of, write_config, write_tokens
from benchmarks.peers.timer import TurnTimer
from benchmarks.peers.work import Work

from trimaran.core.recipe import CheckpointSection
from trimaran.runs import RunDirectory

POLL_SECONDS = 0.02


def ready(work: Work) -> Callable[[TurnTimer], dict[str, Any]]:
    folder = tempfile.TemporaryDirectory(prefix="throughput-")
    root = Path(folder.name)
    write_tokens(work, root / "data")
    write_config(work, root / "model")
    return lambda timer: _measure(work, timer, folder, root)


def _measure(work: Work, timer: TurnTimer, folder: tempfile.TemporaryDirectory, root: Path) -> dict[str, Any]:
    first: dict[str, Any] = {}
    result: dict[str, Any] = {}
    with folder:
        for number in range(work.windows):
            timer.wait()
            path = root / f"run-{number}"
            began, cpu = time.time(), _run(work, root, path)
            lines = read_metrics(path)
            times = times_of(lines, work.warm)
            timer.add({"seconds": times["seconds"], "wall_seconds": times["wall_seconds"], "cpu_seconds": cpu})
            result = result_of(lines, RunDirectory(path).read_plan())
            first = first or {"first_step_time": times["first_step_time"], "start": lines[0]["time"] - began}
        result["note"] += f", {first.pop('start'):.1f} s from the command to the first step"
    return result | first


def _run(work: Work, root: Path, path: Path) -> float:
    """Run the command to its end and return the CPU seconds of its timed steps."""
    asked = [*settings(work, root), f"train.steps={work.warm + work.steps}"]
    if "off" in str(CheckpointSection.model_fields["every"].annotation):
        asked.append("checkpoint.every=off")
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(path), "--quiet", "--no-check"]
    command += [word for each in asked for word in ("--set", each)]
    with (root / "output").open("w+") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=_outer(work))
        used = [_wait_for(path / "metrics.jsonl", lines, process) for lines in (work.warm, work.warm + work.steps)]
        if process.wait() != 0:
            raise RuntimeError(
                f"trimaran train ended with {process.returncode}: {(root / 'output').read_text()[-2000:]}"
            )
    return used[1] - used[0]


def _outer(work: Work) -> dict[str, str]:
    """Return the environment of the command. With several ranks Trimaran chooses the threads of each itself."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS" or work.ranks == 1}


def _wait_for(metrics: Path, num_lines: int, process: subprocess.Popen[bytes]) -> float:
    """Return the CPU seconds that all processes of the run have used when `metrics` has so many lines."""
    while process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= num_lines:
            break
        time.sleep(POLL_SECONDS)
    return _cpu_seconds(process.pid)


def _cpu_seconds(pid: int) -> float:
    total = 0.0
    try:
        for each in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            times = each.cpu_times()
            total += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return total
