"""Mixtures of experts of other architectures train under plans as in one process.

`test_prediction.py` trains DeepSeek-V3 with the worker, in stages that split the sequence.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.cases import slow
from tests.mixture_models import save_mixture
from tests.parity import plan_for
from tests.plan_training import assert_each_trains_as_one_process, recipe_of
from trimaran.core import Plan, Recipe

PLANS: dict[str, dict[str, Any]] = {
    "ddp-2": {"dp_replicate": 2},
    "fsdp-2-recompute": {"dp_shard": 2, "recompute": "full"},
    "tp-2": {"tp": 2},
    "cp-exchange-ep": {"cp": 2, "ep": 2, "comm": {"context": "exchange"}},
    "fsdp-tp-ep": {"dp_shard": 2, "tp": 2, "ep": 2},
    "replicated-ep-tp": {"dp_replicate": 2, "tp": 2, "ep": 2},
    "pp-cp": {"pp": 2, "cp": 2, "grad_accum": 2},
    "pp-tp": {"pp": 2, "tp": 2, "grad_accum": 2},
    "pp-ep": {"pp": 2, "dp_shard": 2, "ep": 2, "grad_accum": 2},
}
MODELS = ("deepseek-v3", "gpt-oss", "mixtral-window", "deepseek-v2", "glm-4.5", "llama-4")
# Where the attention of an architecture has its own way to be split: latent, with sinks and windows, in chunks.
QUICK = [("deepseek-v3", "tp-2"), ("gpt-oss", "tp-2"), ("llama-4", "tp-2"), ("gpt-oss", "cp-exchange-ep")]
TWO_RANKS = [(name, plan) for name in MODELS for plan in [*PLANS][:4] if (name, plan) not in QUICK]
FOUR_RANKS = [(name, plan) for name in MODELS for plan in [*PLANS][4:]]


@pytest.mark.parametrize("cases", [QUICK, slow(TWO_RANKS), slow(FOUR_RANKS)], ids=["quick", "2 ranks", "4 ranks"])
def test_every_plan_trains_as_one_process(tmp_path: Path, cases: list[tuple[str, str]]) -> None:
    def case(name: str, plan: str) -> tuple[Recipe, Plan]:
        corrected = name in ("deepseek-v3", "glm-4.5")
        shape = {"experts": {"router": {"correction_rate": 0.02}}} if corrected else {}
        recipe = recipe_of({"path": str(tmp_path / name), "shape": shape})
        return recipe, plan_for(recipe, **{"grad_accum": 1} | PLANS[plan])

    for name in dict(cases):
        save_mixture(name, tmp_path / name)
    assert_each_trains_as_one_process([case(*each) for each in cases])
