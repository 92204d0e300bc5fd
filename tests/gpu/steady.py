"""Trains some steps of several plans and reports synchronisations of the host after the warm-up.

`python -m tests.gpu.steady FOLDER` prints one JSON object: for each plan the synchronisations in the profile, the error
of torch's sync debug mode, and the number of late compilations. On a CPU there are none.
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
from trimaran.data import Loader, StepBatch
from trimaran.runs import Journal, create_run
from trimaran.train import (
    Checkpointer,
    RankInfo,
    SupervisorLink,
    build_worker_parts,
    join_process_group,
    read_context,
    read_rank_info,
)

WARM_STEPS, PROFILED_STEPS = 12, 8  # after the warm-up the copy interval is fixed and everything is compiled
MARK = "a step begins"
# Waiting for an event of an earlier step is allowed: otherwise the host would run ahead without bound.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMemcpy", "cuStreamSynchronize", "cuCtxSynchronize")
MAX_INLINE_COPY_BYTES = 1 << 16  # a smaller copy from pageable memory is part of the command and does not block
TRAIN = {"steps": WARM_STEPS + PROFILED_STEPS + 2, "global_batch": 8, "save": False, "sample": {"tokens": 0}}
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


class ProfiledLoader:
    """A loader that profiles the host between the batches after the warm-up."""

    def __init__(self, loader: Loader, trace: Path) -> None:
        self._loader, self._trace = loader, trace
        on_gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_gpu])
        self._watching = False

    def __iter__(self) -> Iterator[StepBatch]:
        for number, batch in enumerate(self._loader):
            if number == WARM_STEPS:
                self._profile.start()
                self._watching = True
                set_sync_debug_mode("error")
            if number >= WARM_STEPS:
                with record_function(MARK):
                    pass
            if number == WARM_STEPS + PROFILED_STEPS:
                set_sync_debug_mode("default")
                self.end()
                self._profile.export_chrome_trace(str(self._trace))
            yield batch

    def end(self) -> None:
        """Stop the profile. May be called twice."""
        if self._watching:
            self._watching = False
            self._profile.stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def set_sync_debug_mode(mode: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)


def count_waits(trace: Path) -> dict[str, int]:
    """Return the number of synchronising calls of the host, by name, between the first and the last mark."""
    events = json.loads(trace.read_text())["traceEvents"]
    marks = [each["ts"] for each in events if each.get("name") == MARK and each.get("ph") == "X"]
    assert len(marks) >= PROFILED_STEPS, "the trace has no marks"
    inside = [each for each in events if "ts" in each and min(marks) <= each["ts"] < max(marks)]
    found = Counter(each["name"] for each in inside if each.get("name") in WAITS)
    for each in inside:
        name, size = str(each.get("name")), each.get("args", {}).get("bytes", 0)
        if name.startswith("Memcpy") and "Pageable" in name and size > MAX_INLINE_COPY_BYTES:
            found[f"{name}, {size} bytes"] += 1
    return dict(found)


def profile_plan(name: str, folder: Path, rank_info: RankInfo, cache: Path) -> dict[str, Any]:
    """Return the synchronisations, the error and the meters of one plan."""
    settings = PLANS[name]
    train = TRAIN | {
        "optimizer": {"states": settings.get("states", "fp32")},
        "clip_norm": settings.get("clip_norm", 1.0),
    }
    model = {"preset": settings.get("preset", "tiny")}
    # Some of the profiled steps also measure groups of modules.
    rest = {"checkpoint": {"memory": 1}, "telemetry": {"details_every": 4}}
    tree = {"model": model, "data": settings.get("data", {}), "train": train} | rest
    recipe = Recipe.model_validate(tree)
    run = create_run(folder / name.replace(" ", "-"), recipe, Plan.model_validate(settings["plan"]))
    trace, rank_memory = run.path / "trace.json", os.memfd_create("rank-memory")
    with Journal(run, 0) as journal:
        # With a rank memory, as under a supervisor: a copy of the state goes to memory after every step.
        link = SupervisorLink(rank_memories=(rank_memory,))
        parts = build_worker_parts(read_context(run, rank_info, journal, cache=cache, link=link))
        refused = ""
        with parts.trainer.loader_from(0) as loader:
            profiled_loader = ProfiledLoader(loader, trace)
            parts.trainer.loader_from = lambda _: nullcontext(profiled_loader)  # pyrefly: ignore[bad-assignment]
            try:
                checkpointer = Checkpointer.resume(parts.checkpoint)
                parts.trainer.train(checkpointer, checkpointer.start)
            except RuntimeError:
                refused = traceback.format_exc()[-3000:]
            finally:
                set_sync_debug_mode("default")
                profiled_loader.end()  # a second profile while one is running would crash the process
    os.close(rank_memory)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    waits = {} if refused else count_waits(trace)
    measured = {key: [line[key] for line in lines if key in line] for key in ("memory", "groups")}
    return {"waits": waits, "refused": refused, "steps": len(lines), "late": lines[-1].get("recompiles", 0)} | measured


def main() -> None:
    folder = Path(sys.argv[1])
    rank_info = read_rank_info({})
    join_process_group(rank_info)
    names = sys.argv[2:] or PLANS
    print(json.dumps({name: profile_plan(name, folder, rank_info, folder / "cache") for name in names}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
