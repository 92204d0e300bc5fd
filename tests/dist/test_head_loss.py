"""A fused or chunked loss trains the same trajectory as full logits, under every plan that allows it."""

import json
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.cases import quick_or_slow, slow
from tests.parity import TOLERANCE, Trajectory, assert_same_trajectory, plan_for, train_run, trajectory_of
from tests.vlm_training import SPEC, TIED, TRAIN, TrainingTrace, assert_traces_match, plan_of, train_all_ranks
from trimaran.core import ModelSection, Recipe
from trimaran.models import VlmSpec
from trimaran.run import RunDirectory
from trimaran.train.loss import head_loss, objective

PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp-2": {"dp_replicate": 2},
    "ddp-3": {"dp_replicate": 3},  # with three or more ranks DDP searches unused parameters
    "fsdp-2": {"dp_shard": 2},
    "zero-2": {"dp_shard": 2, "sharding": "gradients"},
    "cp-2": {"cp": 2},
    "fsdp-2 x cp-2": {"dp_shard": 2, "cp": 2},
}
QUICK = {
    ("one process", "fused", False),
    ("one process", "chunked", True),
    ("ddp-2", "chunked", False),
    ("ddp-3", "fused", True),
    ("fsdp-2", "chunked", True),
    ("cp-2", "fused", False),
}
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks smaller than the rows of these tests; forked ranks inherit it."""
    monkeypatch.setattr(head_loss, "chunk_rows", lambda *_: 50)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head-loss")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(workspace: Path, *, tied: bool) -> Recipe:
    data = {"source": "jsonl", "path": str(workspace / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    train = {"steps": 8, "global_batch": 12, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0}}
    return Recipe.model_validate(
        {"model": {"preset": "tiny", "shape": SHAPE | {"tied": tied}}, "data": data, "train": train}
    )


def held_out(run: RunDirectory) -> float:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return next(each["data"]["loss"] for each in events if each["kind"] == "evaluation")


def train_plan(workspace: Path, *, tied: bool, **fields: Any) -> tuple[Trajectory, float]:
    """Return the trajectory of a plan and its final held-out loss."""
    recipe = recipe_for(workspace, tied=tied)
    run = train_run(recipe, plan_for(recipe, **{"grad_accum": 2} | fields), workspace / "runs")
    return trajectory_of(run), held_out(run)


@pytest.fixture
def forbid_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function after which forked ranks fail if they compute a loss from logits."""

    def fail(*_: object) -> None:
        raise AssertionError("there should be no logits")

    return lambda: monkeypatch.setattr(objective, "summed_loss", fail)


@lru_cache
def with_logits(workspace: Path, precision: str, *, tied: bool) -> tuple[Trajectory, float]:
    return train_plan(workspace, tied=tied, precision=precision)


@pytest.mark.parametrize(
    ("plan", "loss", "tied"),
    quick_or_slow(
        [(plan, loss, tied) for plan in PLANS for loss in ("fused", "chunked") for tied in (False, True)],
        QUICK.__contains__,
    ),
)
def test_the_trajectory_is_that_of_logits_under_every_plan(
    workspace: Path, forbid_logits: Callable[[], None], plan: str, loss: str, tied: bool
) -> None:
    reference, measured = with_logits(workspace, "fp32", tied=tied)
    forbid_logits()
    trajectory, found = train_plan(workspace, tied=tied, loss=loss, **PLANS[plan])
    assert_same_trajectory(trajectory, reference)
    assert found == pytest.approx(measured, rel=TOLERANCE)
    assert trajectory.losses[-1] < 0.95 * trajectory.losses[0], "the loss must fall, or the comparison proves nothing"


@pytest.mark.slow  # 16-bit matmuls are slow on a CPU
@pytest.mark.parametrize(
    ("precision", "plan", "loss"),
    [(each, plan, loss) for each in ("bf16", "fp16") for plan in PLANS for loss in ("fused", "chunked")],
)
def test_in_16_bits_the_trajectory_is_that_of_logits_within_their_precision(
    workspace: Path, forbid_logits: Callable[[], None], precision: str, plan: str, loss: str
) -> None:
    reference, measured = with_logits(workspace, precision, tied=False)
    forbid_logits()
    trajectory, found = train_plan(workspace, tied=False, precision=precision, loss=loss, **PLANS[plan])
    near = 1e-3 if precision == "bf16" else 1e-4
    assert trajectory.losses == pytest.approx(reference.losses, rel=near)
    assert trajectory.norms == pytest.approx(reference.norms, rel=10 * near)
    assert found == pytest.approx(measured, rel=near)


@cache
def vlm_with_logits(spec: VlmSpec, freeze: tuple[str, ...]) -> TrainingTrace:
    return train_all_ranks(spec, plan_of(grad_accum=1), TRAIN, freeze)[0]


@pytest.mark.parametrize(
    ("plan", "tied", "freeze"),
    [
        ({}, False, ("language",)),
        ({"mesh": {"dp_replicate": 2}}, True, ("vision",)),
        ({"mesh": {"dp_shard": 2}, "sharding": "parameters"}, False, ("language",)),
        ({"mesh": {"cp": 2}}, True, ()),
    ],
)
def test_a_vision_language_model_with_frozen_towers_trains_the_same_trajectory(
    forbid_logits: Callable[[], None], plan: dict[str, Any], tied: bool, freeze: tuple[str, ...]
) -> None:
    spec = TIED if tied else SPEC
    reference = vlm_with_logits(spec, freeze)
    forbid_logits()
    assert_traces_match(train_all_ranks(spec, plan_of(**plan, loss="chunked"), TRAIN, freeze), reference)


@pytest.mark.parametrize(("plan", "loss"), [({}, "chunked"), slow(({"dp_shard": 2}, "fused"))])
def test_a_hugging_face_model_trains_the_same_trajectory_with_a_fused_head(
    workspace: Path, forbid_logits: Callable[[], None], plan: dict[str, Any], loss: str
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder, recipe = workspace / "llama", recipe_for(workspace, tied=False)
    LlamaConfig(
        vocab_size=320, max_position_embeddings=128, architectures=["LlamaForCausalLM"], **small
    ).save_pretrained(folder)
    recipe = recipe.model_copy(update={"model": ModelSection(family="hf", path=str(folder))})
    plain = trajectory_of(train_run(recipe, plan_for(recipe, grad_accum=1), workspace / "runs"))
    forbid_logits()
    run = train_run(recipe, plan_for(recipe, grad_accum=2, loss=loss, **plan), workspace / "runs")
    assert_same_trajectory(trajectory_of(run), plain)
