r"""Measures how long training pauses when the plan of a running run changes.

    python benchmarks/replan.py --set model.preset=tiny --set cluster=2xcpu \
        --patch plan.sharding=parameters --patch plan.mesh.tp=2 --patch "plan.mesh.tp=1 plan.mesh.dp_replicate=2"

It starts `trimaran train` with these settings, waits for some steps, requests one patch after the other, and prints for
each the pause, the first step under the new plan, and the median step before and after. The pause is the time between
two steps; the first step is not part of it. On one GPU with several NCCL ranks set TRIMARAN_SHARE_GPUS=1:

    TRIMARAN_SHARE_GPUS=1 python benchmarks/replan.py --set model.preset=1b --set cluster=4xH200 \
        --set plan.mesh.dp_shard=4 --set plan.precision=bf16 --steps 10 \
        --patch plan.mesh.tp=2 --patch plan.micro_batch=2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimaran.app.train.replan import plan_change
from trimaran.runs import RunDirectory, holds_run, read_json_lines
from trimaran.runs.run_requests import change_answers, write_change_request

POLL_SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", help="a recipe; without it the built-in one")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="FIELD=VALUE")
    parser.add_argument("--patch", action="append", required=True, metavar="'FIELD=VALUE ...'", help="one change")
    parser.add_argument("--steps", type=int, default=20, help="steps before each change and after the last")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a start or a change may take")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "run")
        process = _start(flags, run)
        try:
            rows = [_report(_change(flags, run, process, patch.split())) for patch in flags.patch]
        finally:
            if holds_run(run.path):
                run.stop_request.touch()
            process.wait(flags.timeout)
    applied = [row["pause_seconds"] for row in rows if row["status"] == "applied"]
    if applied:
        print(f"{len(applied)} of {len(rows)} changes applied, the longest pause {max(applied):.3f} s")


def _start(flags: argparse.Namespace, run: RunDirectory) -> "subprocess.Popen[bytes]":
    steps = ["train.steps=1000000", "train.save=false", "train.evaluate.batches=0", "checkpoint.every=0"]
    settings = [word for each in (*steps, *flags.settings) for word in ("--set", each)]
    recipe = [flags.recipe] if flags.recipe else []
    command = [sys.executable, "-m", "trimaran", "train", *recipe, "--run-dir", str(run.path), "--quiet", "--no-check"]
    return subprocess.Popen([*command, *settings], stdout=sys.stderr)


def _change(
    flags: argparse.Namespace, run: RunDirectory, process: "subprocess.Popen[bytes]", settings: list[str]
) -> dict[str, Any]:
    """Request one patch after some steps, and return what it took."""

    def wait(condition: Callable[[], Any]) -> Any:
        until = time.monotonic() + flags.timeout
        while not (found := condition()):
            if process.poll() is not None or time.monotonic() > until:
                sys.exit(f"the run ended or is too slow (exit code {process.poll()}): {run.path}")
            time.sleep(POLL_SECONDS)
        return found

    begin = len(_steps(run))
    wait(lambda: len(_steps(run)) >= begin + flags.steps)
    patch, _, _, new = plan_change(run, settings, os.environ)
    if not patch:
        return {"patch": settings, "status": "unchanged"}
    request = write_change_request(run, patch)
    event = wait(lambda: next((each for each in change_answers(run) if each["data"]["id"] == request.id), None))
    done, data = event["step"], event["data"]
    wait(lambda: len(_steps(run)) >= done + 1 + flags.steps)
    steps = _steps(run)
    before, after = steps[max(0, done - flags.steps) : done], steps[done + 1 : done + 1 + flags.steps]
    names = "status", "how", "pause_seconds", "pause_parts", "error"
    return {
        "patch": patch,
        **{name: data[name] for name in names},
        "first_step_seconds": steps[done],
        "step_seconds_before": statistics.median(before),
        "step_seconds_after": statistics.median(after),
        "plan": str(new),
    }


def _report(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


def _steps(run: RunDirectory) -> list[float]:
    return [line["step_seconds"] for line in read_json_lines(run.metrics)]


if __name__ == "__main__":
    main()
