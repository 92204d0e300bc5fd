"""DeepSpeed resumes from states of other plans, and they resume from its states."""

import importlib
import math
import os
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.test_resume import assert_exact_resume
from tests.parity import TOLERANCE, plan_for
from tests.resume import SEGMENT_STEPS, SavedState, recipe_for, train_segment
from trimaran.core import Plan
from trimaran.train.steppers.deepspeed_state import regions_of_range

# Wide enough that ZeRO-3 splits some matrices (from 10,000 elements) and leaves the others unsharded.
RECIPE = recipe_for(shape={"layers": 2, "hidden": 64, "head_dim": 16, "ffn": 192})


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    """Import the package once for all forked ranks, with the modules that each would import later."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed", reason="needs the extra: pip install trimaran[deepspeed]")
    for late in ("stage3", "muon.muon_optimizer"):
        importlib.import_module(f"deepspeed.runtime.zero.{late}")


def zero(sharding: str, *, world: int = 2, **fields: Any) -> Plan:
    axis = "dp_replicate" if sharding == "none" else "dp_shard"
    fields |= {"mesh": {axis: world}, "sharding": sharding, "micro_batch": 12 // world, "engine": "deepspeed"}
    return Plan.model_validate(fields)


CHAIN = (
    plan_for(RECIPE, grad_accum=1, dp_shard=3),
    zero("optimizer"),
    zero("parameters", world=3),
    zero("none"),
    zero("gradients", offload="optimizer"),
    plan_for(RECIPE, grad_accum=1),
)


def test_a_run_that_switches_between_deepspeed_and_torch_has_the_same_losses() -> None:
    losses: list[float] = []
    saved: SavedState | None = None
    for plan in CHAIN:
        segment = train_segment(RECIPE, plan, steps=SEGMENT_STEPS, after=saved)
        if saved is not None:
            segment.assert_loaded(saved)
        losses, saved = losses + segment.losses, segment.saved
    assert losses == pytest.approx(
        train_segment(RECIPE, CHAIN[-1], steps=SEGMENT_STEPS * len(CHAIN)).losses, rel=TOLERANCE
    )


@pytest.mark.slow
def test_a_resume_under_the_same_plan_is_exact() -> None:
    plan = zero("gradients", precision="fp16")
    full = train_segment(RECIPE, plan, steps=2 * SEGMENT_STEPS)
    assert_exact_resume(RECIPE, plan, full)
    assert full.saved.progress["loss_scale"] == {"value": 65536.0, "good_steps": 2 * SEGMENT_STEPS}


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_compute_weights_are_rounded_from_the_saved_weights(sharding: str) -> None:
    plan = zero(sharding, precision="bf16", world=3)
    assert_exact_resume(RECIPE, plan, train_segment(RECIPE, plan, steps=2 * SEGMENT_STEPS))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_flat_range_is_a_few_regions(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    found = list(regions_of_range(tuple(shape), first, last))
    spans = [
        (sum(at * math.prod(shape[d + 1 :]) for d, at in enumerate(start)), math.prod(size)) for start, size in found
    ]
    assert sum(size for _, size in spans) == last - first
    assert all(begin + size == after for (begin, size), (after, _) in pairwise(spans))
    assert not spans or spans[0][0] == first
    assert len(found) <= max(1, 2 * len(shape) - 1)
