"""A vocabulary that tp does not divide: ranks hold unequal parts of it, and every plan trains as one process does."""

import json
import os
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests import matrix
from tests.parity import TOLERANCE, Trajectory, assert_same_trajectory, plan_for, train_run, trajectory_of
from tests.ranks import run_ranks
from tests.resume import SEGMENT_STEPS, SavedState, train_segment
from tests.resume import recipe_for as segment_recipe
from tests.vlm_training import SPEC, assert_traces_match, plan_of, train_all_ranks
from trimaran.core import Mesh, Plan, Recipe
from trimaran.models import PRESETS
from trimaran.nets import decoder_network, full_tensor, local_part, local_slices
from trimaran.parallel import apply_plan, build_mesh, vocab_parallel_token_losses
from trimaran.runs import RunDirectory
from trimaran.train import join_process_group, read_rank_info

VOCABULARY = 265  # enough for bytes; neither 2 nor 3 nor 4 divides it
SHAPE = {"vocab": VOCABULARY, "layers": 2, "hidden": 48, "heads": 12, "kv_heads": 12, "head_dim": 4, "ffn": 96}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("odd_vocabulary")
    matrix.write_documents(folder / "uneven.jsonl")
    (folder / "runs").mkdir()
    return folder


def recipe_for(model: str, workspace: Path) -> Recipe:
    """Return a recipe of the parity matrix with an odd vocabulary, which evaluates and generates too."""
    tree = matrix.recipe_for(model, workspace / "uneven.jsonl").model_dump(exclude_unset=True)
    tree["model"]["shape"] |= SHAPE
    tree["train"] |= {"evaluate": {"batches": 1}, "sample": {"tokens": 8, "prompt": "7 7 7", "temperature": 0}}
    return Recipe.model_validate(tree | {"data": tree["data"] | {"seq_len": 48}})


def answers(run: RunDirectory) -> tuple[float, str]:
    """Return the loss of the evaluation and the generated text."""
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    data = {event["kind"]: event["data"] for event in events}
    return data["evaluation"]["loss"], data["sample"]["text"]


@lru_cache
def alone(model: str, workspace: Path) -> tuple[Trajectory, RunDirectory]:
    recipe = recipe_for(model, workspace)
    run = train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs")
    return trajectory_of(run), run


PLANS = [
    ("dense-untied", {"tp": 3}),
    ("dense-tied", {"tp": 2}),
    ("dense-tied", {"tp": 4, "comm": {"regather": True}}),
    ("dense-untied", {"tp": 2, "dp_shard": 4}),
    ("dense-tied", {"tp": 2, "dp_shard": 2, "dp_replicate": 2, "sharding": "optimizer"}),
    ("dense-tied", {"tp": 2, "pp": 2, "grad_accum": 4}),
    ("dense-untied", {"tp": 2, "cp": 2, "sharding": "gradients", "recompute": "full"}),
    ("lora-untied", {"tp": 2, "dp_shard": 2}),
    ("mixture-tied", {"tp": 3, "dp_replicate": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "fields"), PLANS, ids=str)
def test_every_plan_trains_evaluates_and_generates_as_one_process_does(
    workspace: Path, model: str, fields: dict[str, Any]
) -> None:
    recipe = recipe_for(model, workspace)
    expected, reference = alone(model, workspace)
    run = train_run(recipe, plan_for(recipe, **{"grad_accum": 1} | fields), workspace / "runs")
    assert_same_trajectory(trajectory_of(run), expected)
    assert expected.losses[-1] < 0.9 * expected.losses[0], "the loss must fall, or the comparison proves nothing"
    (loss, text), (expected_loss, expected_text) = answers(run), answers(reference)
    assert loss == pytest.approx(expected_loss, rel=TOLERANCE)
    assert text == expected_text


def test_a_checkpoint_resumes_under_another_degree_bit_for_bit() -> None:
    tree = segment_recipe(shape=SHAPE | {"tied": False}).model_dump()
    recipe = Recipe.model_validate(tree | {"data": {"seq_len": 24}})
    plans = [plan_for(recipe, grad_accum=1, **fields) for fields in ({"tp": 3}, {}, {"tp": 2})]
    losses: list[float] = []
    saved: SavedState | None = None
    for plan in plans:
        segment = train_segment(recipe, plan, steps=SEGMENT_STEPS, after=saved)
        if saved is not None:
            segment.assert_loaded(saved)
        losses, saved = losses + segment.losses, segment.saved
        assert saved.full_tensor("model/lm_head.weight").shape == (VOCABULARY, SHAPE["hidden"])
    whole = train_segment(recipe, plan_for(recipe, grad_accum=1), steps=SEGMENT_STEPS * len(plans))
    assert losses == pytest.approx(whole.losses, rel=TOLERANCE)


def parts_of(vocabulary: int, mesh: dict[str, int]) -> tuple[np.ndarray, tuple[slice, ...], np.ndarray]:
    """Return this rank's part of an embedding whose rows hold their number, its slices, and the gathered embedding."""
    join_process_group(read_rank_info(os.environ))
    degrees = Mesh.model_validate(mesh)
    ranks = build_mesh(degrees, device_type="cpu")
    network = decoder_network(replace(PRESETS["tiny"], layers=1, vocab=vocabulary, tied=False))
    with torch.no_grad():
        network.module.get_parameter("embed_tokens.weight").copy_(torch.arange(vocabulary)[:, None].expand(-1, 128))
    apply_plan(network, Plan(mesh=degrees, sharding="parameters"), ranks)
    weight = network.module.get_parameter("embed_tokens.weight")
    result = local_part(weight).numpy(), local_slices(weight), full_tensor(weight).numpy()
    dist.barrier()  # no rank may exit while another still gathers
    return result


@pytest.mark.parametrize("mesh", [{"dp_shard": 3, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}], ids=str)
def test_a_rank_knows_which_rows_it_holds(mesh: dict[str, int]) -> None:
    for part, slices, whole in run_ranks(prod(mesh.values()), parts_of, VOCABULARY, mesh):
        assert np.array_equal(whole[:, 0], np.arange(VOCABULARY))
        assert np.array_equal(part, whole[slices])


@pytest.mark.slow
def test_the_language_tower_of_a_vision_language_model_has_an_odd_vocabulary() -> None:
    spec = replace(SPEC, language=replace(SPEC.language, vocab=VOCABULARY))
    expected = train_all_ranks(spec, plan_of(grad_accum=1))[0]
    assert_traces_match(train_all_ranks(spec, plan_of(mesh={"tp": 2}, towers={"vision": {"tp": 1}})), expected)


def losses_with_wrong_labels() -> list[float]:
    """Return the losses of five logits on two ranks: of a token, an ignored label, and two that are no token."""
    join_process_group(read_rank_info(os.environ))
    mesh = init_device_mesh("cpu", (2,))
    columns = (3, 2)[mesh.get_local_rank()]
    logits = DTensor.from_local(torch.zeros(4, columns), mesh, (Shard(1),), run_check=False, shape=torch.Size((4, 5)),
                                stride=(5, 1))  # fmt: skip
    return vocab_parallel_token_losses(logits, torch.tensor([4, -100, 5, -1]), ignored=-100).tolist()


def test_the_loss_of_a_label_that_is_no_token_is_nan() -> None:
    for losses in run_ranks(2, losses_with_wrong_labels):
        assert losses[:2] == [pytest.approx(np.log(5)), 0.0]
        assert np.isnan(losses[2:]).all()
