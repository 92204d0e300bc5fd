"""Time from `trimaran train` to the first step, by phase, with an empty compile cache and with a filled one.

usage: python -m benchmarks.start [RECIPE.yaml] [--set a.b=c]... [--bare] [--json]

Without a recipe the model is a 1B decoder with an untied head, 4 x 4096 tokens a step, on a GPU, and a tiny one on a
CPU. Data is packed beforehand. The phases are `command` (the command line, the plan, the supervisor), `import` (torch
in the fork server), then those of rank 0's events `ready` and `started`: join, network, data, optimizer, keep (looks
for an existing state of the run), and the first step, of which `compile` is a part. The run is killed after the first
step. With `--bare` a plain script with the same network follows, once cold and once warm: import, build, and the first
step of `overhead.BareLoop`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import yaml

from trimaran.core import Recipe, parse_recipe
from trimaran.data import cache_folder, prepare
from trimaran.hardware import detect
from trimaran.run import RunDirectory
from trimaran.run.attempts import read_attempts
from trimaran.run.journal import parse_lines

MAX_START_SECONDS = 560.0
LARGE = {
    "model": {"preset": "llama-3.2-1b", "shape": {"tied": False}},
    "data": {"seq_len": 4096},
    "train": {"steps": 1000, "global_batch": 4},
    "plan": {"micro_batch": 4},
}
SMALL = {
    "model": {"shape": {"layers": 2}},
    "data": {"seq_len": 64},
    "train": {"steps": 1000, "global_batch": 4},
    "cluster": "1xcpu",
    "plan": {"compile": True, "micro_batch": 4},
}
BARE = """
import time
began = time.time()
import os, sys
from pathlib import Path
import torch
from benchmarks.overhead import BareLoop, plan_of
from trimaran.core import parse_recipe
from trimaran.data.step_batch import text_batch
from trimaran.train.process.rank_info import join_process_group, read_rank_info
imported = time.time()
recipe = parse_recipe(Path(sys.argv[1]).read_text(), name="start")
rank_info = read_rank_info({})
join_process_group(rank_info)
plan = plan_of(recipe).model_copy(update={"compile": True})
loop = BareLoop(recipe, plan, rank_info)
built = time.time()
tokens = torch.randint(256, (1, recipe.train.global_batch, recipe.data.seq_len))
loop.step(text_batch(0, tokens, tokens))
torch.cuda.synchronize() if rank_info.device.type == "cuda" else None
print(f"{imported - began} {built - imported} {time.time() - built} {time.time()}")
"""


def started(recipe: Path, settings: list[str], folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of one start, by phase; `all` is from the command to the end of the first step."""
    overrides = [word for each in settings for word in ("--set", each)]
    command = [sys.executable, "-m", "trimaran", "train", str(recipe), "--run-dir", str(folder), "--quiet", *overrides]
    run, began = RunDirectory(folder), time.time()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not (events := events_of(run)).keys() >= {"start", "ready", "started"}:
            if process.poll() is not None or time.time() > began + MAX_START_SECONDS:
                raise RuntimeError(
                    f"no first step: {process.communicate()[1][-2000:] if process.poll() else 'too late'}"
                )
            time.sleep(0.02)
    finally:
        kill(process)
    attempt, first = read_attempts(run).attempts[0].time, events["started"]
    ready = events["ready"]["data"]["phases"]
    return {
        "command": attempt - began,
        "import": events["start"]["time"] - ready["join"] - attempt,
        **ready,
        "first step": first["time"] - events["ready"]["time"],
        "of it compile": first["data"]["compile"]["seconds"],
        "all": first["time"] - began,
    }


def events_of(run: RunDirectory) -> dict[str, dict[str, Any]]:
    path = run.events(0)
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return {each["kind"]: each for each in parse_lines(lines)}


def kill(process: subprocess.Popen[str]) -> None:
    """Kill the command and all its children: a run that is only stopped would write a checkpoint first."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in [process, *children]:
        try:
            each.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()
    psutil.wait_procs(children, timeout=30)  # then the device is free again


def bare(recipe: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of a plain script, by phase."""
    began = time.time()
    command = [sys.executable, "-c", BARE, str(recipe)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=MAX_START_SECONDS)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    imported, built, stepped, ended = map(float, done.stdout.split())
    return {"import": imported, "network": built, "first step": stepped, "all": ended - began}


def measure(recipe: Recipe, path: Path, settings: list[str], *, with_bare: bool) -> dict[str, dict[str, float]]:
    """Return the seconds by phase of each start, by its name."""
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        cold = os.environ | {"TRIMARAN_CACHE": f"{folder}/cache"}
        prepare(recipe.data, cache=cache_folder(cold))
        found = {name: started(path, settings, Path(folder) / name, cold) for name in ("cold", "warm")}
        if with_bare:
            alone = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/bare"}
            found |= {f"bare script, {name}": bare(path, alone) for name in ("cold", "warm")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.recipe or Path(folder) / "start.yaml"
        if options.recipe is None:
            path.write_text(yaml.safe_dump(SMALL if detect().device.kind == "cpu" else LARGE))
        recipe = parse_recipe(path.read_text(), name=path.name, overrides=options.settings)
        found = measure(recipe, path, options.settings, with_bare=options.bare)
    if options.json:
        print(
            json.dumps({name: {key: round(each, 2) for key, each in phases.items()} for name, phases in found.items()})
        )
        return
    for name, phases in found.items():
        print(f"{name:18}", ", ".join(f"{phase} {each:.1f}" for phase, each in phases.items()), "s")


if __name__ == "__main__":
    main()
