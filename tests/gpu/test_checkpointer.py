"""Copies of the state that overlap with training on a GPU: complete, of the right step, and found after a kill."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trimaran.checkpoint import Copier, CopyMetadata, DeviceCopier, MemorySource, RankMemory
from trimaran.core import Plan, Recipe
from trimaran.parallel import RankShare, SplitWeight, TensorShard, build_share, copy_to_memory, split_fp32
from trimaran.runs import RunDirectory, create_run

pytestmark = pytest.mark.gpu

STEPS = 200
TREE = {
    "train": {"steps": STEPS, "global_batch": 8, "deterministic": True, "sample": {"tokens": 0}},
    "checkpoint": {"memory": 1, "every": 25},
}
WORKER = """
import os, sys
from pathlib import Path
from trimaran.runs import RunDirectory
from trimaran.train.process.rank_setup import read_rank_info
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
from trimaran.checkpoint.device_copier import DeviceCopier
from trimaran.checkpoint.memory_copies import RankMemory
from trimaran.parallel.tensor_shards import RankShare
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


def many_shards() -> list[TensorShard]:
    """Return split weights, plain tensors of many sizes and dtypes, a buffer, and a frozen tensor, on the GPU."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    tensors: dict[str, torch.Tensor | SplitWeight] = {}
    for index in range(40):
        tensors[f"matrix.{index}"] = SplitWeight(*split_fp32(random(300 + index, 700)))
        tensors[f"moment.{index}"] = random(300 + index, 700)
        tensors[f"norm.{index}"] = random(700 + index)
    tensors |= {"large": random(3000, 3000), "half": random(77, 3).bfloat16(), "bytes": random(1001).to(torch.int8)}
    tensors |= {"transposed": random(50, 60).t(), "scalar": random(1).reshape(()), "buffer": random(9)}
    flat = random(1000)
    tensors |= {"neighbour.0": flat[:400], "neighbour.1": flat[400:]}
    return [
        TensorShard(key=key, tensor=each, shape=tuple(each.shape), start=(0,) * each.ndim,
                    changed_by_forward=key == "buffer", frozen=key == "norm.3")
        for key, each in tensors.items()
    ]  # fmt: skip


@pytest.mark.parametrize("chunk_bytes", [1 << 28, 1 << 20])
def test_batched_copies_equal_copies_one_by_one(chunk_bytes: int) -> None:
    """The first copy to a slot records its launches, the next repeats them with other values at the same addresses."""
    shards = many_shards()
    share = build_share(shards, [(0, each.shape[0] if each.shape else 1) for each in shards])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    items_bytes = len(Copier(share).items)
    rank_memory.create_slots(2, num_bytes=share.num_bytes, items_bytes=items_bytes, allocate=False)
    copier = DeviceCopier(share, rank_memory, torch.device("cuda"), chunk_bytes=chunk_bytes, staging_bytes=1 << 19)
    expected = torch.empty(share.num_bytes, dtype=torch.uint8)
    for step in range(1, 7):
        copier.before_update()
        for each in shards:
            if isinstance(each.tensor, SplitWeight):
                each.tensor.upper.mul_(1.01)
                each.tensor.lower.add_(77)
            elif isinstance(each.tensor, torch.Tensor) and not each.frozen:
                each.tensor.copy_(each.tensor.roll(1))
        if step == 5:  # as if FSDP had moved them
            shards = [replace(each, tensor=moved(each.tensor)) for each in shards]
        metadata = CopyMetadata(step=step, incarnation=(0, 0), rank=0, world_size=1)
        copier.copy(rank_memory.slots[step % 2], metadata, shards)
        copy_to_memory(share, shards, expected)
        copier.wait()
        contents = rank_memory.slots[step % 2].read()
        assert contents is not None
        assert contents.verify()
        for item in share.items:
            part = slice(item.offset, item.offset + item.num_bytes)
            assert torch.equal(contents.memory[part], expected[part]), (step, item.key)
    assert copier._transfers is not None
    assert len(copier._transfers.batched._graphs) == 2, "all launches to each slot are recorded"
    copier.release()
    os.close(fd)


def moved(tensor: torch.Tensor | SplitWeight) -> torch.Tensor | SplitWeight:
    if isinstance(tensor, SplitWeight):
        return SplitWeight(tensor.upper.clone(), tensor.lower.clone())
    assert isinstance(tensor, torch.Tensor)
    return tensor.clone()


def test_a_copy_takes_little_of_the_host_and_says_how_long_the_gpu_waited() -> None:
    shards = many_shards()
    share = build_share(shards, [(0, each.shape[0] if each.shape else 1) for each in shards])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    rank_memory.create_slots(2, num_bytes=share.num_bytes, items_bytes=len(Copier(share).items), allocate=False)
    copier = DeviceCopier(share, rank_memory, torch.device("cuda"))
    assert copier.wait_ready()
    host_seconds: list[float] = []
    waits: list[float] = []
    for step in range(1, 13):
        torch.cuda.synchronize()
        began = time.perf_counter()
        metadata = CopyMetadata(step=step, incarnation=(0, 0), rank=0, world_size=1)
        copier.copy(rank_memory.slots[step % 2], metadata, shards)
        host_seconds.append(time.perf_counter() - began)
        assert copier.device_waits() == [], "no update has waited for it yet"
        copier.before_update()
        torch.cuda.synchronize()
        waits += copier.device_waits()
        assert len(waits) == step
        copier.wait()
        assert copier.commit_seconds > 0
    print(f"host: first {1e3 * host_seconds[0]:.1f} ms, then {1e3 * sorted(host_seconds)[6]:.2f} ms; {waits=}")
    assert min(waits) > 0
    assert sorted(host_seconds)[6] < 0.003, "about 130 tensors: one by one they take this long"
    copier.release()
    os.close(fd)
