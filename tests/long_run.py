"""Writes the files of a long run in seconds, in the form that the ranks, the supervisor and the sidecar write them.

usage: python -m tests.long_run FOLDER [STEPS]
"""

import json
import sys
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.runs import PREDICTION
from trimaran.core import PHASES, Mesh, Plan, StepMetrics, parse_recipe
from trimaran.runs import RunDirectory, StepIndexer, create_run
from trimaran.train import MEASURES, SlowDetails, rank_measures, summarise_ranks, wait_phases

BEGIN, STEP_SECONDS, RESTART_SECONDS, READY_SECONDS = 1.75e9, 0.25, 20.0, 5.0
WORLD_SIZE = 8
GIB = 1 << 30
NUM_TEMPLATES = 512  # different lines, which repeat with other steps, losses and times
CHECKPOINT_STEPS = 500
SAMPLE_SECONDS = 10.0


def write_long_run(path: Path, *, steps: int, attempts: int = 20, is_indexed: bool = True) -> RunDirectory:
    """Return a finished run of `steps` steps, restarted `attempts - 1` times after a rank was killed."""
    recipe = parse_recipe("name: long", name="test", overrides=[f"train.steps={steps}"])
    run = create_run(path, recipe, Plan(mesh=Mesh(dp_shard=WORLD_SIZE), micro_batch=2, prediction=PREDICTION))
    write_steps(run, range(1, steps + 1), attempt_steps=max(1, steps // attempts))
    if is_indexed:
        indexer = StepIndexer(run.metrics, run.metrics_index)
        while indexer.extend():
            pass
    _write_supervision(run, steps, attempts)
    _write_samples(run, steps)
    return run


def write_steps(run: RunDirectory, steps: range, *, attempt_steps: int) -> None:
    """Append the lines of `steps`."""
    templates = _templates()
    with run.metrics.open("a", encoding="ascii") as file:
        for begin in range(steps.start, steps.stop, 10_000):
            lines = []
            for step in range(begin, min(begin + 10_000, steps.stop)):
                after_step, after_loss, after_time = templates[step % NUM_TEMPLATES]
                at = _time_of(step, attempt_steps)
                lines.append(
                    f'{{"step":{step}{after_step}{10 / (9 + step) ** 0.3:.16g}{after_loss}{at:.6f}{after_time}'
                )
            file.writelines(lines)


def _time_of(step: int, attempt_steps: int) -> float:
    return BEGIN + READY_SECONDS + step * STEP_SECONDS + (step - 1) // attempt_steps * RESTART_SECONDS


@cache
def _templates() -> list[tuple[str, str, str]]:
    """Return the parts of lines before the loss, the time and the end, as a GPU run of some days writes them."""
    random, slow_details, found = Random(0), SlowDetails(), []
    for step in range(1, 2 * NUM_TEMPLATES):
        line = _json(_metrics(step, random, slow_details).as_dict())
        if step >= NUM_TEMPLATES:  # after the first steps, whose lines are longer
            _, rest = line.split(f'"step":{step}', 1)
            after_step, rest = rest.split("1.2345678", 1)
            after_loss, after_time = rest.split("1750000000.0", 1)
            found.append((after_step, after_loss, after_time))
    return found


def _metrics(step: int, random: Random, slow_details: SlowDetails) -> StepMetrics:
    seconds = {name: random.uniform(0.9, 1.1) * STEP_SECONDS / 6 for name in PHASES}
    phases = {name: round(each, 6) for name, each in seconds.items()}
    peaks = [random.randint(70 * GIB, 72 * GIB) for _ in range(WORLD_SIZE)]
    rows = [rank_measures({name: each * random.uniform(0.9, 1.1) for name, each in phases.items()},
                          peak=peak, tokens=131072) for peak in peaks]  # fmt: skip
    ranks = {"step": step - 1} | summarise_ranks([[row[name] for name in MEASURES] for row in rows], WORLD_SIZE)
    memory = {"allocated": 65 * GIB + step, "reserved": 75 * GIB, "fragmentation": random.random() / 7, "retries": 0,
              "ooms": 0, "total": 140 * GIB}  # fmt: skip
    details = {"memory": memory, "waits": wait_phases(phases, ranks.pop("late_seconds")), "hfu": random.random(),
               "ranks": ranks, "host_seconds": random.uniform(0.01, 0.1)}  # fmt: skip
    if step % 10 == 1:
        names = ["embed_tokens", *(f"layers.{each}" for each in range(32)), "norm", "lm_head"]
        details["groups"] = {name: {"grad_norm": random.random(), "update_ratio": random.random() / 100}
                             for name in names}  # fmt: skip
    return StepMetrics(step=step, loss=1.2345678, grad_norm=random.random(), lr=random.random() / 1000, tokens=1048576,
                       samples=256, step_seconds=sum(phases.values()), mfu=random.random(), peak_bytes=peaks[0],
                       phases=phases, time=1750000000.0,
                       details=slow_details.select(step, details))  # fmt: skip


def _write_supervision(run: RunDirectory, steps: int, attempts: int) -> None:
    """Write attempts, incidents and the events of the ranks."""
    attempt_lines: list[dict[str, Any]] = []
    incidents: list[dict[str, Any]] = []
    events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(WORLD_SIZE)}
    attempt_steps, end = max(1, steps // attempts), BEGIN
    for number in range(attempts):
        start, last = number * attempt_steps, steps if number == attempts - 1 else (number + 1) * attempt_steps
        begin = _time_of(start + 1, attempt_steps) - STEP_SECONDS - READY_SECONDS
        end = _time_of(last, attempt_steps) + 1.0
        how = "done" if number == attempts - 1 else "trouble"
        attempt_lines.append({"attempt": number, "time": begin, "world_size": WORLD_SIZE, "host": "gone", "pid": 1})
        attempt_lines.append({"attempt": number, "ended": end, "how": how, "step": last})
        for rank in range(WORLD_SIZE):
            common = {"rank": rank, "attempt": number}
            host = {"world_size": WORLD_SIZE, "version": "0.1.0", "host": "gone", "pid": 2 + rank, "device": "cuda:0"}
            events[rank] += [
                {"kind": "start", "time": begin + 1, "step": 0, "data": host} | common,
                {"kind": "ready", "time": begin + READY_SECONDS, "step": start, "data": {"seconds": 1.0}} | common,
                {"kind": "started", "time": begin + READY_SECONDS + STEP_SECONDS, "step": start + 1,
                 "data": {"seconds": 1.0, "phases": {}, "compile": {"seconds": 0.0}}} | common,
            ]  # fmt: skip
        for step in range(start + CHECKPOINT_STEPS, last + 1, CHECKPOINT_STEPS):
            data = {"path": f"{run.checkpoints}/step-{step:08d}", "seconds": 30.0, "stall_seconds": 0.1,
                    "bytes": 10**10, "written_bytes": 10**10, "saved_bytes": 0, "skipped": 0}  # fmt: skip
            events[0].append({"kind": "checkpoint", "rank": 0, "time": _time_of(step, attempt_steps), "step": step,
                              "attempt": number, "data": data})  # fmt: skip
        if how == "trouble":
            incidents.append({"id": f"i-{number + 1:04d}", "cause": "process", "time": end, "step": last,
                              "what": "rank 1 was killed by signal 9", "attempt": number, "suspects": [1],
                              "action": "restarted", "evidence": {"facts": ["exit by signal 9"]}})  # fmt: skip
    attempt_lines.append({"over": 0, "why": "all steps are done", "time": end})
    _write(run.attempts, attempt_lines)
    _write(run.incidents, incidents)
    for rank, lines in events.items():
        _write(run.events(rank), lines)


def _write_samples(run: RunDirectory, steps: int) -> None:
    gpu = {"index": 0, "uuid": "GPU-0123", "utilisation": 0.97, "memory_used": 76 * GIB, "memory": 140 * GIB,
           "power": 650.0, "temperature": 61, "sm_clock": 1755, "sm_clock_max": 1980, "throttle": []}  # fmt: skip
    sample = {"node": 0, "host": "gone", "cores": 128, "load": 12.5, "ram": 2**40, "ram_used": 2**38, "swap_used": 0,
              "disk_free": 2**42, "cpu": 0.12, "net_received": 10**6, "net_sent": 10**6, "ranks": {},
              "gpus": [gpu | {"index": index} for index in range(WORLD_SIZE)]}  # fmt: skip
    rest = _json(sample).removeprefix("{")
    count = int(steps * STEP_SECONDS / SAMPLE_SECONDS)
    lines = (f'{{"time":{BEGIN + index * SAMPLE_SECONDS:.3f},{rest}' for index in range(count))
    run.samples(0).parent.mkdir(exist_ok=True)
    with run.samples(0).open("w", encoding="ascii") as file:
        file.writelines(lines)


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(map(_json, lines)), encoding="ascii")


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    write_long_run(Path(sys.argv[1]), steps=int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
