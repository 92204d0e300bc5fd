"""The FLOPs that recompute adds, block by block."""

from typing import Any, cast

import pytest

from trimaran.core import Plan
from trimaran.cost import Job, find_stack, repeated_flops
from trimaran.models import PRESETS, OutlineLayer, outline_of

JOB = Job(outline=outline_of(PRESETS["llama-3.2-1b"]), seq_len=2048)
LAYER, LAYERS = cast(tuple[OutlineLayer, int], JOB.outline.main.runs[0])
POSITIONS = 4 * 2048


def repeated(job: Job = JOB, **plan: Any) -> float:
    return repeated_flops(job, Plan.model_validate({"micro_batch": 4} | plan))


def forward(blocks: int) -> float:
    return blocks * LAYER.flops(POSITIONS, 2048)


def test_nothing_is_repeated_unless_the_plan_recomputes() -> None:
    assert repeated() == 0
    assert repeated(towers={"language": {"recompute": "none"}}) == 0


def test_full_recompute_repeats_every_layer_except_its_last_matmul() -> None:
    last = 2.0 * POSITIONS * LAYER.ffn * LAYER.hidden
    assert repeated(recompute="full") == pytest.approx(forward(LAYERS) - LAYERS * last)
    others = Job(outline=JOB.outline, seq_len=2048, stack=find_stack("megatron"))
    assert repeated(others, recompute="full") == pytest.approx(forward(LAYERS)), "Megatron repeats the full layer"


def test_every_second_layer_repeats_half() -> None:
    assert repeated(recompute=2) == pytest.approx(repeated(recompute="full") / 2)
    assert repeated(recompute=LAYERS) == pytest.approx(repeated(recompute="full") / LAYERS)


def test_selective_recompute_repeats_the_matmuls_that_it_does_not_save() -> None:
    heads, hidden = LAYER.heads * LAYER.head_dim, LAYER.hidden
    values = LAYER.kv_heads * LAYER.head_dim
    again = 2.0 * POSITIONS * hidden * (heads + values + LAYER.ffn)  # queries, values and one feed-forward matmul
    assert repeated(recompute="selective") == pytest.approx(LAYERS * again)


def test_twice_the_global_batch_repeats_twice_as_much() -> None:
    assert repeated(recompute="full", grad_accum=2) == pytest.approx(2 * repeated(recompute="full"))
