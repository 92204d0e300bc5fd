"""The autopilot on one GPU with a 1B model: from bad starts to the best setting that was found by hand.

usage: python -m benchmarks.autopilot_h200 [--cases recompute,memory] [--steps 1500] [--seconds 200] [--points 4]
       [--set a.b=c] [--tiny]

`recompute` starts with `recompute: full, micro_batch: 1`. In `memory` another process holds half of the device, so that
the first micro-batch does not fit; the run restarts with a change that needs less, and the autopilot goes on from that.
The points of the grid, trained for a few steps each, are what somebody would try by hand. `--steps` is the length of
the run that the budget for trials is a fraction of; the run is stopped once nothing was tried for a while, or after
`--seconds`. *Reached* is the step time of the best point over that of the run's last steps. `--tiny` tries the script.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.autopilot import read_lines, step_seconds

from trimaran.runs import RunDirectory

LARGE = ("model.shape={layers: 16, hidden: 2048, heads: 32, kv_heads: 8, head_dim: 64, ffn: 8192, vocab: 128256}",
         "data.seq_len=2048", "train.global_batch=32", "plan.precision=bf16", "cluster=1xH200")  # fmt: skip
TINY = ("data.seq_len=64", "train.global_batch=32", "plan.precision=fp32", "cluster=1xcpu")
COMMON = ("train.sample.tokens=0", "train.save=false", "checkpoint.every=off", "train.evaluate.batches=0")
PAUSE_FIELDS = ("id", "status", "how", "pause_seconds", "pause_parts", "error")
GRID_STEPS, WARM_STEPS, LAST_STEPS = 16, 6, 12
QUIET_STEPS = 60  # without a decision, after which the run is stopped
HELD_FRACTION = 0.5
HOLD = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(int(float(sys.argv[1]) * total), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()  # ends with the process that started this one
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bad start and the points of the grid, as settings. `holds_memory`: another process holds part of the device."""

    start: tuple[str, ...]
    grid: tuple[tuple[str, ...], ...]
    holds_memory: bool = False


def _rows(rows: int, recompute: str = "none") -> tuple[str, ...]:
    return (f"plan.micro_batch={rows}", f"plan.recompute={recompute}")


CASES = {
    "recompute": Case(start=_rows(1, "full"), grid=(_rows(16), _rows(8), _rows(32), _rows(16, "selective"))),
    "memory": Case(
        start=_rows(32), grid=(_rows(8), _rows(16), _rows(16, "selective"), _rows(4)), holds_memory=True
    ),
}  # fmt: skip


def start(path: Path, settings: Sequence[str], mode: str) -> "subprocess.Popen[str]":
    sets = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(path), "--no-check", "--quiet",
               "--autopilot", mode, *sets]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def measure_point(path: Path, settings: Sequence[str]) -> float | None:
    """Return the median step of a short run; None if it failed, as one that does not fit does."""
    with start(path, (*settings, f"train.steps={GRID_STEPS}", "faults.restart=0"), "off") as process:
        text, _ = process.communicate()
    if process.returncode:
        print(f"  {' '.join(settings[-2:])}: exit code {process.returncode}: {text[-300:]}", flush=True)
        return None
    return step_seconds(read_lines(RunDirectory(path).metrics)[WARM_STEPS:])


def run_with_autopilot(path: Path, settings: Sequence[str], seconds: float) -> dict[str, Any]:
    """Train with the autopilot until nothing was tried for a while, and return what it did."""
    run, until = RunDirectory(path), time.monotonic() + seconds
    with start(path, settings, "act") as process:
        while process.poll() is None and time.monotonic() < until and not _is_quiet(run):
            time.sleep(1.0)
        if process.poll() is None:
            run.stop_request.touch()
        text, _ = process.communicate()
    lines = read_lines(run.metrics)
    if not lines:
        sys.exit(f"no step was made: {text[-3000:]}")
    decisions = {each["id"]: each for each in read_lines(run.path / "decisions.jsonl")}
    changes = [each for each in read_lines(run.events(0)) if each.get("kind") == "change"]
    return {
        "steps": lines[-1]["step"],
        "first_ms": 1e3 * step_seconds(lines[WARM_STEPS // 2 : WARM_STEPS + 2]),
        "end_ms": 1e3 * step_seconds(lines[-LAST_STEPS:]),
        "pauses": [{name: each["data"].get(name) for name in PAUSE_FIELDS} for each in changes],
        "incidents": [each.get("what") for each in read_lines(run.incidents)],
        "decisions": [
            f"step {each['step']} {each['outcome']}: {json.dumps(each['patch'])}, expected "
            f"{each['expected'].get('gain', 0.0):.1%}, measured {(each['measured'] or {}).get('gain', 0.0):.1%}, "
            f"{(each['measured'] or {}).get('pause_seconds', 0.0):.1f} s of pauses"
            for each in decisions.values()
        ],
        "plan": str(run.read_plan()),
    }


def _is_quiet(run: RunDirectory) -> bool:
    """Return whether the autopilot has tried nothing for many steps."""
    lines = read_lines(run.metrics)
    decisions = read_lines(run.path / "decisions.jsonl")
    last = max((each["step"] + (each["measured"] or {}).get("steps", 0) for each in decisions), default=0)
    is_trying = bool(decisions) and decisions[-1]["outcome"] == "trying"
    return bool(lines) and not is_trying and lines[-1]["step"] > last + QUIET_STEPS


@contextlib.contextmanager
def held_memory(fraction: float) -> Iterator[None]:
    """Let another process hold this fraction of the device meanwhile; 0: none."""
    if not fraction:
        yield
        return
    command, pipe = [sys.executable, "-c", HOLD, str(fraction)], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def measure_case(name: str, case: Case, flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shared = (*(TINY if flags.tiny else LARGE), *COMMON, *flags.settings)
    with held_memory(HELD_FRACTION if case.holds_memory and not flags.tiny else 0.0):
        found = run_with_autopilot(folder / name, (*shared, *case.start, f"train.steps={flags.steps}"), flags.seconds)
        print(json.dumps({"case": name, **found}), flush=True)
        points = {
            " ".join(point): seconds
            for index, point in enumerate(case.grid[: flags.points])
            if (seconds := measure_point(folder / f"{name}-{index}", (*shared, *point))) is not None
        }
    best = min(points.values(), default=float("nan"))
    return {
        "case": name,
        "grid_ms": {each: 1e3 * seconds for each, seconds in points.items()},
        "start_ms": found["first_ms"],
        "end_ms": found["end_ms"],
        "reached": 1e3 * best / found["end_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--points", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--tiny", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autopilot-") as name:
        for case in flags.cases.split(","):
            print(json.dumps(measure_case(case, CASES[case], flags, Path(name))), flush=True)


if __name__ == "__main__":
    main()
