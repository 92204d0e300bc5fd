"""Two CPU ranks of unequal speed in one job: how much of the sum of their speeds equal and measured rows reach.

usage: python benchmarks/unequal.py [--rounds 3] [--steps 12] [--cores 0.6,0.3] [--preset tiny] [--json]

Each rank has a CPU quota, by a cgroup (version 1 or 2) that the script makes and removes: it needs the right to do so.
A round trains the same recipe four times: on each rank alone, both at the same time, then on both together with equal
rows, and with `plan.micro_batches: measured`. A speed is the tokens of all steps after the first few over their
seconds. The script prints each round and the median ratio to the sum of the speeds alone. The quotas should add up to
less than the machine's free cores, so that other processes do not disturb the result; the load average is printed with
each round.
"""

import argparse
import json
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from trimaran.core import Mesh, Plan, Recipe
from trimaran.data import cache_folder
from trimaran.runs import RunDirectory, create_run
from trimaran.train.process.rank_setup import read_rank_info
from trimaran.train.worker import run_worker

PERIOD_US = 50_000  # of a quota; much shorter than a step
WARM_STEPS = 3
MICRO_BATCH, GRAD_ACCUM = 6, 4  # of two ranks
CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def cpu_quota(name: str, cores: float) -> Iterator[Path]:
    """Make a cgroup whose processes get so many cores, and yield the file that takes their ids.

    Its weight is the highest, so that the quota limits it and not the other processes of the machine.
    """
    is_v2 = (CGROUPS / "cgroup.controllers").exists()
    folder = (CGROUPS if is_v2 else CGROUPS / "cpu") / f"trimaran-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        quota = int(cores * PERIOD_US)
        if is_v2:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            (folder / "cpu.weight").write_text("10000")
        else:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cpu.shares").write_text("262144")
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def recipe_for(preset: str, steps: int) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": preset},
            "data": {"source": "python-stdlib", "seq_len": 256},
            "train": {"steps": steps, "global_batch": 2 * MICRO_BATCH * GRAD_ACCUM, "sample": {"tokens": 0}},
            "checkpoint": {"every": 0},
        }
    )


def plan_for(ranks: int, **fields: Any) -> Plan:
    return Plan(mesh=Mesh(dp_replicate=ranks), micro_batch=2 * MICRO_BATCH // ranks, grad_accum=GRAD_ACCUM, **fields)


def train(recipe: Recipe, plan: Plan, path: Path, quotas: Sequence[Path]) -> RunDirectory:
    """Train with one rank in each of the cgroups and return the run."""
    run, port = create_run(path, recipe, plan), free_port()
    context = multiprocessing.get_context("fork")
    arguments = [(rank, len(quotas), port, run.path, quota) for rank, quota in enumerate(quotas)]
    processes = [context.Process(target=train_rank, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * len(codes), f"the ranks of {path} ended with {codes}"
    return run


def train_rank(rank: int, world_size: int, port: int, path: Path, quota: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quota.write_text(str(os.getpid()))
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
    )
    code = run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache_folder(os.environ))
    os._exit(code)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def speed_of(run: RunDirectory) -> float:
    """Return the tokens per second of the steps after the first few."""
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()][WARM_STEPS:]
    return sum(line["tokens"] for line in lines) / sum(line["step_seconds"] for line in lines)


def rows_of(run: RunDirectory) -> list[int]:
    events = (json.loads(line) for line in run.events(0).read_text().splitlines())
    return next(each["data"]["micro_batches"] for each in events if each["kind"] == "rows")


def measure_round(recipe: Recipe, folder: Path, fast: Path, slow: Path) -> dict[str, Any]:
    """Return the speeds of one round, in tokens per second, and their ratios to the sum of both ranks alone."""
    with ThreadPoolExecutor(2) as both_alone:  # at the same time, so that both have the same disturbances
        jobs = [both_alone.submit(train, recipe, plan_for(1), folder / name, [quota]) for name, quota in
                (("fast", fast), ("slow", slow))]  # fmt: skip
    alone = [speed_of(job.result()) for job in jobs]
    equal = speed_of(train(recipe, plan_for(2), folder / "equal", [fast, slow]))
    run = train(recipe, plan_for(2, micro_batches="measured"), folder / "measured", [fast, slow])
    measured, both = speed_of(run), sum(alone)
    return {
        "fast": alone[0],
        "slow": alone[1],
        "sum": both,
        "equal": equal,
        "measured": measured,
        "rows": rows_of(run),
        "equal_ratio": equal / both,
        "measured_ratio": measured / both,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--cores", default="0.6,0.3", help="of the fast rank and of the slow one")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    fast, slow = (float(each) for each in options.cores.split(","))
    recipe = recipe_for(options.preset, options.steps)
    rounds = []
    for number in range(options.rounds):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            quotas = [stack.enter_context(cpu_quota(name, cores)) for name, cores in (("fast", fast), ("slow", slow))]
            rounds.append(measure_round(recipe, folder, *quotas))
        if not options.json:
            each = rounds[-1]
            alone = f"alone {each['fast']:,.0f} + {each['slow']:,.0f} tokens/s"
            print(f"round {number + 1}: {alone}; equal rows {each['equal']:,.0f} ({each['equal_ratio']:.2f}); measured "
                  f"rows {each['rows']}: {each['measured']:,.0f} ({each['measured_ratio']:.2f}); "
                  f"load {each['load']:.1f}", flush=True)  # fmt: skip
    medians = {name: statistics.median(each[name] for each in rounds) for name in ("equal_ratio", "measured_ratio")}
    if options.json:
        print(json.dumps({"cores": [fast, slow], "rounds": rounds, **medians}))
    else:
        print(f"median of the sum of speeds: equal rows {medians['equal_ratio']:.3f}, measured rows "
              f"{medians['measured_ratio']:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
