"""Dense architectures beyond Llama train under combined plans as in one process, and export what transformers loads."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.cases import quick_or_slow, slow
from tests.family_configs import CONFIGS
from tests.matrix import write_documents
from tests.parity import plan_for, train_run
from tests.plan_training import assert_each_trains_as_one_process, recipe_of
from trimaran.core import Plan, Recipe
from trimaran.machine import parse_cluster
from trimaran.models import spec_of
from trimaran.planner import check_plan

PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "recompute": "full"},
    "cp2-gather": {"cp": 2, "comm": {"context": "gather"}},
    "cp2-exchange": {"cp": 2, "comm": {"context": "exchange"}, "recompute": "selective"},
    "fsdp2-tp2": {"dp_shard": 2, "tp": 2},
    "tp2-pp2": {"tp": 2, "pp": 2},
}
FAMILIES = ("mistral", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "phi3-long", "olmo2", "cohere", "cohere2", "glm4")
# Norms over all heads and after a layer, caps of scores, windows, and a fused head of scaled logits.
QUICK = [("gemma2", "tp2"), ("olmo2", "tp2"), ("cohere2", "cp2-exchange")]
GRIDS = [[(family, plan) for family in FAMILIES for plan in plans] for plans in ([*PLANS][:3], [*PLANS][3:])]


def save_family(family: str, folder: Path) -> Path:
    config = deepcopy(CONFIGS[family])
    config.vocab_size = 320  # bytes
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("cases", [QUICK, *map(slow, GRIDS)], ids=["quick", "2 ranks", "4 ranks"])
def test_an_architecture_trains_as_in_one_process_under_every_plan(
    tmp_path: Path, cases: list[tuple[str, str]]
) -> None:
    def case(family: str, plan: str) -> tuple[Recipe, Plan]:
        recipe = recipe_of({"path": str(tmp_path / family)})
        chosen = plan_for(recipe, grad_accum=2, **PLANS[plan])
        check_plan(chosen, recipe, spec_of(recipe.model), parse_cluster(f"{chosen.mesh.world_size}xcpu"))
        return recipe, chosen

    for family in dict(cases):
        save_family(family, tmp_path / family)
    assert_each_trains_as_one_process([case(*each) for each in cases])


@pytest.mark.parametrize("family", quick_or_slow(FAMILIES, {"gemma2"}.__contains__))
def test_a_run_writes_the_tensors_that_it_read(tmp_path: Path, family: str) -> None:
    write_documents(tmp_path / "uneven.jsonl")
    (tmp_path / "runs").mkdir()
    folder = save_family(family, tmp_path / "model")
    data = {"source": "jsonl", "path": str(tmp_path / "uneven.jsonl"), "seq_len": 32}
    train = {"steps": 1, "global_batch": 4, "evaluate": {"batches": 0}, "sample": {"tokens": 0}}
    recipe = Recipe.model_validate({"model": {"path": str(folder)}, "data": data, "train": train})
    run = train_run(recipe, plan_for(recipe, grad_accum=1, tp=2), tmp_path / "runs")
    before, after = (load_file(each / "model.safetensors") for each in (folder, run.model))
    assert {name: each.shape for name, each in before.items()} == {name: each.shape for name, each in after.items()}
