"""`train --dry-run` refuses exactly what the ranks of `train` refuse: random plans of many models, built both ways."""

import gc
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import BloomConfig

from tests.plan_cases import planner_refusal, preset_sections, random_case, write_configs
from trimaran.core import Mesh, Plan, Recipe, UserError
from trimaran.models import HfFacts
from trimaran.nets import WeightsNeededError
from trimaran.train import (
    StepClock,
    build_networks,
    build_stepper,
    check_build,
    fake_rank,
    find_hf_facts,
    refuse_unsavable,
)

CPU = torch.device("cpu")
QUICK_HF = ("llama-0", "vision1-yolos-0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_configs(tmp_path_factory.mktemp("models"))


def parts_of(error: UserError) -> tuple[str, ...]:
    return error.code, error.what, error.where, error.fix


def refusal_of_dry_run(recipe: Recipe, plan: Plan) -> tuple[str, ...] | None:
    try:
        check = check_build(recipe, plan)
    except UserError as error:
        return parts_of(error)
    assert check.ranks or check.not_built
    return None if check.ranks else ("not built",)


def refusal_of_train(recipe: Recipe, plan: Plan, rank: int) -> tuple[str, ...] | None:
    """Build a rank with its weights, its optimizer and its stepper, as the worker does it."""
    try:
        with fake_rank(plan, rank, CPU) as fake:
            networks = build_networks(recipe, plan, fake.info, fake.ranks)
            refuse_unsavable(recipe, networks)
            assert not any(each.is_meta for network in networks for each in network.module.parameters())
            build_stepper(networks, recipe.train, plan, fake.ranks, StepClock(CPU))
    except UserError as error:
        return parts_of(error)
    return None


def check_case(chance: Random, section: dict[str, Any], facts: HfFacts | None = None) -> str:
    """Compare both for a random plan, and return what they said: a code, or `accepted`; `no plan` if there is none."""
    found = random_case(chance, section)
    if found is None:
        return "no plan"
    recipe, plan = found
    dry = refusal_of_dry_run(recipe, plan)
    world_size = plan.mesh.world_size
    case = f"{section} {plan} {recipe.model.adapter} {recipe.train.precision} {recipe.data.seq_len}"
    for rank in {0, world_size - 1, chance.randrange(world_size)}:
        real = refusal_of_train(recipe, plan, rank)
        assert dry == real, f"rank {rank} of {case}"
    if facts is not None and not recipe.train.precision and not recipe.model.adapter:
        error = planner_refusal(recipe, plan, facts)
        assert dry == (parts_of(error) if error else None), f"the planner, for {case}"
    gc.collect()
    return dry[0] if dry else "accepted"


def check_hf_cases(folder: Path, chance: Random, number: int) -> set[str]:
    section = {"family": "hf", "path": str(folder)}
    try:
        facts = find_hf_facts(Recipe.model_validate({"model": section}).model)
    except WeightsNeededError:
        facts = None
    return {check_case(chance, section, facts) for _ in range(number)}


def test_dry_run_and_train_refuse_the_same_plans_of_a_few_models(folders: dict[str, Path]) -> None:
    chance, said = Random(1), set()
    for section in chance.sample(list(preset_sections()), 1):
        said.add(check_case(chance, section))
    for name in QUICK_HF:
        said |= check_hf_cases(folders[name], chance, 1)
    assert "accepted" in said
    assert "M091" in said


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_dry_run_and_train_refuse_the_same_plans_of_every_preset(part: int) -> None:
    chance, said = Random(part), []
    for section in list(preset_sections())[part::4]:
        said += [check_case(chance, section) for _ in range(4)]
    assert said.count("accepted") > len(said) / 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_dry_run_planner_and_train_refuse_the_same_plans_of_every_architecture(
    folders: dict[str, Path], part: int
) -> None:
    assert len(folders) > 60
    chance, said = Random(part), set()
    for name in sorted(folders)[part::8]:
        said |= check_hf_cases(folders[name], chance, 3)
    assert "accepted" in said


def test_a_rank_of_a_thousand_is_built_without_values_or_processes() -> None:
    recipe = Recipe.model_validate({"model": {"preset": "llama-3.1-405b"}, "data": {"seq_len": 8192}})
    plan = Plan(mesh=Mesh(tp=8, pp=16, dp_shard=8), sharding="optimizer", grad_accum=16)
    check = check_build(recipe, plan)
    assert check.ranks == (0, 1023)
    assert check.world_size == 1024
    assert not dist.is_initialized(), "the fake process group is gone"


def test_documents_that_the_model_mixes_are_refused_before_a_row_is_read(tmp_path: Path) -> None:
    BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    tree: dict[str, Any] = {"model": {"family": "hf", "path": str(tmp_path)}}
    tree |= {"data": {"seq_len": 32, "isolate_documents": True}}
    with pytest.raises(UserError, match=r"M058.*takes no position_ids"):
        check_build(Recipe.model_validate(tree), Plan())
    tree["data"]["isolate_documents"] = False
    assert check_build(Recipe.model_validate(tree), Plan()).ranks == (0,)
