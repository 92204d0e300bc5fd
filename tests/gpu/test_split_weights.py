"""Split weights on a GPU: the memory they take, and that no bit of them is lost."""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.parity import plan_for
from tests.resume import SEGMENT_STEPS, batch_of, bits, recipe_for, train_segment_here
from trimaran.checkpoint import CopyMetadata, DeviceCopier, MemorySource, RankMemory, encode_items, fill_shards
from trimaran.core import Plan, Recipe
from trimaran.parallel import CHUNK_VALUES, SplitWeight, TensorShard, build_mesh, build_share, split_fp32
from trimaran.train import StepClock, build_networks, build_stepper, join_process_group, read_rank_info

pytestmark = pytest.mark.gpu

# 202 million values in matrices, and very few others.
LARGE = {"layers": 16, "hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "ffn": 2752, "tied": False}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make results deterministic, and free the memory of each test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def bytes_per_value(recipe: Recipe, plan: Plan) -> tuple[float, float]:
    """Return the memory per weight value between steps, and with its gradient before the update."""
    rank_info = read_rank_info(os.environ)
    if not dist.is_initialized():
        join_process_group(rank_info)
    for dtype in (torch.float32, torch.bfloat16):  # so that the cuBLAS workspaces are allocated already
        square = torch.ones(64, 64, device="cuda", dtype=dtype)
        torch.addmm(square[0], square, square)
    before = torch.cuda.memory_allocated()
    ranks = build_mesh(plan.mesh, device_type="cuda")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device))
    stepper.set_training(True)
    num_values = sum(each.numel() for each in networks[0].module.parameters())
    allocated = []
    for step in range(2):
        stepper.step(batch_of(step, recipe, plan, ranks).to(rank_info.device))
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated() - before)
        stepper.update(1e-3)
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated() - before)
    return allocated[3] / num_values, allocated[2] / num_values


@pytest.mark.parametrize(("grad_accum", "gradient"), [(1, 2), (2, 4)])
def test_a_weight_takes_twelve_bytes_and_its_gradient_two(grad_accum: int, gradient: int) -> None:
    recipe = recipe_for(shape=LARGE)
    between, before = bytes_per_value(recipe, plan_for(recipe, grad_accum=grad_accum, precision="bf16"))
    # The tolerance is for the embedding, which is fp32 with a gradient of 4 bytes, and for losses and counts.
    assert between == pytest.approx(12, abs=0.3)
    assert before == pytest.approx(12 + gradient, abs=0.3)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(states: str, grad_accum: int) -> None:
    shape = {"hidden": 128, "head_dim": 32, "ffn": 384, "tied": False}
    recipe = recipe_for(shape=shape, optimizer={"states": states})
    plan = plan_for(recipe, grad_accum=grad_accum, precision="bf16")
    full = train_segment_here(recipe, plan, steps=2 * SEGMENT_STEPS)
    resumed = train_segment_here(recipe, plan, steps=SEGMENT_STEPS, after=full.midway)
    resumed.assert_loaded(full.midway)
    resumed.assert_same_end(replace(full, losses=full.losses[SEGMENT_STEPS:]))


def test_fp32_weights_resume_from_split_weights_and_back() -> None:
    recipe = recipe_for(shape={"hidden": 128, "head_dim": 32, "ffn": 384, "tied": False})
    plan = plan_for(recipe, grad_accum=1, precision="bf16")
    start = train_segment_here(recipe, plan, steps=SEGMENT_STEPS)
    in_fp32 = train_segment_here(recipe, plan_for(recipe, grad_accum=1), steps=SEGMENT_STEPS, after=start.saved)
    in_fp32.assert_loaded(start.saved)
    back = train_segment_here(recipe, plan, steps=SEGMENT_STEPS, after=in_fp32.saved)
    back.assert_loaded(in_fp32.saved)


def test_a_copy_to_the_host_is_fp32_and_needs_little_memory() -> None:
    values = torch.randn(16384, 8192, device="cuda")
    held, empty = (
        TensorShard(key="model/w", tensor=SplitWeight(*split_fp32(each)), shape=tuple(each.shape), start=(0, 0))
        for each in (values, torch.zeros_like(values))
    )
    share = build_share([held], [(0, len(values))])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    rank_memory.create_slots(1, num_bytes=share.num_bytes, items_bytes=len(encode_items(share.items)))
    copier = DeviceCopier(share, rank_memory, torch.device("cuda"))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copier.copy(rank_memory.slots[0], CopyMetadata(step=1, incarnation=(0, 0), rank=0, world_size=1), [held])
    copier.before_update()
    copier.wait()
    ((_, kept),) = RankMemory(fd).valid_slots()
    fill_shards([empty], MemorySource({0: kept}))
    torch.cuda.synchronize()
    # A few chunks that are joined or split, not the 512 MiB of all values.
    assert torch.cuda.max_memory_allocated() - before <= 5 * 4 * CHUNK_VALUES < values.nbytes
    assert isinstance(empty.tensor, SplitWeight)
    assert torch.equal(bits(empty.tensor.joined()), bits(values.cpu()))
    os.close(fd)
