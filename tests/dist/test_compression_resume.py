"""Error feedback is saved: a resume is exact, and another number of replicas loses nothing of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.cases import quick_or_slow, slow
from tests.parity import plan_for
from tests.resume import SEGMENT_STEPS, recipe_for, train_segment
from trimaran.core import Plan

KINDS: dict[str, dict[str, Any]] = {
    "int8": {"kind": "int8", "error_feedback": True},
    "1bit": {"kind": "1bit", "warmup_steps": 1},
    "topk": {"kind": "topk", "momentum": 0.5},
    "powersgd": {"kind": "powersgd", "rank": 2, "warmup_steps": 1},
}
RECIPE = recipe_for()


def compressed(kind: str, replicas: int = 2, **fields: Any) -> Plan:
    return plan_for(RECIPE, grad_accum=1, dp_replicate=replicas, comm={"compression": KINDS[kind]}, **fields)


@pytest.mark.parametrize("kind", quick_or_slow(KINDS, lambda kind: kind in ("topk", "powersgd")))
def test_a_resume_with_compression_is_exact(kind: str) -> None:
    plan = compressed(kind)
    full = train_segment(RECIPE, plan, steps=2 * SEGMENT_STEPS)
    assert any(key.startswith("compression/residual/") for key in full.midway.index)
    again = train_segment(RECIPE, plan, steps=SEGMENT_STEPS, after=full.midway)
    again.assert_loaded(full.midway)
    again.assert_same_end(replace(full, losses=full.losses[SEGMENT_STEPS:]))


@pytest.mark.parametrize(("before", "after"), [(3, 2), slow((2, 4))])
def test_another_number_of_replicas_keeps_all_that_was_not_sent(before: int, after: int) -> None:
    saved = train_segment(RECIPE, compressed("topk", before), steps=SEGMENT_STEPS).saved
    loaded = train_segment(RECIPE, compressed("topk", after), steps=1, after=saved).loaded
    kept = [each for each in loaded[0] if each.key.startswith("compression/")]
    assert len(kept) > 20
    for each in kept:
        wanted = saved.full_tensor(each.key).mean(0)
        rows = [held.tensor[0] for rank in loaded for held in rank if held.key == each.key]
        assert len(rows) == after
        assert wanted.abs().max() > 0, each.key
        torch.testing.assert_close(torch.stack(rows).mean(0), wanted)


def test_compression_can_begin_and_end_at_a_resume() -> None:
    plain = plan_for(RECIPE, grad_accum=1, dp_replicate=2)
    saved = train_segment(RECIPE, plain, steps=1).saved
    with_topk = train_segment(RECIPE, compressed("topk"), steps=SEGMENT_STEPS, after=saved)
    zeros = [each.tensor.abs().max() == 0 for each in with_topk.loaded[1] if each.key.startswith("compression/")]
    assert len(zeros) > 20
    assert all(zeros)
    end = train_segment(RECIPE, plain, steps=1, after=with_topk.saved)
    assert not any(each.key.startswith("compression/") for each in end.loaded[0])
