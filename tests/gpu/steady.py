"""Trains some steps of several plans and tells what the host waited for in those after the warm-up.

`python -m tests.gpu.steady FOLDER` prints one JSON object: for each plan what the profiler saw the host wait for,
what torch refused because it would have waited, and how much was compiled late. On a CPU there is nothing to wait for.
"""

import json
import os
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from trimaran.core import Plan, Recipe
from trimaran.data.loader import Loader
from trimaran.data.step_batch import StepBatch
from trimaran.run import Journal, create_run
from trimaran.train.build import build_worker_parts
from trimaran.train.process.rank_info import RankInfo, join, read_rank_info
from trimaran.train.process.supervisor_link import SupervisorLink

WARM, WATCHED = 12, 8  # steps; by the end of the warm-up the pace of copies is known and everything is compiled
MARK = "a step begins"
# The event of an earlier step is what the host may wait for, or it would run ahead without bound.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")
SMALL = 1 << 16  # bytes up to which a copy from pageable memory travels with its command, and nobody waits for it
TRAIN = {"steps": WARM + WATCHED + 2, "global_batch": 8, "save": False, "sample": {"tokens": 0}}
PLANS: dict[str, dict[str, Any]] = {
    "compiled": {"plan": {"micro_batch": 8, "precision": "bf16", "compile": True}},
    "documents": {
        "plan": {"micro_batch": 8, "precision": "bf16", "compile": True},
        "data": {"isolate_documents": True, "seq_len": 1024},
    },
    "logits": {"plan": {"micro_batch": 8, "precision": "bf16", "loss": "logits"}},
    "accumulated": {"plan": {"micro_batch": 4, "grad_accum": 2, "precision": "bf16", "loss": "fused"}},
    "chunked": {"plan": {"micro_batch": 8, "precision": "bf16", "loss": "chunked", "recompute": "selective"}},
    "sharded": {"plan": {"micro_batch": 8, "precision": "bf16", "sharding": "parameters"}},
    "states of 16 bits": {"plan": {"micro_batch": 8, "precision": "bf16"}, "states": "bf16"},
    "states of 8 bits": {"plan": {"micro_batch": 8, "precision": "bf16"}, "states": "8bit"},
    "unclipped": {"plan": {"micro_batch": 8, "precision": "bf16"}, "clip_norm": 0.0},
    "experts": {"plan": {"micro_batch": 8, "precision": "bf16"}, "preset": "tiny-moe"},
}


class Watched:
    """A loader that watches what the host does between the batches after the warm-up."""

    def __init__(self, loader: Loader, trace: Path) -> None:
        self._loader, self._trace = loader, trace
        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._watching = False

    def __iter__(self) -> Iterator[StepBatch]:
        for number, batch in enumerate(self._loader):
            if number == WARM:
                self._profile.start()
                self._watching = True
                refuse_to_wait("error")
            if number >= WARM:
                with record_function(MARK):
                    pass
            if number == WARM + WATCHED:
                refuse_to_wait("default")
                self.end()
                self._profile.export_chrome_trace(str(self._trace))
            yield batch

    def end(self) -> None:
        """Watch no longer. It may be said twice."""
        if self._watching:
            self._watching = False
            self._profile.stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def refuse_to_wait(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def waits_in(trace: Path) -> dict[str, int]:
    """Return how often the host did what makes it wait, by name, between the first mark and the last."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [each["ts"] for each in events if each.get("name") == MARK and each.get("ph") == "X"]
    assert len(marks) >= WATCHED, "the trace has no marks"
    inside = [each for each in events if "ts" in each and min(marks) <= each["ts"] < max(marks)]
    found = Counter(each["name"] for each in inside if each.get("name") in WAITS)
    for each in inside:
        name, size = str(each.get("name")), each.get("args", {}).get("bytes", 0)
        if name.startswith("Memcpy") and "Pageable" in name and size > SMALL:
            found[f"{name}, {size} bytes"] += 1
    return dict(found)


def watch(name: str, folder: Path, place: RankInfo, cache: Path) -> dict[str, Any]:
    """Return what was seen of one plan."""
    told = PLANS[name]
    train = TRAIN | {"optimizer": {"states": told.get("states", "fp32")}, "clip_norm": told.get("clip_norm", 1.0)}
    model = {"preset": told.get("preset", "tiny")}
    # Some of the watched steps measure groups of modules, too.
    rest = {"checkpoint": {"memory": 1}, "telemetry": {"details_every": 4}}
    tree = {"model": model, "data": told.get("data", {}), "train": train} | rest
    recipe = Recipe.model_validate(tree)
    run = create_run(folder / name.replace(" ", "-"), recipe, Plan.model_validate(told["plan"]))
    trace, rank_memory = run.path / "trace.json", os.memfd_create("berth")
    with Journal(run, 0) as journal:
        # With a rank memory, as under a supervisor: a copy of the state goes to memory after every step.
        agent = build_worker_parts(run, place, journal, cache=cache, link=SupervisorLink(rank_memories=(rank_memory,)))
        refused = ""
        with agent.trainer.loader_from(0) as loader:
            watched = Watched(loader, trace)
            agent.trainer.loader_from = lambda _: nullcontext(watched)
            try:
                agent.trainer.train(agent.trainer.checkpointer.resume())
            except RuntimeError:
                refused = traceback.format_exc()[-3000:]
            finally:
                refuse_to_wait("default")
                watched.end()  # a second profile beside one that still runs would take the process down
    os.close(rank_memory)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    waits = {} if refused else waits_in(trace)
    measured = {key: [line[key] for line in lines if key in line] for key in ("memory", "groups")}
    return {"waits": waits, "refused": refused, "steps": len(lines), "late": lines[-1].get("recompiles", 0)} | measured


def main() -> None:
    folder = Path(sys.argv[1])
    place = read_rank_info({})
    join(place)
    names = sys.argv[2:] or PLANS
    print(json.dumps({name: watch(name, folder, place, folder / "cache") for name in names}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
