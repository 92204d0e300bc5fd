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

from tests.parity import plan_for
from tests.ranks import run_ranks
from tests.resume import SEGMENT_STEPS, TrainedSegment, recipe_for, train_segment
from trimaran.core import Plan, TrainSection
from trimaran.optim import adamw, build_optimizer
from trimaran.optim.adamw import LowMemoryAdamW
from trimaran.parallel.memory import disk_store
from trimaran.parallel.memory.disk_store import store_of

RECIPE = recipe_for(shape={"tied": False})
EIGHT_BIT = recipe_for(optimizer={"states": "8bit"})
PLANS: dict[str, dict[str, Any]] = {
    "one device": {"offload": "optimizer"},
    "split weights": {"offload": "optimizer", "precision": "bf16", "grad_accum": 2},
    "sharded parameters": {"dp_shard": 2, "offload": "parameters", "grad_accum": 2},
    "one shard": {"sharding": "parameters", "offload": "parameters", "precision": "bf16"},
    "uneven shards": {"dp_shard": 3, "offload": "parameters"},
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put tensors of a tiny model on disk, in several chunks each. Forked ranks inherit this."""
    monkeypatch.setattr(disk_store, "MIN_DISK_BYTES", 1024)
    monkeypatch.setattr(adamw, "CHUNK_VALUES", 2048)


def plan_of(fields: dict[str, Any], folder: Path | None, recipe: Any = RECIPE) -> Plan:
    """Return a plan that offloads to a folder, or the same in memory."""
    to = {"disk": {"path": str(folder)}} if folder else {}
    kept = fields if folder else fields | {"offload": "none" if fields["offload"] == "optimizer" else "parameters"}
    settings: dict[str, Any] = {"grad_accum": 1} | kept | to
    return plan_for(recipe, **settings)


@lru_cache
def in_memory(name: str) -> TrainedSegment:
    return train_segment(RECIPE, plan_of(PLANS[name], None), steps=2 * SEGMENT_STEPS)


@pytest.mark.parametrize("name", PLANS)
def test_training_from_disk_changes_no_bit(name: str, tmp_path: Path) -> None:
    plan = plan_of(PLANS[name], tmp_path)
    assert plan.offloads_to_disk
    train_segment(RECIPE, plan, steps=2 * SEGMENT_STEPS).assert_same_end(in_memory(name))
    assert [*tmp_path.iterdir()] == []  # a file without a name goes with its process
