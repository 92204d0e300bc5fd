"""One peer in its own process: `python -m benchmarks.peers.child WORK.json TURN BEGAN`.

It imports, waits for the lock file TURN, trains, prints one line of JSON and exits. The exit releases the lock, so the
next process starts when the device memory is free.
"""

import fcntl
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from benchmarks.peers.work import Work

MODULES = {
    "torchtitan": "titan",
    "hf_trainer": "hf_trainer",
    "lightning": "pl_trainer",
    "loop": "loop",
    "trimaran": "ours",
}
MAX_CLOCK_DIFFERENCE = 0.02  # relative, between device and host; a larger one is noted in the result


def measure(work: Work, turn: IO[str], began: float) -> dict[str, Any]:
    """Return the line of this peer. `began` is when the process was started; waiting for the lock does not count."""
    module = importlib.import_module(f"benchmarks.peers.{MODULES[work.peer.partition('+')[0]]}")
    train = module.ready(work)
    import torch  # noqa: PLC0415 - our peer sets environment variables first
    from benchmarks.peers.timer import Timer  # noqa: PLC0415

    waiting = time.time()
    fcntl.flock(turn, fcntl.LOCK_EX)
    waited = time.time() - waiting
    timer = Timer(work)
    on_gpu = torch.cuda.is_available()
    result = train(timer)
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
    line["seconds"] = [round(each, 5) for each in line["seconds"]]
    line["wall_seconds"] = round(line["wall_seconds"], 4)
    line["start_seconds"] = round(line.pop("first_step_time") - began - waited, 1)
    line["tokens_per_step"] = work.tokens_per_step
    line["window"] = work.steps
    line["torch"] = torch.__version__
    line["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
    return line


def main() -> None:
    work = Work.read(json.loads(Path(sys.argv[1]).read_text()))
    with Path(sys.argv[2]).open("w") as turn:
        print(json.dumps(measure(work, turn, float(sys.argv[3]))), flush=True)
        os._exit(0)  # nothing may release the lock before the device memory is free


if __name__ == "__main__":
    main()
