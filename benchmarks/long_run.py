"""CPU time and memory of what reads a long run: a restart, `incidents`, `watch`, `report`, `doctor`.

usage: python -m benchmarks.long_run [--steps 1000000] [--run FOLDER] [--json]

The run is synthetic (`tests/long_run.py`): the lines of 8 ranks on GPUs, 19 restarts, a checkpoint every 500 steps.
With `--run` an existing run directory is read. `restart` is the sum of what all processes of a start read: supervisor,
rank 0, sidecar with sinks, live view; the commands include Python's start and imports. Seconds are user and system
time. The last row is the live view while 10,000 more steps are written, with a frame every 500 steps.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.long_run import write_long_run

from trimaran.runs import RunDirectory, open_run

RESTART = """
import json, resource, sys, time
from pathlib import Path
from trimaran.runs import RunDirectory
from trimaran.runs.run_records import read_attempts
from trimaran.runs.journal import forget_steps_after, last_step
from trimaran.runs.line_files import last_lines
from trimaran.app.runs.run_state import RunState
from trimaran.runs.read.ledger import LedgerReader
from trimaran.runs.read.run_reader import RunTail
run = RunDirectory(Path(sys.argv[1]))
state, done = RunState(run), RunState(run, only_status=True)
position = run.path / "telemetry" / "fed.json"
position.write_text(json.dumps({"time": json.loads(last_lines(run.metrics, 1)[0])["time"]}))
parts = {
    "resume": done.refresh,
    "view": state.refresh,
    "supervisor": lambda: (read_attempts(run), last_step(run), last_step(run)),
    "rank": lambda: (last_step(run), forget_steps_after(last_step(run), run.metrics), last_step(run)),
    "sinks": lambda: sum(1 for _ in RunTail(run).new()),
    "ledger": lambda: LedgerReader(run).read(),
}
seconds = {}
for name, call in parts.items():
    began = time.process_time()
    call()
    seconds[name] = time.process_time() - began
position.unlink()
print(json.dumps({"cpu_seconds": sum(seconds.values()), **seconds,
                  "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""
FOLLOW = """
import json, resource, sys, time
from pathlib import Path
from rich.console import Console
from tests.long_run import _templates, write_steps
from trimaran.app.runs.run_state import RunState
from trimaran.app.runs.run_view import draw
from trimaran.app.runs.status_lines import status_lines
from trimaran.runs import RunDirectory
def resident(): return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
def frame():
    state.refresh()
    with console.capture(): console.print(draw(state, width=120, height=50, extra=status_lines(state)))
run = RunDirectory(Path(sys.argv[1]))
state, console, size = RunState(run), Console(width=120, force_terminal=True), run.metrics.stat().st_size
_templates()
frame()
frame()
before, began, last, num_frames = resident(), time.process_time(), state.step, 0
try:
    for step in range(last + 1, last + 10_001, 500):
        write_steps(run, range(step, step + 500), attempt_steps=50_000)
        frame()
        num_frames += 1
    assert state.step == last + 10_000
    print(json.dumps({"cpu_seconds": time.process_time() - began, "frames": num_frames,
                      "added_bytes": resident() - before}))
finally:
    with run.metrics.open("rb+") as file: file.truncate(size)
"""
METER = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(process.pid, 0)
print(json.dumps({"cpu_seconds": usage.ru_utime + usage.ru_stime, "peak_bytes": usage.ru_maxrss * 1024,
                  "code": os.waitstatus_to_exitcode(status)}))
"""


def measure(run: RunDirectory, environment: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Return the cost of each reader: CPU seconds and peak memory of its process."""
    costs = {"restart": _ask(RESTART, str(run.path), environment=environment)}
    page = run.path.parent / "page.html"
    commands = {
        "incidents": ["incidents", str(run.path)],
        "watch": ["watch", str(run.path), "--json"],
        "report": ["report", str(run.path), "--out", str(page)],
        "doctor": ["doctor", str(run.path)],
    }
    for name, words in commands.items():
        costs[name] = _cost([sys.executable, "-m", "trimaran", *words], environment)
    costs["report"]["page_bytes"] = page.stat().st_size
    page.unlink()
    costs["watch, 10,000 steps more"] = _ask(FOLLOW, str(run.path), environment=environment)
    return costs


def disk_bytes(run: RunDirectory, steps: int) -> dict[str, float]:
    """Return the bytes per step of each kind of file."""
    kinds = {"metrics": [run.metrics], "index": [run.metrics_index], "events": (run.path / "events").iterdir(),
             "samples": run.samples(0).parent.glob("node-*.jsonl")}  # fmt: skip
    return {kind: sum(path.stat().st_size for path in paths) / steps for kind, paths in kinds.items()}


def _cost(command: list[str], environment: Mapping[str, str]) -> dict[str, float]:
    found = _ask(METER, *command, environment=environment)
    if found.pop("code") not in (0, 1):  # the doctor exits with 1 if it has findings
        raise SystemExit(f"{command} failed")
    return found


def _ask(script: str, *words: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Return what a Python script prints. It is started by a small process, whose peak memory it inherits."""
    command = ["/bin/sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", script, *words]
    found = subprocess.run(command, env=dict(environment), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(found.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_run", description="Cost of reading a long run.")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--run", type=Path, help="an existing run directory")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = open_run(flags.run) if flags.run else write_long_run(Path(folder) / "run", steps=flags.steps)
        costs = measure(run, os.environ)
        stored = disk_bytes(run, flags.steps)
    if flags.json:
        print(json.dumps({"steps": flags.steps, "costs": costs, "bytes_per_step": stored}))
        return
    print("on disk, bytes per step:", ", ".join(f"{kind} {size:.1f}" for kind, size in stored.items()))
    for name, cost in costs.items():
        others = ", ".join(f"{key} {value:.3g}" for key, value in cost.items() if key != "cpu_seconds")
        print(f"{name}: {cost['cpu_seconds']:.2f} s of CPU, {others}")


if __name__ == "__main__":
    main()
