"""States and weights in files: the same trajectory, bit for bit, the same checkpoints, and little memory."""

import os
import resource
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cases import quick_or_slow
from tests.parity import plan_for
from tests.ranks import run_ranks
from tests.resume import SEGMENT_STEPS, TrainedSegment, recipe_for, train_segment
from trimaran.core import Plan
from trimaran.parallel import LowMemoryAdamW, store_of

# Half and a third of the largest matrices are still large enough for the disk.
SHAPE = {"layers": 1, "hidden": 128, "heads": 4, "kv_heads": 2, "head_dim": 32, "ffn": 512, "vocab": 192, "tied": False}
RECIPE, EIGHT_BIT = recipe_for(shape=SHAPE), recipe_for(shape=SHAPE, optimizer={"states": "8bit"})
PLANS: dict[str, dict[str, Any]] = {
    "one device": {"offload": "optimizer"},
    "split weights": {"offload": "optimizer", "precision": "bf16", "grad_accum": 2},
    "sharded parameters": {"dp_shard": 2, "offload": "parameters", "grad_accum": 2},
    "one shard": {"sharding": "parameters", "offload": "parameters", "precision": "bf16"},
    "uneven shards": {"dp_shard": 3, "offload": "parameters"},
}


def plan_of(fields: dict[str, Any], folder: Path | None, recipe: Any = RECIPE) -> Plan:
    """Return a plan that offloads to a folder, or the same in memory."""
    to = {"disk": {"path": str(folder)}} if folder else {}
    kept = fields if folder else fields | {"offload": "none" if fields["offload"] == "optimizer" else "parameters"}
    settings: dict[str, Any] = {"grad_accum": 1} | kept | to
    return plan_for(recipe, **settings)


@lru_cache
def in_memory(name: str) -> TrainedSegment:
    return train_segment(RECIPE, plan_of(PLANS[name], None), steps=2 * SEGMENT_STEPS)


@pytest.mark.parametrize("name", quick_or_slow(PLANS, lambda name: name != "sharded parameters"))
def test_training_from_disk_changes_no_bit(name: str, tmp_path: Path) -> None:
    plan = plan_of(PLANS[name], tmp_path)
    assert plan.offloads_to_disk
    train_segment(RECIPE, plan, steps=2 * SEGMENT_STEPS).assert_same_end(in_memory(name))
    assert [*tmp_path.iterdir()] == []  # a file without a name goes with its process


def test_a_resume_from_a_checkpoint_of_tensors_on_disk_is_exact(tmp_path: Path) -> None:
    fields = PLANS["split weights"]
    whole = in_memory("split weights")
    plan = plan_of(fields, tmp_path)
    again = train_segment(RECIPE, plan, steps=SEGMENT_STEPS, after=whole.midway)
    again.assert_loaded(whole.midway)
    assert again.losses == whole.losses[SEGMENT_STEPS:]
    after = train_segment(RECIPE, plan_of(fields, None), steps=SEGMENT_STEPS, after=again.saved)
    after.assert_loaded(again.saved)


@pytest.mark.slow
def test_eight_bit_states_on_disk_change_no_bit(tmp_path: Path) -> None:
    fields = {"dp_shard": 2, "offload": "optimizer"}
    expected = train_segment(EIGHT_BIT, plan_of(fields, None, EIGHT_BIT), steps=2 * SEGMENT_STEPS)
    train_segment(EIGHT_BIT, plan_of(fields, tmp_path, EIGHT_BIT), steps=2 * SEGMENT_STEPS).assert_same_end(expected)


NUM_VALUES = 3 << 22
DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def memory_of_updates(folder: str) -> tuple[int, int, bool, list[str]]:
    """Return the growth of resident memory over three updates, the bytes of the states, and where these are."""
    dist.init_process_group("gloo")
    module = nn.Linear(1024, NUM_VALUES // 1024, bias=False)
    module.weight.grad = torch.ones_like(module.weight)
    begin = resident_bytes()
    optimizer = LowMemoryAdamW(
        [{"params": [("weight", module.weight)]}],
        defaults=DEFAULTS, states="fp32", seed=0, on_host=False, disk=Path(folder), chunk_values=2**18,
    )  # fmt: skip
    most = 0
    for _ in range(3):
        optimizer.step()
        optimizer.wait()
        most = max(most, resident_bytes() - begin)
    states = {key: each for key, each in optimizer.state[module.weight].items() if key != "step"}
    values = [float(each.view(-1)[-1]) for each in states.values()]
    assert all(value > 0 for value in values), "the states are what the last update wrote"
    on_disk = all(store_of(each) is not None for each in states.values())
    return most, sum(each.nbytes for each in states.values()), on_disk, os.listdir(folder)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_states_on_disk_take_little_memory(tmp_path: Path) -> None:
    ((grown, states, on_disk, files),) = run_ranks(1, memory_of_updates, str(tmp_path))
    assert on_disk
    assert states == 8 * NUM_VALUES  # 96 MiB
    assert grown < states / 3  # slots of four chunks: 8 MiB; the rest is torch's own
    assert files == []  # the file has no name
