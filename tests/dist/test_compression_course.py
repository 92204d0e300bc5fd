"""Compression changes the course of training only within a stated bound: the held-out loss at equal tokens, 3 seeds."""

import json
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.parity import plan_for, train_run
from trimaran.core import Recipe

SEEDS = (0, 1, 2)
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}
# By how much the mean held-out loss may exceed that of synchronous training, relative to it.
BOUNDS: dict[str, tuple[dict[str, Any], dict[str, int], float]] = {
    "fp16": ({"kind": "fp16"}, {"dp_replicate": 2}, 0.01),
    "bf16": ({"kind": "bf16"}, {"dp_replicate": 2}, 0.01),
    "int8": ({"kind": "int8"}, {"dp_replicate": 2}, 0.01),
    "1bit": ({"kind": "1bit"}, {"dp_replicate": 2}, 0.10),
    "topk": ({"kind": "topk", "ratio": 0.05, "warmup_steps": 20}, {"dp_replicate": 2}, 0.10),
    "powersgd": ({"kind": "powersgd"}, {"dp_replicate": 2}, 0.03),
    "int8-sharded": ({"kind": "int8"}, {"dp_shard": 2}, 0.01),
    "bf16-hsdp": ({"kind": "bf16"}, {"dp_replicate": 2, "dp_shard": 2}, 0.01),
}


def held_out_loss(folder: Path, seed: int, compression: Any, mesh: dict[str, int]) -> float:
    recipe = Recipe.model_validate(
        {
            "model": {"preset": "tiny", "shape": SHAPE},
            "data": {"seq_len": 64},
            "train": {
                "steps": 200,
                "global_batch": 8,
                "lr": 3e-3,
                "seed": seed,
                "save": False,
                "sample": {"tokens": 0},
                "evaluate": {"batches": 16},
            },
            "checkpoint": {"every": 0, "memory": 0},
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    run = train_run(recipe, plan_for(recipe, grad_accum=1, **mesh, comm={"compression": compression}), folder)
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return [each["data"]["loss"] for each in events if each["kind"] == "evaluation"][-1]


@lru_cache
def synchronous_loss(folder: Path, seed: int) -> float:
    return held_out_loss(folder, seed, "none", {"dp_replicate": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("course") / "runs"


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDS)
def test_the_held_out_loss_is_within_its_bound(folder: Path, name: str) -> None:
    compression, mesh, bound = BOUNDS[name]
    ours = [held_out_loss(folder, seed, compression, mesh) for seed in SEEDS]
    exact = [synchronous_loss(folder, seed) for seed in SEEDS]
    assert mean(ours) <= mean(exact) * (1 + bound), (ours, exact)
