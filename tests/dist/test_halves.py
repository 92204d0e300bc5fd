"""Weights in two halves train as fp32 weights do, and no checkpoint knows of them."""

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
from tests.parity import TOLERANCE, plan_for, sail_to
from tests.ranks import run_ranks
from tests.resume import LEG, Held, Leg, batch_of, bits, held, recipe_for, sail_leg
from tests.seeing import SPEC, assert_alike, courses, plan_of
from trimaran.checkpoint.convert import read_whole
from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.step_dirs import newest
from trimaran.core import Plan, Recipe
from trimaran.nets.hf_weights import whole
from trimaran.parallel import build_mesh
from trimaran.optim import split_weights
from trimaran.train.build import build_stepper
from trimaran.train.networks import build_networks
from trimaran.train.metrics.step_clock import Clock
from trimaran.optim.split_weights import split_weights_of
from trimaran.train.process.rank_info import join, read_rank_info
from trimaran.optim.schedule import learning_rate

# A large eps: otherwise the first steps of AdamW are of one size, whatever the gradient, down to its rounding.
SMOOTH: dict[str, Any] = {"optimizer": {"eps": 1e-3}}
RECIPES = {
    "untied": recipe_for(shape={"tied": False}, **SMOOTH),
    "tied": recipe_for(shape={"tied": True}, **SMOOTH),
    "mixture": recipe_for("tiny-moe", **SMOOTH),
    "own-precision": recipe_for(precision={"layers.1.mlp": "fp32"}, **SMOOTH),
}
# Where nothing is nudged (see `nudge`) a few weights are rounded in another way, and what follows is bf16's own noise:
# it shows in biases, which have only begun to differ from zero.
NOISE = 5e-3


@pytest.fixture
def whole_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan keeps its weights in fp32, from here on."""
    monkeypatch.setattr(Plan, "splits_weights", property(lambda _: False))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Projections of the same input are products of their own, as they are with fp32 weights: no sum is another."""
    monkeypatch.setattr(split_weights, "join_projections", lambda *_: {})


def nudge(module: nn.Module) -> None:
    """Set the last bit of every weight, so that none is in the very middle of two bf16.

    One in 65,536 is. A cast rounds it to the even one, and halves round it away from zero: the only difference.
    """
    for each in module.parameters():
        both = split_weights_of(each)
        last = each.data.view(torch.int32) if both is None else both.lower
        last.bitwise_or_(1)


def course(recipe: Recipe, plan: Plan, steps: int) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    """Return losses, norms and final weights of nudged steps, and how many weights were in halves."""
    place = read_rank_info(os.environ)
    join(place)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, place, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, Clock(place.device))
    stepper.set_training(True)
    module, losses, norms = networks[0].module, [], []
    for step in range(steps):
        nudge(module)
        numbers = stepper.step(batch_of(step, recipe, plan, ranks))
        norm, _ = stepper.update(learning_rate(step, recipe.train))
        losses.append(float(numbers[0]))
        norms.append(float(norm))
    named = dict(module.named_parameters())
    weights = {name: whole(each) for name, each in named.items()}
    return losses, norms, weights, sum(split_weights_of(each) is not None for each in named.values())


def assert_same_course(
    recipe: Recipe, grad_accum: int, request: pytest.FixtureRequest, *, steps: int, tolerance: float = TOLERANCE
) -> None:
    """Fail unless halves and fp32 weights take the same course."""
    plan = plan_for(recipe, grad_accum=grad_accum, precision="bf16")
    request.getfixturevalue("apart")
    ((losses, norms, weights, num_halves),) = run_ranks(1, course, recipe, plan, steps)
    request.getfixturevalue("whole_weights")
    ((their_losses, their_norms, their_weights, none),) = run_ranks(1, course, recipe, plan, steps)
    assert (num_halves > 4, none) == (True, 0)
    assert losses == pytest.approx(their_losses, rel=tolerance)
    assert norms == pytest.approx(their_norms, rel=tolerance)
    for name, each in weights.items():
        assert each.dtype == torch.float32
        assert (each - their_weights[name]).norm() <= tolerance * their_weights[name].norm(), name


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("name", "grad_accum"),
    quick_or_slow(
        [("untied", 1), ("untied", 4), ("tied", 1), ("mixture", 2), ("own-precision", 1)],
        lambda case: case in (("untied", 4), ("mixture", 2)),
    ),
)
def test_halves_take_the_course_of_fp32_weights(name: str, grad_accum: int, request: pytest.FixtureRequest) -> None:
    assert_same_course(RECIPES[name], grad_accum, request, steps=2 if name == "mixture" else 6)


def test_joint_projections_take_the_course_to_the_rounding_of_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(RECIPES["untied"], grad_accum=2, precision="bf16")
    ((losses, norms, weights, _),) = run_ranks(1, course, RECIPES["untied"], plan, 6)
    monkeypatch.setattr(split_weights, "join_projections", lambda *_: {})
    ((their_losses, their_norms, their_weights, _),) = run_ranks(1, course, RECIPES["untied"], plan, 6)
    assert losses != their_losses
    assert losses == pytest.approx(their_losses, rel=1e-4)
    assert norms == pytest.approx(their_norms, rel=NOISE)
    for name, each in weights.items():
        assert (each - their_weights[name]).norm() <= NOISE * their_weights[name].norm(), name


@pytest.mark.parametrize("name", ["llama", slow("qwen3-moe")])
def test_a_hugging_face_model_takes_the_course_of_fp32_weights(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name]).save_pretrained(tmp_path)
    tree = recipe_for(**SMOOTH).model_dump() | {"model": {"family": "hf", "path": str(tmp_path)}}
    assert_same_course(Recipe.model_validate(tree), 2, request, steps=3)


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("freeze", [slow(((),)), ("vision",)])
def test_a_model_that_sees_takes_the_course_of_fp32_weights(
    freeze: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    plan = plan_of(precision="bf16")
    ours = courses(SPEC, plan, freeze=freeze)
    request.getfixturevalue("whole_weights")
    (theirs,) = courses(SPEC, plan, freeze=freeze)
    assert_alike(ours, theirs, NOISE)


@lru_cache
def in_halves(states: str) -> Leg:
    recipe = recipe_for(shape={"tied": False}, optimizer={"states": states})
    return sail_leg(recipe, plan_for(recipe, grad_accum=2, precision="bf16"), steps=2 * LEG)


@pytest.mark.parametrize("states", ["fp32", slow("bf16"), slow("8bit")])
def test_a_break_leaves_no_trace(states: str) -> None:
    recipe, whole = recipe_for(shape={"tied": False}, optimizer={"states": states}), in_halves(states)
    again = sail_leg(recipe, plan_for(recipe, grad_accum=2, precision="bf16"), steps=LEG, after=whole.midway)
    again.assert_loaded(whole.midway)
    again.assert_same_end(replace(whole, losses=whole.losses[LEG:]))


def test_what_is_kept_is_whole_and_fp32() -> None:
    kept = in_halves("fp32").kept
    assert {entry.whole.dtype for key, entry in kept.index.items() if key.startswith("model/")} == {"F32"}
    assert not [key for key in kept.index if key.startswith("optimizer/low")]
    weight = kept.whole("model/lm_head.weight")
    assert (weight != weight.bfloat16()).float().mean() > 0.9, "the lower halves are in it"


@pytest.mark.parametrize(
    "fields",
    [{}, slow({"dp_replicate": 2, "precision": "bf16"}), {"dp_shard": 2, "precision": "bf16"}],
    ids=["fp32", "ddp-bf16", "fsdp-bf16"],
)
def test_another_plan_goes_on_from_the_same_bits_and_back(fields: dict[str, Any]) -> None:
    recipe = recipe_for(shape={"tied": False})
    kept = in_halves("fp32").midway
    away = sail_leg(recipe, plan_for(recipe, grad_accum=1, **fields), steps=LEG, after=kept)
    away.assert_loaded(kept)
    back = sail_leg(recipe, plan_for(recipe, grad_accum=2, precision="bf16"), steps=LEG, after=away.kept)
    back.assert_loaded(away.kept)
    assert away.losses == pytest.approx(in_halves("fp32").losses[LEG:], rel=1e-2)


def test_the_model_of_a_run_is_its_last_checkpoint_in_fp32(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"{each} " * 9}) + "\n" for each in range(300)))
    tree = recipe_for(shape={"tied": False}, steps=4, evaluate={"every": 2}, sample={"tokens": 3}).model_dump()
    data = {"source": "jsonl", "path": str(tmp_path / "text.jsonl"), "seq_len": 16}
    recipe = Recipe.model_validate(tree | {"data": data})
    run = sail_to(recipe, plan_for(recipe, grad_accum=2, precision="bf16"), tmp_path / "runs")
    exported = load_file(run.model / "model.safetensors")
    step = newest(run.checkpoints)
    assert step == 4
    source = DiskSource(run.checkpoints / f"step-{step:08d}")
    for name in (each.removeprefix("model/") for each in source.index if each.startswith("model/")):
        weight = exported[name if name.startswith("lm_head") else f"model.{name}"]
        assert weight.dtype == torch.float32
        assert torch.equal(bits(weight), bits(read_whole(source, f"model/{name}"))), name
    weight = exported["lm_head.weight"]
    assert (weight != weight.bfloat16()).float().mean() > 0.9


def refused_and_taken(recipe: Recipe, plan: Plan) -> tuple[list[Held], list[Held], list[Held]]:
    """Return what is kept before and after a step with a gradient that is no number, and after a good one."""
    place = read_rank_info(os.environ)
    join(place)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, place, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, Clock(place.device))
    stepper.set_training(True)
    state, found = stepper.state(recipe.train), []
    for step, broken in enumerate((False, True, False)):
        stepper.step(batch_of(step, recipe, plan, ranks))
        weight = networks[0].module.get_parameter("lm_head.weight")
        assert split_weights_of(weight) is not None
        if broken:
            sums = getattr(weight, "main_grad", None)
            (weight.grad if sums is None else sums)[3, 3] = torch.nan
        _, refused = stepper.update(1e-2)
        assert bool(refused) is broken
        assert weight.grad is None
        assert getattr(weight, "main_grad", None) is None
        found.append([held(each) for each in state.pieces()])
    before, after, taken = found
    return before, after, taken


@pytest.mark.parametrize(
    ("states", "grad_accum"), [("fp32", 1), ("8bit", 2), slow(("bf16", 1)), slow(("fp32", 2)), slow(("8bit", 1))]
)
def test_a_step_that_is_refused_leaves_both_halves_and_all_states(states: str, grad_accum: int) -> None:
    recipe = recipe_for(shape={"tied": False}, optimizer={"states": states})
    plan = plan_for(recipe, grad_accum=grad_accum, precision="bf16")
    ((before, after, taken),) = run_ranks(1, refused_and_taken, recipe, plan)
    assert before == after
    moved = {each.key for each, was in zip(taken, after, strict=True) if each != was}
    assert {each.key for each in after if each.key.startswith("model/")} <= moved
