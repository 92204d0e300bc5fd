"""DeepSpeed goes on from what other plans kept, and they from what it kept."""

import importlib
import math
import os
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dist.test_resume import assert_no_trace
from tests.parity import TOLERANCE, plan_for
from tests.resume import LEG, Kept, recipe_for, sail_leg
from trimaran.core import Plan
from trimaran.train.steppers.deepspeed_state import boxes

# Wide enough that ZeRO-3 splits some matrices (from 10,000 elements) and leaves the others whole.
RECIPE = recipe_for(shape={"layers": 2, "hidden": 64, "head_dim": 16, "ffn": 192})


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    """Import the package once for all ranks that are forked from here, with what it would import in each of them."""
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


def test_a_run_changes_between_deepspeed_and_torch_and_stays_on_course() -> None:
    losses: list[float] = []
    kept: Kept | None = None
    for plan in CHAIN:
        leg = sail_leg(RECIPE, plan, steps=LEG, after=kept)
        if kept is not None:
            leg.assert_loaded(kept)
        losses, kept = losses + leg.losses, leg.kept
    assert losses == pytest.approx(sail_leg(RECIPE, CHAIN[-1], steps=LEG * len(CHAIN)).losses, rel=TOLERANCE)


@pytest.mark.chaos
def test_under_the_same_plan_a_break_leaves_no_trace() -> None:
    plan = zero("gradients", precision="fp16")
    whole = sail_leg(RECIPE, plan, steps=2 * LEG)
    assert_no_trace(RECIPE, plan, whole)
    assert whole.kept.progress["loss_scale"] == {"value": 65536.0, "good_steps": 2 * LEG}


@pytest.mark.chaos
@pytest.mark.chaos
@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_weights_that_are_rounded_to_compute_with_are_rounded_from_what_was_kept(sharding: str) -> None:
    plan = zero(sharding, precision="bf16", world=3)
    assert_no_trace(RECIPE, plan, sail_leg(RECIPE, plan, steps=2 * LEG))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(max_examples=300, deadline=None)
def test_a_stretch_of_memory_is_a_few_rectangles(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    found = list(boxes(tuple(shape), first, last))
    spans = [
        (sum(at * math.prod(shape[d + 1 :]) for d, at in enumerate(start)), math.prod(size)) for start, size in found
    ]
    assert sum(size for _, size in spans) == last - first
    assert all(begin + size == after for (begin, size), (after, _) in pairwise(spans))
    assert not spans or spans[0][0] == first
    assert len(found) <= max(1, 2 * len(shape) - 1)
