"""Towers: their parameters, learning rates and plan settings."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.vlm_training import SPEC
from trimaran.core import DataSection, ModelSection, Plan, Recipe, TrainSection, UserError
from trimaran.machine import parse_cluster
from trimaran.models import PRESETS, VLM_PRESETS, outline_for, spec_of, split_by_cost
from trimaran.nets import network_of, tower_of
from trimaran.parallel import LR_FACTOR, apply_recompute, assign_images, build_optimizer, freeze_towers, tower_of_blocks
from trimaran.planner import Question, check_plan, check_tensor, check_towers, choose, search

TOWERS = {"vision": "vision.", "projector": "projector.", "language": "language."}
EIGHT = parse_cluster("8xH100")


def vlm_recipe(**model: Any) -> Recipe:
    section = ModelSection.model_validate({"family": "vlm", "preset": "qwen2-vl-7b"} | model)
    data = DataSection.model_validate({"seq_len": 4096, "images_per_sample": 4})
    return Recipe(model=section, data=data, train=TrainSection(global_batch=64))


def refusal(plan: dict[str, Any], recipe: Recipe | None = None) -> UserError:
    recipe = recipe or vlm_recipe()
    with pytest.raises(UserError) as caught:
        check_plan(Plan.model_validate(plan), recipe, spec_of(recipe.model), EIGHT)
    return caught.value


@pytest.mark.parametrize(
    ("name", "towers", "tower"),
    [
        ("vision.layers.0.mlp.up_proj.weight", TOWERS, "vision"),
        ("visionary.weight", TOWERS, "language"),
        ("language", TOWERS, "language"),
        ("layers.0.weight", {"all": ""}, "all"),
        ("eye.left.weight", {"eyes": "eye.", "left": "eye.left."}, "left"),
    ],
)
def test_a_parameter_belongs_to_the_tower_with_the_longest_prefix(
    name: str, towers: dict[str, str], tower: str
) -> None:
    assert tower_of(name, towers) == tower


def test_a_frozen_tower_has_no_gradient_and_no_state() -> None:
    network = network_of(SPEC)
    freeze_towers(network, ["vision"])
    trained = {name for name, each in network.module.named_parameters() if each.requires_grad}
    assert {tower_of(name, TOWERS) for name in trained} == {"projector", "language"}
    optimizer = build_optimizer([network.module], TrainSection(), Plan(), TOWERS)
    assert {name for group in optimizer.param_groups for name in group["param_names"]} == trained
    with pytest.raises(UserError, match=r"M012.*did you mean 'vision'"):
        freeze_towers(network, ["visoin"])


def test_a_rank_without_trained_parameters_has_an_optimizer() -> None:
    module = nn.Linear(4, 4).requires_grad_(False)
    for states in ("fp32", "8bit"):
        train = TrainSection.model_validate({"optimizer": {"states": states}})
        optimizer = build_optimizer([module], train, Plan())
        optimizer.step()
        assert [group["params"] for group in optimizer.param_groups] == [[]]


@pytest.mark.parametrize("states", ["fp32", "bf16"])
def test_a_tower_has_its_own_learning_rate_and_weight_decay(states: str) -> None:
    section = {"vision": {"lr": 1e-5}, "language": {"weight_decay": 0.5}}
    train = TrainSection.model_validate({"lr": 1e-3, "optimizer": {"states": states, "towers": section}})
    optimizer = build_optimizer([network_of(SPEC).module], train, Plan(), TOWERS)
    found = {
        (tower_of(name, TOWERS), each.ndim >= 2): (pytest.approx(group[LR_FACTOR]), group["weight_decay"])
        for group in optimizer.param_groups
        for name, each in zip(group["param_names"], group["params"], strict=True)
    }
    assert found == {
        ("vision", True): (0.01, 0.1),
        ("vision", False): (0.01, 0.0),
        ("projector", True): (1.0, 0.1),
        ("projector", False): (1.0, 0.0),
        ("language", True): (1.0, 0.5),
        ("language", False): (1.0, 0.0),
    }
    with pytest.raises(UserError, match=r"P052.*did you mean 'vision'"):
        build_optimizer([nn.Linear(2, 2)], train_with("visoin"), Plan(), TOWERS)


def train_with(tower: str) -> TrainSection:
    return TrainSection.model_validate({"optimizer": {"towers": {tower: {"lr": 1e-5}}}})


def test_every_kth_block_is_counted_inside_its_tower() -> None:
    network = network_of(SPEC)  # two vision layers, the projector, two layers of language
    plan = Plan.model_validate({"recompute": 2, "towers": {"vision": {"recompute": "full"}}})
    apply_recompute(network, plan, None)
    recomputed = [(tower, "forward" in vars(block)) for tower, block in tower_of_blocks(network)]
    assert recomputed == [
        ("vision", True), ("vision", True), ("projector", True), ("language", True), ("language", False),
    ]  # fmt: skip


def test_images_are_split_by_size() -> None:
    assert assign_images([4, 16, 8, 4], 2) == [1, 0, 1, 1]
    assert assign_images([4], 2) == [0]
    torch.manual_seed(0)
    counts = torch.randint(1, 100, (64,)).tolist()
    owners = assign_images(counts, 4)
    loads = [sum(count for count, owner in zip(counts, owners, strict=True) if owner == rank) for rank in range(4)]
    assert max(loads) <= 1.02 * sum(counts) / 4


def test_pipeline_stages_balance_the_cost_including_the_vision_tower() -> None:
    spec = VLM_PRESETS["qwen2-vl-2b"]
    long_text, short_text = (split_by_cost(spec, 4, seq_len=seq_len) for seq_len in (16384, 1024))
    assert sum(long_text) == sum(short_text) == spec.layers == 61
    assert long_text[0] > spec.vision.layers, "an image costs little next to a long text"
    assert short_text[0] < long_text[0]


@pytest.mark.parametrize(
    ("plan", "code", "where"),
    [
        ({"towers": {"vision": {"sharding": "parameters"}}}, "P053", "plan.towers.vision.sharding"),
        ({"towers": {"vision": {"tp": 2}}}, "P054", "plan.towers.vision.tp"),
        ({"mesh": {"tp": 4, "dp_replicate": 2}, "towers": {"vision": {"tp": 2}}}, "P054", "plan.towers.vision.tp"),
        ({"mesh": {"tp": 2, "dp_replicate": 4}, "towers": {"language": {"tp": 1}}}, "P054", "plan.towers.language.tp"),
        ({"mesh": {"tp": 8}}, "P008", "plan.mesh.tp"),
    ],
)
def test_an_illegal_tower_setting_is_refused(plan: dict[str, Any], code: str, where: str) -> None:
    fields = {"mesh": {"dp_replicate": 8}} | plan
    data = Plan.model_validate(fields).mesh.dp
    error = refusal(fields | {"micro_batch": 64 // data})
    assert (error.code, error.where) == (code, where)


def test_offloaded_parameters_are_sharded_in_every_tower() -> None:
    sharded = {"mesh": {"dp_shard": 8}, "sharding": "parameters", "micro_batch": 8, "offload": "parameters"}
    assert refusal(sharded | {"towers": {"vision": {"sharding": "none"}}}).code == "P053"


def test_a_vision_tower_that_norms_all_heads_together_cannot_use_tensor_parallelism() -> None:
    spec = VLM_PRESETS["internvl-26b"]
    split = Plan.model_validate({"mesh": {"tp": 2}})
    with pytest.raises(UserError, match="P054"):
        check_tensor(split, spec)
    check_tensor(Plan.model_validate({"mesh": {"tp": 2}, "towers": {"vision": {"tp": 1}}}), spec)


def test_a_tower_is_sharded_alone_over_tensor_parallel_ranks_that_do_not_split_it() -> None:
    towers = {name: {"tp": 1, "sharding": "parameters"} for name in ("vision", "projector")}
    fields = {"mesh": {"tp": 2, "dp_replicate": 4}, "micro_batch": 16}
    piped = {"mesh": {"tp": 2, "pp": 2, "dp_replicate": 2}, "micro_batch": 4, "grad_accum": 8}
    for legal in (fields, piped):
        check_towers(Plan.model_validate(legal | {"towers": towers}), vlm_recipe(), VLM_PRESETS["tiny"])
    for illegal in (
        fields | {"towers": {"projector": towers["projector"]}},  # the ranks encode the same images
        fields | {"towers": {"vision": {"sharding": "parameters"}}},
        piped | {"towers": {"projector": towers["projector"]}},
        piped | {"towers": {"vision": {"sharding": "parameters"}}},
    ):
        error = refusal(illegal)
        assert error.code == "P053"
        assert str(error.where).endswith(".sharding")
        needed = "vision" if error.where == "plan.towers.vision.sharding" else "vision and projector"
        assert str(error.fix).endswith(f", or give {needed} tp 1")


def test_the_planner_replicates_a_vision_tower_that_tp_cannot_split_and_shards_it_over_those_ranks() -> None:
    model = {"family": "vlm", "preset": "internvl-26b"}
    recipe = Recipe.model_validate(
        {"model": model, "data": {"seq_len": 4096, "image_size": 896}, "train": {"global_batch": 128}}
    )
    for mesh, sharding in ({"tp": 2, "dp_shard": 4}, None), ({"tp": 8}, "parameters"):
        pinned = recipe.model_copy(update={"plan": Plan.model_validate({"mesh": mesh})})
        outline, cluster = outline_for(recipe.model, recipe.data), parse_cluster("8xH100")
        question = Question(recipe=pinned, spec=spec_of(recipe.model), outline=outline, cluster=cluster)
        plan = search(question).ranked[0]
        assert {name: own.tp for name, own in plan.towers.items()} == {"vision": 1, "projector": 1}
        assert plan.towers["vision"].sharding == sharding
        check_plan(plan, pinned, question.spec, cluster)


def test_a_perception_model_cannot_use_context_parallelism() -> None:
    recipe = Recipe(model=ModelSection(family="perception"), train=TrainSection(global_batch=64))
    error = refusal({"mesh": {"dp_replicate": 4, "cp": 2}, "micro_batch": 16}, recipe)
    assert (error.code, error.where) == ("P055", "plan.mesh.cp")


def test_every_plan_for_a_vision_language_model_is_legal() -> None:
    recipe = vlm_recipe(freeze=["vision"])
    outline, spec = outline_for(recipe.model, recipe.data), spec_of(recipe.model)
    two = parse_cluster("2xH100")
    answer = search(Question(recipe=recipe, spec=spec, outline=outline, cluster=two))
    assert len(answer.ranked) > 1
    for plan in answer.ranked:
        check_plan(plan, recipe, spec, two)
    assert answer.ranked[0].prediction is not None


def test_an_unknown_tower_of_a_decoder_is_refused() -> None:
    recipe = Recipe(train=train_with("vision"))
    with pytest.raises(UserError, match=r"P052.*no tower 'vision'"):
        choose(recipe, PRESETS["tiny"], EIGHT)
