"""Weights split into two halves train like fp32 weights, and are saved as fp32."""

import json
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.cases import quick_or_slow, slow
from tests.hf_models import CONFIGS
from tests.parity import TOLERANCE, plan_for, train_run
from tests.ranks import run_ranks
from tests.resume import SEGMENT_STEPS, HeldShard, TrainedSegment, batch_of, bits, held, train_segment
from tests.resume import recipe_for as recipe_of_segments
from tests.vlm_training import SPEC, assert_traces_match, plan_of, train_all_ranks
from trimaran.checkpoint import DiskSource, newest_step, read_full_tensor
from trimaran.core import Plan, Recipe
from trimaran.parallel import SplitWeights, build_mesh, learning_rate
from trimaran.train import StepClock, TorchStepper, build_networks, build_stepper, join_process_group, read_rank_info


def recipe_for(preset: str = "tiny", *, shape: dict[str, Any] | None = None, **train: Any) -> Recipe:
    """Return a small recipe: bf16 is slow on a CPU. The head is just large enough for 8-bit states."""
    recipe = recipe_of_segments(preset, shape={"layers": 2, "vocab": 128} | (shape or {}), **train)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": 8})})


# A large eps. Otherwise the first steps of AdamW have the same size whatever the gradient, and amplify its rounding.
SMOOTH: dict[str, Any] = {"optimizer": {"eps": 1e-3}}
RECIPES = {
    "untied": recipe_for(shape={"tied": False}, **SMOOTH),
    "tied": recipe_for(shape={"tied": True}, **SMOOTH),
    "mixture": recipe_for("tiny-moe", **SMOOTH),
    "own-precision": recipe_for(precision={"layers.1.mlp": "fp32"}, **SMOOTH),
}
# Without `nudge`, a few weights are rounded differently, and bf16's own noise follows from it. It is largest in biases,
# which are still near zero.
NOISE = 5e-3


# Projections of the same input are separate matmuls, as with fp32 weights, so that sums have the same order.
SEPARATE: dict[str, Any] = {"precision": "bf16", "recompute": "selective"}
# With states on the host weights are not split.
WHOLE: dict[str, Any] = SEPARATE | {"offload": "optimizer"}


def nudge(module: nn.Module, split: SplitWeights) -> None:
    """Set the last bit of every weight, so that none is exactly half way between two bf16 values.

    One in 65,536 is. A cast rounds it to even, `split_fp32` away from zero: the only difference.
    """
    for each in module.parameters():
        lower = split.lower_halves.get(each)
        last = each.data.view(torch.int32) if lower is None else lower
        last.bitwise_or_(1)


def train_nudged(recipe: Recipe, plan: Plan, steps: int) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    """Return losses, norms and final weights of nudged steps, and how many weights were split."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device))
    assert isinstance(stepper, TorchStepper)
    stepper.set_training(True)
    module, losses, norms, split = networks[0].module, [], [], stepper.updater.split_weights
    for step in range(steps):
        nudge(module, split)
        numbers = stepper.step(batch_of(step, recipe, plan, ranks))
        norm, _ = stepper.update(learning_rate(step, recipe.train))
        losses.append(float(numbers[0]))
        norms.append(float(norm))
    weights = {name: stepper.full_tensor(each) for name, each in module.named_parameters()}
    return losses, norms, weights, len(split.lower_halves)


def assert_same_trajectory(recipe: Recipe, grad_accum: int, *, steps: int, tolerance: float = TOLERANCE) -> None:
    """Assert that split weights and fp32 weights train the same."""
    split, whole = (plan_for(recipe, grad_accum=grad_accum, **fields) for fields in (SEPARATE, WHOLE))
    ((losses, norms, weights, num_split),) = run_ranks(1, train_nudged, recipe, split, steps)
    ((their_losses, their_norms, their_weights, none),) = run_ranks(1, train_nudged, recipe, whole, steps)
    assert (num_split > 4, none) == (True, 0)
    assert losses == pytest.approx(their_losses, rel=tolerance)
    assert norms == pytest.approx(their_norms, rel=tolerance)
    for name, each in weights.items():
        assert each.dtype == torch.float32
        assert (each - their_weights[name]).norm() <= tolerance * their_weights[name].norm(), name


@pytest.mark.parametrize(
    ("name", "grad_accum"),
    quick_or_slow(
        [("untied", 1), ("untied", 4), ("tied", 1), ("mixture", 2), ("own-precision", 1)],
        lambda case: case == ("mixture", 2),
    ),
)
def test_split_weights_train_like_fp32_weights(name: str, grad_accum: int) -> None:
    assert_same_trajectory(RECIPES[name], grad_accum, steps=2 if name == "mixture" else 4)


def test_joint_projections_train_the_same_up_to_rounding_in_bf16() -> None:
    joint, separate = (
        plan_for(RECIPES["untied"], grad_accum=2, **fields) for fields in ({"precision": "bf16"}, SEPARATE)
    )
    ((losses, norms, weights, _),) = run_ranks(1, train_nudged, RECIPES["untied"], joint, 3)
    ((their_losses, their_norms, their_weights, _),) = run_ranks(1, train_nudged, RECIPES["untied"], separate, 3)
    assert losses != their_losses
    assert losses == pytest.approx(their_losses, rel=1e-4)
    assert norms == pytest.approx(their_norms, rel=NOISE)
    for name, each in weights.items():
        assert (each - their_weights[name]).norm() <= NOISE * their_weights[name].norm(), name


@pytest.mark.parametrize("name", ["llama", slow("qwen3-moe")])
def test_a_hugging_face_model_trains_like_one_with_fp32_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    tree = recipe_for(**SMOOTH).model_dump() | {"model": {"family": "hf", "path": str(tmp_path)}}
    assert_same_trajectory(Recipe.model_validate(tree), 2, steps=2)


@pytest.mark.parametrize("freeze", [slow(((),)), ("vision",)])
def test_a_vision_language_model_trains_like_one_with_fp32_weights(freeze: tuple[str, ...]) -> None:
    ours = train_all_ranks(SPEC, plan_of(**SEPARATE), freeze=freeze)
    (theirs,) = train_all_ranks(SPEC, plan_of(**WHOLE), freeze=freeze)
    assert_traces_match(ours, theirs, NOISE)


@lru_cache
def train_split(states: str) -> TrainedSegment:
    recipe = recipe_for(shape={"tied": False}, optimizer={"states": states})
    return train_segment(recipe, plan_for(recipe, grad_accum=2, precision="bf16"), steps=2 * SEGMENT_STEPS)


@pytest.mark.parametrize("states", ["fp32", slow("bf16"), slow("8bit")])
def test_a_resumed_run_equals_an_uninterrupted_one(states: str) -> None:
    recipe, full = recipe_for(shape={"tied": False}, optimizer={"states": states}), train_split(states)
    plan = plan_for(recipe, grad_accum=2, precision="bf16")
    resumed = train_segment(recipe, plan, steps=SEGMENT_STEPS, after=full.midway)
    resumed.assert_loaded(full.midway)
    resumed.assert_same_end(replace(full, losses=full.losses[SEGMENT_STEPS:]))


def test_checkpoints_have_the_weights_in_fp32() -> None:
    saved = train_split("fp32").saved
    assert {entry.meta.dtype for key, entry in saved.index.items() if key.startswith("model/")} == {"F32"}
    assert not [key for key in saved.index if key.startswith("optimizer/low")]
    weight = saved.full_tensor("model/lm_head.weight")
    assert (weight != weight.bfloat16()).float().mean() > 0.9, "the lower halves are part of it"


@pytest.mark.parametrize(
    "fields",
    [{}, slow({"dp_replicate": 2, "precision": "bf16"}), {"dp_shard": 2, "precision": "bf16"}],
    ids=["fp32", "ddp-bf16", "fsdp-bf16"],
)
def test_another_plan_resumes_from_the_same_bits_and_back(fields: dict[str, Any]) -> None:
    recipe = recipe_for(shape={"tied": False})
    saved = train_split("fp32").midway
    other = train_segment(recipe, plan_for(recipe, grad_accum=1, **fields), steps=SEGMENT_STEPS, after=saved)
    other.assert_loaded(saved)
    plan = plan_for(recipe, grad_accum=2, precision="bf16")
    back = train_segment(recipe, plan, steps=SEGMENT_STEPS, after=other.saved)
    back.assert_loaded(other.saved)
    assert other.losses == pytest.approx(train_split("fp32").losses[SEGMENT_STEPS:], rel=1e-2)


def test_the_exported_model_of_a_run_equals_its_last_checkpoint_in_fp32(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{each} " * 9}) + "\n" for each in range(300)))
    settings: dict[str, Any] = {"steps": 4, "global_batch": 4, "evaluate": {"every": 2}, "sample": {"tokens": 3}}
    tree = recipe_of_segments(shape={"layers": 2, "tied": False}, **settings).model_dump()
    data = {"source": "jsonl", "path": str(tmp_path / "text.jsonl"), "seq_len": 8}
    recipe = Recipe.model_validate(tree | {"data": data})
    run = train_run(recipe, plan_for(recipe, grad_accum=2, precision="bf16"), tmp_path / "runs")
    exported = load_file(run.model / "model.safetensors")
    step = newest_step(run.checkpoints)
    assert step == 4
    source = DiskSource(run.checkpoints / f"step-{step:08d}")
    for name in (each.removeprefix("model/") for each in source.index if each.startswith("model/")):
        weight = exported[name if name.startswith("lm_head") else f"model.{name}"]
        assert weight.dtype == torch.float32
        assert torch.equal(bits(weight), bits(read_full_tensor(source, f"model/{name}"))), name
    weight = exported["lm_head.weight"]
    assert (weight != weight.bfloat16()).float().mean() > 0.9


def refused_and_applied(recipe: Recipe, plan: Plan) -> tuple[list[HeldShard], list[HeldShard], list[HeldShard]]:
    """Return the state before and after a step with a NaN gradient, and after a good step."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device))
    stepper.set_training(True)
    state, states = stepper.state(recipe.train), []
    weight = networks[0].module.get_parameter("lm_head.weight")
    assert isinstance(stepper, TorchStepper)
    assert weight in stepper.updater.split_weights.lower_halves
    for step, broken in enumerate((False, True, False)):
        spoiled = weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([3]), torch.nan))
        if not broken:
            spoiled.remove()
        stepper.step(batch_of(step, recipe, plan, ranks))
        spoiled.remove()
        _, refused = stepper.update(1e-2)
        assert bool(refused) is broken
        assert weight.grad is None
        states.append([held(each) for each in state.shards()])
    before, after, applied = states
    return before, after, applied


@pytest.mark.parametrize(
    ("states", "grad_accum"), [("fp32", 1), ("8bit", 2), slow(("bf16", 1)), slow(("fp32", 2)), slow(("8bit", 1))]
)
def test_a_refused_step_changes_neither_half_and_no_state(states: str, grad_accum: int) -> None:
    recipe = recipe_for(shape={"tied": False}, optimizer={"states": states})
    plan = plan_for(recipe, grad_accum=grad_accum, precision="bf16")
    ((before, after, applied),) = run_ranks(1, refused_and_applied, recipe, plan)
    assert before == after
    changed = {each.key for each, was in zip(applied, after, strict=True) if each != was}
    assert {each.key for each in after if each.key.startswith("model/")} <= changed
