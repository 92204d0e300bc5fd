"""One peer in its own process.

    python -m benchmarks.peers.child WORK.json TURN BEGAN      waits for the lock file TURN, then trains
    python -m benchmarks.peers.child WORK.json                 alternates with its peers, see `alternate.py`

It prints one line of JSON and exits. The exit releases the lock, so the next process starts when the device memory is
free. With several ranks this process is rank 0 and starts the others.
"""

import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NoReturn

from benchmarks.peers.gate import Gate
from benchmarks.peers.work import Work

MODULES = {
    "torchtitan": "titan",
    "hf_trainer": "hf_trainer",
    "hf_loop": "hf_loop",
    "lightning": "pl_trainer",
    "loop": "loop",
    "loop+plain": "plain_loop",
    "loop+eager": "plain_loop",
    "trimaran": "ours",
    "trimaran+run": "our_command",
}
STARTS_RANKS = ("trimaran+run",)  # peers that start all their ranks themselves
MAX_CLOCK_DIFFERENCE = 0.02  # relative, between device and host; a larger one is noted in the result


def prepare(work: Work) -> Callable[[Any], dict[str, Any]]:
    """Import the peer's libraries and return its training function."""
    name = MODULES.get(work.peer) or MODULES[work.peer.partition("+")[0]]
    if name == "titan" and not version("torchtitan").startswith("0.2"):
        name = "titan3"
    return importlib.import_module(f"benchmarks.peers.{name}").ready(work)


def measure(work: Work, turn: IO[str], began: float) -> dict[str, Any]:
    """Return the line of this peer. `began` is when the process was started; waiting for the lock does not count."""
    train = prepare(work)
    from benchmarks.peers.timer import Timer  # noqa: PLC0415 - our peer sets environment variables before torch

    waiting = time.time()
    fcntl.flock(turn, fcntl.LOCK_EX)
    waited = time.time() - waiting
    timer = Timer(work)
    return line_of(work, timer, train(timer), began + waited)


def alternate(work: Work, gate: Gate) -> dict[str, Any]:
    """Return the line of this peer, whose windows alternate with those of others."""
    began, train = time.time(), prepare(work)
    from benchmarks.peers.timer import TurnTimer  # noqa: PLC0415 - our peer sets environment variables before torch

    imported = time.time()
    gate.wait("imported")
    timer = TurnTimer(work, gate)
    began += time.time() - imported
    result = train(timer)
    return line_of(work, timer, {"cpu_seconds": timer.cpu_seconds} | result, began)


def line_of(work: Work, timer: Any, result: dict[str, Any], began: float) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    on_gpu = torch.cuda.is_available()
    line: dict[str, Any] = {"contest": work.contest, "peer": work.peer, "model": work.shape}
    line |= {"seconds": timer.seconds, "wall_seconds": timer.wall_seconds, "first_step_time": timer.first_step_time}
    line |= {
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "reserved_bytes": torch.cuda.max_memory_reserved() if on_gpu else 0,
        "note": "",
    }
    line |= result
    if abs(line["wall_seconds"] / sum(line["seconds"]) - 1) > MAX_CLOCK_DIFFERENCE:
        line["note"] += f" the host measured {line['wall_seconds'] / sum(line['seconds']):.3f} of the device's time"
    line["seconds"] = [round(each, 6) for each in line["seconds"]]
    line["wall_seconds"] = round(line["wall_seconds"], 4)
    line["start_seconds"] = round(line.pop("first_step_time") - began, 1)
    line["tokens_per_step"] = work.tokens_per_step
    line["window"] = work.steps
    line["torch"] = torch.__version__
    line["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
    line["time"] = round(time.time())
    return line


def start_other_ranks(work: Work, file: str) -> list[subprocess.Popen[bytes]]:
    """Make this process rank 0, and start the others, which follow it in lockstep."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    size = str(work.ranks)
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"TORCHELASTIC_RUN_ID": "throughput", "GROUP_RANK": "0"}  # Lightning looks for the former
    os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.child", file],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        for rank in range(1, work.ranks)
    ]


def follow(work: Work) -> NoReturn:
    """Train as a rank above 0, and end with rank 0."""
    threading.Thread(target=_end_with_parent, args=[os.getppid()], daemon=True).start()
    train = prepare(work)
    from benchmarks.peers.timer import Timer  # noqa: PLC0415 - our peer sets environment variables before torch

    train(Timer(work))
    os._exit(0)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    work = Work.read(json.loads(Path(sys.argv[1]).read_text()))
    if int(os.environ.get("RANK", 0)) > 0:
        follow(work)
    others = start_other_ranks(work, sys.argv[1]) if work.ranks > 1 and work.peer not in STARTS_RANKS else []
    if len(sys.argv) > 2:
        with Path(sys.argv[2]).open("w") as turn:
            print(json.dumps(measure(work, turn, float(sys.argv[3]))), flush=True)
            os._exit(0)  # nothing may release the lock before the device memory is free
    gate = Gate()
    gate.report("done", line=alternate(work, gate))
    for other in others:
        other.wait()
    os._exit(0)


if __name__ == "__main__":
    main()
