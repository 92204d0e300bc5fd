"""Time from `trimaran train` to the first step, by phase, beside a plain script with the same imports.

usage: python -m benchmarks.start [RECIPE.yaml] [--set a.b=c]... [--rounds 3] [--fork-server] [--no-cold] [--json]

Without a recipe the model is a 160M decoder, 16 x 1024 tokens a step, on a GPU, and a tiny one on a CPU. Data is packed
beforehand. The phases are `command` (the command line, the plan, the supervisor; torch is imported meanwhile), `import`
(what is left of torch's import then), those of rank 0's events `ready` and `started`: join, network, data, optimizer,
keep (looks for an existing state of the run), and the first step, of which `compile` is a part. A run is killed after
the first step; its event comes one step later, as all numbers of a step do, and that second step is not counted.

The first start, `cold`, has an empty compile cache. Then `warm` starts, which use what it compiled, and starts of the
plain script alternate for `--rounds`, and medians are printed. The script imports the same modules, joins a process
group, builds the same network and optimizer, and makes one step (`overhead.BareLoop`). `ratio` is `warm` over the
script. With `--fork-server`, starts with `--warm`, from a fork server that has torch imported, alternate with them.
"""

import argparse
import json
import os
import statistics
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
from trimaran.machine import detect
from trimaran.runs import RunDirectory
from trimaran.runs.journal import parse_lines
from trimaran.runs.run_records import read_attempts

MAX_START_SECONDS = 560.0
LARGE = {
    "model": {"shape": {"layers": 12, "hidden": 768, "heads": 12, "kv_heads": 12, "ffn": 2048, "vocab": 32000}},
    "data": {"seq_len": 1024},
    "train": {"steps": 1000, "global_batch": 16},
    "plan": {"micro_batch": 16},
}
SMALL = {
    "model": {"shape": {"layers": 2}},
    "data": {"seq_len": 64},
    "train": {"steps": 1000, "global_batch": 4},
    "cluster": "1xcpu",
    "plan": {"micro_batch": 4},
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
from trimaran.train.process.rank_setup import join_process_group, read_rank_info
imported = time.time()
recipe = parse_recipe(Path(sys.argv[1]).read_text(), name="start")
rank_info = read_rank_info({})
join_process_group(rank_info)
plan = plan_of(recipe)
loop = BareLoop(recipe, plan, rank_info)
built = time.time()
tokens = torch.randint(256, (1, recipe.train.global_batch, recipe.data.seq_len))
loop.step(text_batch(0, tokens, tokens))
torch.cuda.synchronize() if rank_info.device.type == "cuda" else None
print(f"{imported - began} {built - imported} {time.time() - built} {time.time()}")
"""


def started(recipe: Path, options: list[str], folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of one start, by phase; `all` is from the command to the end of the first step."""
    command = [sys.executable, "-m", "trimaran", "train", str(recipe), "--run-dir", str(folder), "--quiet", *options]
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
    attempt, first = read_attempts(run).attempts[0].time, events["started"]["data"]
    ready = events["ready"]["data"]["phases"]
    return {
        "command": attempt - began,
        "import": events["start"]["time"] - ready["join"] - attempt,
        **ready,
        "first step": first["seconds"],
        "of it compile": first["compile"]["seconds"],
        "all": events["ready"]["time"] + first["seconds"] - began,
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


def measure(recipe: Recipe, path: Path, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the median seconds by phase of each kind of start, by its name."""
    overrides = [word for each in options.settings for word in ("--set", each)]
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        ours = os.environ | {"TRIMARAN_CACHE": f"{folder}/cache", "XDG_RUNTIME_DIR": folder}
        alone = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/bare"}
        prepare(recipe.data, cache=cache_folder(ours))

        def start(name: str, number: int, *more: str) -> None:
            taken = started(path, [*overrides, *more], Path(folder) / f"{name}-{number}", ours)
            found.setdefault(name, []).append(taken)

        start("warm" if options.no_cold else "cold", -1)
        bare(path, alone)  # fills its compile cache
        if options.fork_server:
            run_warm_command(ours, "warm", "--json")
        for number in range(options.rounds):
            start("warm", number)
            found.setdefault("script", []).append(bare(path, alone))
            if options.fork_server:
                start("warm fork server", number, "--warm")
        if options.fork_server:
            run_warm_command(ours, "warm", "--stop")
    if options.no_cold:
        found["warm"] = found["warm"][1:]  # the first one filled the caches
    return {name: medians(starts) for name, starts in found.items()}


def run_warm_command(environment: dict[str, str], *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "trimaran", *arguments], env=environment, check=True, timeout=60,
                   stdout=subprocess.DEVNULL)  # fmt: skip


def medians(starts: list[dict[str, float]]) -> dict[str, float]:
    return {phase: statistics.median(each[phase] for each in starts) for phase in starts[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path, nargs="?")
    parser.add_argument("--set", action="append", default=[], dest="settings")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fork-server", action="store_true", help="also with the warm fork server")
    parser.add_argument("--no-cold", action="store_true", help="leave the first start out of the result")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.recipe or Path(folder) / "start.yaml"
        if options.recipe is None:
            path.write_text(yaml.safe_dump(SMALL if detect().device.kind == "cpu" else LARGE))
        elif not path.is_file():
            parser.error(f"there is no recipe {path}")
        recipe = parse_recipe(path.read_text(), name=path.name, overrides=options.settings)
        found = measure(recipe, path, options)
    ratios = {name: found[name]["all"] / found["script"]["all"] for name in found if name not in ("script", "cold")}
    if options.json:
        seconds = {name: {key: round(each, 2) for key, each in phases.items()} for name, phases in found.items()}
        print(json.dumps({"seconds": seconds, "ratio": {name: round(each, 3) for name, each in ratios.items()}}))
        return
    for name, phases in found.items():
        print(f"{name:18}", ", ".join(f"{phase} {each:.1f}" for phase, each in phases.items()), "s")
    print(", ".join(f"{name}: {each:.2f} of the plain script" for name, each in ratios.items()))


if __name__ == "__main__":
    main()
