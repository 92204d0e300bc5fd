"""The autopilot on real runs: from bad starts to the best setting of a grid.

usage: python -m benchmarks.autopilot [--cases micro-batch,recompute] [--cluster 2xcpu] [--steps 600] [--set a.b=c]
       [--mode act] [--json]

Each case pins one bad setting in the run's plan, and has a grid of settings that somebody who tunes by hand would try.
First every point of the grid is trained for a few steps without the autopilot, in two rounds, so that a slow moment of
the machine does not decide. Then the bad start is trained with the autopilot. *Reached* is the step time of the best
point over that of the last quarter of the run; *settled* is the fraction of the run's time after which nothing was
changed any more. On a CPU the machine must be quiet: the load average is printed with each case.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.runs import RunDirectory

WARM_STEPS, GRID_STEPS, ROUNDS = 8, 40, 2
SHAPE = ("model.shape={layers: 4, hidden: 128, heads: 4, kv_heads: 2, head_dim: 32, ffn: 384}", "data.seq_len=128")
COMMON = ("train.global_batch=32", "train.sample.tokens=0", "train.save=false", "checkpoint.every=off",
          "plan.precision=fp32")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A bad start, as settings, and the grid: settings that replace or add to them. `variables` are for all runs."""

    start: tuple[str, ...]
    grid: tuple[tuple[str, ...], ...]
    variables: Mapping[str, str] = field(default_factory=dict)


def _replicas(*settings: str) -> tuple[str, ...]:
    return ("plan.mesh.dp_replicate=2", *settings)


CASES: dict[str, Case] = {
    "micro-batch": Case(
        start=_replicas("plan.micro_batch=1", "plan.grad_accum=16"),
        grid=tuple(
            _replicas(f"plan.micro_batch={rows}", f"plan.grad_accum={16 // rows}") for rows in (2, 4, 8, 16)
        ),
    ),
    "recompute": Case(
        start=_replicas("plan.recompute=full", "plan.micro_batch=16"),
        grid=(_replicas("plan.recompute=none", "plan.micro_batch=16"),
              _replicas("plan.recompute=selective", "plan.micro_batch=16")),
    ),
    "buckets": Case(
        start=_replicas("plan.comm.bucket_mb=1", "plan.micro_batch=16"),
        grid=(_replicas("plan.comm.bucket_mb=25", "plan.micro_batch=16"),),
    ),
    "tensor-parallel": Case(
        start=("plan.mesh.tp=2", "plan.micro_batch=32"),
        grid=(_replicas("plan.micro_batch=16"), ("plan.mesh.dp_shard=2", "plan.micro_batch=16")),
    ),
    "pipeline-cut": Case(
        start=("plan.mesh.pp=2", "plan.pipeline.stages=[1, 3]", "plan.micro_batch=4", "plan.grad_accum=8"),
        grid=(("plan.mesh.pp=2", "plan.pipeline.stages=[2, 2]", "plan.micro_batch=4", "plan.grad_accum=8"),
              _replicas("plan.micro_batch=16")),
    ),
    "loader": Case(  # each row takes 60 ms to read, as from an object store, and one process reads one at a time
        start=_replicas("data.workers=1", "plan.micro_batch=16"),
        grid=tuple(_replicas(f"data.workers={count}", "plan.micro_batch=16") for count in (2, 4, 8)),
        variables={"TRIMARAN_TEST_PLUGIN": "tests.fault.slow_loader", "TRIMARAN_TEST_LOAD_SECONDS": "0.06"},
    ),
}  # fmt: skip


def train(
    folder: Path, name: str, settings: Sequence[str], variables: Mapping[str, str], *, mode: str = "off"
) -> RunDirectory:
    """Train in a new run directory through the command line and return the run."""
    path = folder / name
    sets = [part for each in settings for part in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", "--run-dir", str(path), "--autopilot", mode, *sets]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return RunDirectory(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def step_seconds(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(each["step_seconds"] for each in lines)


def measure_case(name: str, case: Case, flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the grid and the run with the autopilot reached."""
    shared = (f"cluster={flags.cluster}", *SHAPE, *COMMON, *flags.settings)
    points: dict[tuple[str, ...], float] = {}
    for turn in range(ROUNDS):
        for index, settings in enumerate((case.start, *case.grid)):
            steps = f"train.steps={GRID_STEPS}"
            run = train(folder, f"{name}-{index}-{turn}", (*shared, *settings, steps), case.variables)
            seconds = step_seconds(read_lines(run.metrics)[WARM_STEPS:])
            points[settings] = min(seconds, points.get(settings, seconds))
    best = min(points, key=lambda settings: points[settings])
    run = train(folder, name, (*shared, *case.start, f"train.steps={flags.steps}"), case.variables, mode=flags.mode)
    lines, decisions = read_lines(run.metrics), read_lines(run.path / "decisions.jsonl")
    last = {each["id"]: each for each in decisions}
    elapsed = lines[-1]["time"] - lines[0]["time"]
    changed = [each["time"] for each in decisions if each["outcome"] in ("kept", "rolled-back")]
    end = step_seconds(lines[-len(lines) // 4 :])
    return {
        "case": name,
        "start_ms": 1e3 * points[case.start],
        "best_ms": 1e3 * points[best],
        "best": [*best],
        "end_ms": 1e3 * end,
        "reached": points[best] / end,
        "settled": (max(changed, default=lines[0]["time"]) - lines[0]["time"]) / elapsed,
        "decisions": [f"{each['outcome']}: {json.dumps(each['patch'])}" for each in last.values()],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--cluster", default="2xcpu")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--mode", default="act", choices=("off", "advise", "act"))
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--json", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="autopilot-") as name:
        for case in flags.cases.split(","):
            result = measure_case(case, CASES[case], flags, Path(name))
            if flags.json:
                print(json.dumps(result), flush=True)
                continue
            times = ", ".join(f"{part} {result[f'{part}_ms']:.0f}" for part in ("start", "best", "end"))
            print(f"{case}: {times} ms; reached {result['reached']:.2f}, settled after {result['settled']:.0%}, "
                  f"load {result['load']:.1f}; best: {' '.join(result['best'])}", flush=True)  # fmt: skip
            print("\n".join(f"  {each}" for each in result["decisions"]), flush=True)


if __name__ == "__main__":
    main()
