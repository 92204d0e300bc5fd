"""The lines that ranks, a supervisor and a sidecar write, with all their optional keys, for tests of sinks."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.runs import new_run, step_metrics
from trimaran.runs import Line, RunDirectory, Sink, append_line

GIB = 1 << 30


def spread_of(low: float, median: float, high: float) -> dict[str, float]:
    return {"min": low, "median": median, "max": high, "at": 3}


def step_line(step: int, when: float, *, slowest: float = 1.0) -> Line:
    """Return a line of `metrics.jsonl` with all keys; `slowest` is how many times longer rank 3 works."""
    line = step_metrics(step, loss=5.0 / step).as_dict() | {"time": when, "hfu": 0.25, "loss_scale": 1024.0}
    line["memory"] = {"allocated": GIB, "reserved": 2 * GIB, "fragmentation": 0.1, "retries": 0, "ooms": 0}
    line["memory"]["total"] = 4 * GIB
    line["waits"] = {"data": 0.01, "comm": 0.02, "straggler": 0.03}
    line["host_seconds"] = 0.04
    line["losses"], line["lrs"] = {"code": 1.0, "text": 2.0}, {"vision": 1e-4}
    line["groups"] = {"layers.0": {"grad_norm": 0.5, "update_ratio": 0.001}}
    busy = spread_of(0.9, 1.0, slowest)
    outlier = {"rank": 3, "what": "busy_seconds", "value": slowest, "median": 1.0}
    line["ranks"] = {"busy_seconds": busy, "outliers": [outlier], "step": step - 1}
    for name in ("data_seconds", "wait_seconds", "peak_bytes", "tokens"):
        line["ranks"][name] = spread_of(1.0, 2.0, 3.0)
    return line


def event_line(kind: str, when: float, *, rank: int = 0, attempt: int = 0, step: int = 0, **data: Any) -> Line:
    return {"kind": kind, "rank": rank, "time": when, "step": step, "attempt": attempt, "data": data}


def incident_line(number: int, when: float, **known: Any) -> Line:
    line = {"id": f"i-{number:04d}", "cause": "crash", "time": when, "what": "rank 1 was killed by SIGKILL"}
    return line | {"attempt": 0, "step": 5, "suspects": [1], "victims": [], "action": None} | known


def gpu_line(index: int, *, node: int = 0, **known: Any) -> Line:
    """Return one GPU of a sample."""
    line = {"index": index, "uuid": f"GPU-{node}-{index}", "name": "H200", "utilisation": 0.9, "memory_used": 90 * GIB}
    line |= {"memory": 139 * GIB, "power": 600.0, "power_limit": 700.0, "temperature": 60.0, "sm_clock": 1.7e9}
    return line | {"sm_clock_max": 1.98e9, "throttle": [], "ecc_uncorrected": 0, "pids": []} | known


def sample_line(when: float, *, node: int = 0, ranks: int = 4, gpus: int = 2, **known: Any) -> Line:
    line: Line = {"time": when, "node": node, "host": "vm", "cpu": 0.5, "cores": 8, "load": 4.0, "ram_used": 8 * GIB}
    line |= {"ram": 64 * GIB, "swap_used": 0, "disk_free": 500 * GIB, "disk_read": 1e6, "disk_written": 2e6}
    line |= {"net_received": 3e6, "net_sent": 4e6}
    rank = {"cpu": 1.0, "ram": GIB, "threads": 9, "loader_cpu": 0.5}
    line["ranks"] = {str(node * ranks + each): rank for each in range(ranks)}
    return line | {"gpus": [gpu_line(each, node=node) for each in range(gpus)]} | known


def recorded(path: Path, *, is_healthy: bool, now: float | None = None) -> tuple[RunDirectory, list[tuple[str, Line]]]:
    """Return a run of an hour or more and its lines; with many incidents unless `is_healthy`."""
    now = time.time() if now is None else now
    run, lines = new_run(path, world_size=4, steps=100), list(_lines(now, is_healthy=is_healthy))
    append_line(run.attempts, {"attempt": 0, "time": lines[0][1]["time"], "world_size": 4, "host": "vm", "pid": 1})
    for kind, line in lines:
        if kind == "step":
            append_line(run.metrics, line)
        elif kind == "event":
            append_line(run.events(line["rank"]), line)
    return run, lines


def _lines(now: float, *, is_healthy: bool) -> Iterator[tuple[str, Line]]:
    seconds = 40.0 if is_healthy else 20.0
    end = now if is_healthy else now - 1000
    began = end - 98 * seconds - (20 if is_healthy else 2000)
    yield "event", event_line("start", began, world_size=4, version="0.1.0", device="cpu", host="vm", pid=1)
    yield "event", event_line("ready", began + 10, seconds=10.0)
    for step in range(1, 99):
        line = step_line(step, end - (98 - step) * seconds, slowest=1.05 if is_healthy else 2.0)
        phases = {"data": 0.0, "forward": 0.3, "backward": 0.6, "comm": 0.05, "optimizer": 0.05, "checkpoint": 0.0}
        line |= {"step_seconds": seconds, "phases": {name: share * seconds for name, share in phases.items()}}
        yield "step", line
    for kind, number in (("checkpoint", 10), ("checkpoint", 5)):
        data = {"seconds": 2.0, "stall_seconds": 0.1, "bytes": GIB, "path": "checkpoints/step-00000010"}
        yield "event", event_line(kind, end - number * 10, **data)
    yield "event", event_line("recompile", now - 3000, what="block", why="shape")
    throttle = ["power_cap"] if is_healthy else ["thermal"]  # a GPU at full load is at its power limit
    gpus = [gpu_line(each, throttle=throttle) for each in range(2)]
    yield "sample", sample_line(now, gpus=2, disk_free=(500 if is_healthy else 2) * GIB) | {"gpus": gpus}


def incidents(now: float) -> Iterator[tuple[str, Line]]:
    """Yield the events and incidents of an unhealthy run while it is scraped."""
    skip = {"reason": "the loss is nan", "loss": None, "grad_norm": None, "ranks": [1], "sample_ids": []}
    yield "event", event_line("skip", now, step=99, **skip)
    yield "event", event_line("bad_sample", now, step=99, sample=7, reason="not an image")
    for number in (1, 2, 3):
        yield "incident", incident_line(number, now)
        yield "incident", incident_line(number, now, action="restarted")


def feed(sink: Sink, lines: list[tuple[str, Line]]) -> None:
    for kind, line in lines:
        getattr(sink, kind)(line)
