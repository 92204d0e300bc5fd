"""Copies of the state that overlap with training on a GPU: complete, of the right step, and found after a kill."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trimaran.checkpoint.copier import Copier, DeviceCopier
from trimaran.checkpoint.memory_copies import CopyMetadata, MemorySource, RankMemory
from trimaran.checkpoint.rank_share import RankShare, build_share
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Plan, Recipe
from trimaran.run import RunDirectory, create_run

pytestmark = pytest.mark.gpu

STEPS = 200
TREE = {
    "train": {"steps": STEPS, "global_batch": 8, "deterministic": True, "sample": {"tokens": 0}},
    "checkpoint": {"memory": 1, "every": 25},
}
WORKER = """
import os, sys
from pathlib import Path
from trimaran.run import RunDirectory
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.process.supervisor_link import SupervisorLink
from trimaran.train.worker import run_worker
path, cache, attempt, fd = sys.argv[1:]
link = SupervisorLink(attempt=int(attempt), rank_memories=(int(fd),))
sys.exit(run_worker(RunDirectory(Path(path)), read_rank_info(os.environ), cache=Path(cache), link=link))
"""


def start(run: RunDirectory, cache: Path, *, attempt: int, fd: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", WORKER, run.path, cache, str(attempt), str(fd)]
    return subprocess.Popen(arguments, pass_fds=[fd], env=os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})


def losses(run: RunDirectory) -> list[float]:
    return [json.loads(line)["loss"] for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_a_killed_rank_resumes_from_memory_bit_for_bit(tmp_path: Path, offload: str) -> None:
    plan = Plan.model_validate({"micro_batch": 8, "precision": "bf16", "offload": offload})
    recipe, cache = Recipe.model_validate(TREE), tmp_path / "cache"
    clean, run = (create_run(tmp_path / name, recipe, plan) for name in ("clean", "run"))
    spare, fd = os.memfd_create("spare"), os.memfd_create("rank-memory")
    assert start(clean, cache, attempt=0, fd=spare).wait(300) == 0
    worker = start(run, cache, attempt=0, fd=fd)
    deadline = time.monotonic() + 120
    while not run.metrics.exists() or len(run.metrics.read_text().splitlines()) < 60:
        assert worker.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    worker.kill()
    worker.wait()
    reached = len(run.metrics.read_text().splitlines())
    assert start(run, cache, attempt=1, fd=fd).wait(300) == 0
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    (resume,) = [event["data"] for event in events if event["kind"] == "resume"]
    assert resume["tier"] == "memory"
    assert resume["from_step"] >= reached - 1, "at most one step is lost"
    assert losses(run) == losses(clean)
    ours, theirs = (load_file(each.model / "model.safetensors") for each in (run, clean))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    newest = max(
        (contents for _, contents in RankMemory(fd).valid_slots()), key=lambda contents: contents.metadata.step
    )
    assert newest.metadata.step == STEPS
    assert newest.verify()
    source = MemorySource({0: newest})
    assert all(len(entry.regions) == 1 for entry in source.index.values())
    for descriptor in (spare, fd):
        os.close(descriptor)


ENDING = """
import os, sys, torch
from trimaran.checkpoint.copier import DeviceCopier
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.checkpoint.rank_share import RankShare
device = torch.device("cuda", 0)
torch.zeros(1, device=device)
rank_memory = RankMemory(os.memfd_create("test"))
rank_memory.create_slots(8, num_bytes=1 << 30, items_bytes=100, allocate=False)
copier = DeviceCopier(RankShare((), 1 << 30), rank_memory, device)
print(copier.is_ready)
sys.exit(75)
"""


def test_a_process_that_ends_during_pinning_keeps_its_exit_code() -> None:
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "False\n", "")
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_has_the_values_of_its_step_in_pinned_and_pageable_memory(pinned: bool) -> None:
    values = torch.zeros(1 << 26, device="cuda")
    shard = TensorShard(key="model/w", tensor=values, shape=tuple(values.shape), start=(0,))
    share = build_share([shard], [(0, len(values))])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    copier = Copier(share)
    rank_memory.create_slots(2, num_bytes=share.num_bytes, items_bytes=len(copier.items), allocate=False)
    copier = DeviceCopier(share, rank_memory, torch.device("cuda")) if pinned else copier
    for step in range(1, 6):
        copier.before_update()
        values += 1  # waits for the copy of the step before
        copier.copy(
            rank_memory.slots[step % 2], CopyMetadata(step=step, incarnation=(0, 0), rank=0, world_size=1), [shard]
        )
    copier.wait()
    for _, contents in rank_memory.valid_slots():
        assert contents.verify()
        data = contents.memory.view(torch.float32)
        assert (float(data.min()), float(data.max())) == (contents.metadata.step, contents.metadata.step)
    copier.release()
    os.close(fd)


def test_training_continues_while_memory_is_pinned() -> None:
    device, num_bytes = torch.device("cuda", 0), 4 << 30
    values = torch.zeros(1 << 20, device=device)
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    rank_memory.create_slots(2, num_bytes=num_bytes, items_bytes=100, allocate=False)
    began = last = time.monotonic()
    longest = 0.0
    copier = DeviceCopier(RankShare((), num_bytes), rank_memory, device)
    while not copier.is_ready:
        values += 1
        torch.cuda.synchronize()
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    print(f"pinned after {last - began:.1f} s, the longest wait was {longest:.2f} s")
    copier.release()
    os.close(fd)
    assert longest < 0.5
