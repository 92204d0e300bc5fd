"""Weights in two halves on a GPU: how much memory they take, and that no bit of them is lost."""

import gc
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.parity import plan_for
from tests.resume import LEG, batch_of, bits, recipe_for, sail_leg_here
from trimaran.checkpoint.copier import DeviceCopier
from trimaran.checkpoint.load_state import fill
from trimaran.checkpoint.memory_copies import Label, MemorySource, RankMemory, pack_items
from trimaran.checkpoint.rank_share import lay_out
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Plan, Recipe
from trimaran.optim.split_bf16 import split
from trimaran.optim.split_weights import AT_ONCE, SplitWeights
from trimaran.parallel import build_mesh
from trimaran.train.build import build_stepper
from trimaran.train.metrics.step_clock import Clock
from trimaran.train.networks import build_networks
from trimaran.train.process.rank_info import join, read_rank_info

pytestmark = pytest.mark.gpu

# 202 million values in matrices, and next to nothing else.
LARGE = {"layers": 16, "hidden": 1024, "heads": 8, "kv_heads": 8, "head_dim": 128, "ffn": 2752, "tied": False}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bits repeat, and nothing of one test is in the memory of the next."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    gc.collect()
    torch.cuda.empty_cache()


def bytes_a_value(recipe: Recipe, plan: Plan) -> tuple[float, float]:
    """Return what a value of the weights takes between steps, and with its gradient before the update."""
    place = read_rank_info(os.environ)
    if not dist.is_initialized():
        join(place)
    for dtype in (torch.float32, torch.bfloat16):  # what cuBLAS works in stays allocated from here on
        square = torch.ones(64, 64, device="cuda", dtype=dtype)
        torch.addmm(square[0], square, square)
    before = torch.cuda.memory_allocated()
    ranks = build_mesh(plan.mesh, device_type="cuda")
    networks = build_networks(recipe, plan, place, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, Clock(place.device))
    stepper.set_training(True)
    num_values = sum(each.numel() for each in networks[0].module.parameters())
    found = []
    for step in range(2):
        stepper.step(batch_of(step, recipe, plan, ranks).to(place.device))
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
        stepper.update(1e-3)
        torch.cuda.synchronize()
        found.append(torch.cuda.memory_allocated() - before)
    return found[3] / num_values, found[2] / num_values


@pytest.mark.parametrize(("grad_accum", "gradient"), [(1, 2), (2, 4)])
def test_a_weight_takes_twelve_bytes_and_its_gradient_two(grad_accum: int, gradient: int) -> None:
    recipe = recipe_for(shape=LARGE)
    between, before = bytes_a_value(recipe, plan_for(recipe, grad_accum=grad_accum, precision="bf16"))
    # The embedding is fp32 as before: its gradient is 4 bytes. The rest is what a step keeps: losses, counts.
    assert between == pytest.approx(12, abs=0.3)
    assert before == pytest.approx(12 + gradient, abs=0.3)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("grad_accum", [1, 2])
def test_a_break_leaves_no_trace(states: str, grad_accum: int) -> None:
    shape = {"hidden": 128, "head_dim": 32, "ffn": 384, "tied": False}
    recipe = recipe_for(shape=shape, optimizer={"states": states})
    plan = plan_for(recipe, grad_accum=grad_accum, precision="bf16")
    whole = sail_leg_here(recipe, plan, steps=2 * LEG)
    again = sail_leg_here(recipe, plan, steps=LEG, after=whole.midway)
    again.assert_loaded(whole.midway)
    again.assert_same_end(replace(whole, losses=whole.losses[LEG:]))


def test_fp32_weights_go_on_from_halves_and_back() -> None:
    recipe = recipe_for(shape={"hidden": 128, "head_dim": 32, "ffn": 384, "tied": False})
    plan = plan_for(recipe, grad_accum=1, precision="bf16")
    start = sail_leg_here(recipe, plan, steps=LEG)
    away = sail_leg_here(recipe, plan_for(recipe, grad_accum=1), steps=LEG, after=start.kept)
    away.assert_loaded(start.kept)
    back = sail_leg_here(recipe, plan, steps=LEG, after=away.kept)
    back.assert_loaded(away.kept)


def test_a_copy_to_the_host_is_whole_and_needs_little_room() -> None:
    values = torch.randn(16384, 8192, device="cuda")
    held, empty = (
        TensorShard(key="model/w", tensor=SplitWeights(*split(each)), shape=tuple(each.shape), start=(0, 0))
        for each in (values, torch.zeros_like(values))
    )
    share = lay_out([held], [(0, len(values))])
    fd = os.memfd_create("test")
    rank_memory = RankMemory(fd)
    rank_memory.lay_out(1, num_bytes=share.num_bytes, items_bytes=len(pack_items(share.items)))
    copier = DeviceCopier(share, rank_memory, torch.device("cuda"))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copier.copy(rank_memory.slots[0], Label(step=1, incarnation=(0, 0), rank=0, world_size=1), [held])
    copier.before_update()
    copier.settle()
    ((_, kept),) = RankMemory(fd).kept()
    fill([empty], MemorySource({0: kept}))
    torch.cuda.synchronize()
    # Of the 512 MiB: what is joined or split at a time, a few times over.
    assert torch.cuda.max_memory_allocated() - before <= 5 * 4 * AT_ONCE < values.nbytes
    assert isinstance(empty.tensor, SplitWeights)
    assert torch.equal(bits(empty.tensor.whole()), bits(values.cpu()))
    os.close(fd)
