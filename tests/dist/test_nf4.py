"""A 4-bit base trains the same adapter under every plan that supports it."""

from typing import Any

import pytest

from tests.cases import slow
from tests.parity import plan_for
from tests.plan_training import assert_each_trains_as_one_process, recipe_of

SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128}


QUICK: list[dict[str, Any]] = [{"dp_shard": 2}]
SLOW: list[dict[str, Any]] = [
    {"dp_replicate": 2},
    {"dp_shard": 2, "sharding": "optimizer"},
    {"pp": 2, "grad_accum": 4},
    {"dp_shard": 2, "recompute": "full"},
]


@pytest.mark.parametrize("plans", [QUICK, slow(SLOW)], ids=["quick", "slow"])
def test_a_4bit_base_trains_as_in_one_process(plans: list[dict[str, Any]]) -> None:
    recipe = recipe_of({"preset": "tiny", "shape": SHAPE}, {"kind": "lora", "base": "4bit"})
    assert_each_trains_as_one_process([(recipe, plan_for(recipe, **{"grad_accum": 1} | each)) for each in plans])
