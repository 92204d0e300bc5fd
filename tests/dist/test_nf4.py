"""A 4-bit base trains the same adapter under every plan that supports it."""

from typing import Any

import pytest

from tests.adapter_training import GLOBAL_BATCH, assert_same_training, recipe_of, train_all_ranks
from tests.cases import slow
from tests.parity import plan_for
from trimaran.core import Plan

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 2},
        slow({"dp_replicate": 2}),
        slow({"dp_shard": 2, "sharding": "optimizer"}),
        slow({"pp": 2, "grad_accum": 4}),
        slow({"pp": 2, "dp_replicate": 2, "grad_accum": 4}),
        slow({"dp_shard": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_a_4bit_base_trains_as_in_one_process(fields: dict[str, Any]) -> None:
    recipe = recipe_of({"preset": "tiny", "shape": SHAPE}, {"kind": "lora", "base": "4bit"})
    (alone,) = train_all_ranks(recipe, Plan(micro_batch=GLOBAL_BATCH))
    assert alone.losses[-1] < alone.losses[0]
    assert_same_training(train_all_ranks(recipe, plan_for(recipe, **({"grad_accum": 1} | fields))), alone)
