"""A head that ends in the loss trains the course of one that ends in logits, under every plan that allows it."""

import json
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tests.cases import quick_or_slow, slow
from tests.parity import TOLERANCE, Trajectory, assert_same_course, plan_for, sail_to, trajectory_of
from tests.seeing import SPEC, TIED, TRAIN, Course, assert_alike, courses, plan_of
from trimaran.core import ModelSection, Recipe
from trimaran.models import VlmSpec
from trimaran.run import RunDirectory
from trimaran.train.loss import head_loss
from trimaran.train.loss import objective

PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp-2": {"dp_replicate": 2},
    "ddp-3": {"dp_replicate": 3},  # with three or more DDP looks for unused parameters
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
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even these rows be too many for one piece; ranks are forked, so they inherit it."""
    monkeypatch.setattr(head_loss, "piece_rows", lambda *_: 50)


@pytest.fixture(scope="module")
def harbour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head-loss")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(harbour: Path, *, tied: bool) -> Recipe:
    data = {"source": "jsonl", "path": str(harbour / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    train = {"steps": 8, "global_batch": 12, "lr": 3e-3, "seed": 3, "sample": {"tokens": 0}}
    return Recipe.model_validate(
        {"model": {"preset": "tiny", "shape": SHAPE | {"tied": tied}}, "data": data, "train": train}
    )


def held_out(run: RunDirectory) -> float:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return next(each["data"]["loss"] for each in events if each["kind"] == "evaluation")


def sailed(harbour: Path, *, tied: bool, **fields: Any) -> tuple[Trajectory, float]:
    """Return the course of a plan and the held-out loss at its end."""
    recipe = recipe_for(harbour, tied=tied)
    run = sail_to(recipe, plan_for(recipe, **{"grad_accum": 2} | fields), harbour / "runs")
    return trajectory_of(run), held_out(run)


@pytest.fixture
def no_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes the ranks that are forked from then on fail if they judge by logits."""

    def refuse(*_: object) -> None:
        raise AssertionError("there should be no logits")

    return lambda: monkeypatch.setattr(objective, "summed_loss", refuse)


@lru_cache
def by_logits(harbour: Path, precision: str, *, tied: bool) -> tuple[Trajectory, float]:
    return sailed(harbour, tied=tied, precision=precision)


@pytest.mark.parametrize(
    ("plan", "loss", "tied"),
    quick_or_slow(
        [(plan, loss, tied) for plan in PLANS for loss in ("fused", "chunked") for tied in (False, True)],
        QUICK.__contains__,
    ),
)
def test_the_course_is_that_of_logits_under_every_plan(
    harbour: Path, no_logits: Callable[[], None], plan: str, loss: str, tied: bool
) -> None:
    reference, measured = by_logits(harbour, "fp32", tied=tied)
    no_logits()
    course, found = sailed(harbour, tied=tied, loss=loss, **PLANS[plan])
    assert_same_course(course, reference)
    assert found == pytest.approx(measured, rel=TOLERANCE)
    assert course.losses[-1] < 0.95 * course.losses[0], "a course that goes nowhere proves nothing"


@pytest.mark.parametrize(
    ("precision", "plan", "loss"),
    quick_or_slow(
        [(each, plan, loss) for each in ("bf16", "fp16") for plan in PLANS for loss in ("fused", "chunked")],
        {("bf16", "fsdp-2", "fused"), ("fp16", "one process", "fused")}.__contains__,
    ),
)
def test_in_16_bits_it_is_so_within_their_precision(
    harbour: Path, no_logits: Callable[[], None], precision: str, plan: str, loss: str
) -> None:
    reference, measured = by_logits(harbour, precision, tied=False)
    no_logits()
    course, found = sailed(harbour, tied=False, precision=precision, loss=loss, **PLANS[plan])
    near = 1e-3 if precision == "bf16" else 1e-4
    assert course.losses == pytest.approx(reference.losses, rel=near)
    assert course.norms == pytest.approx(reference.norms, rel=10 * near)
    assert found == pytest.approx(measured, rel=near)


@cache
def seen_by_logits(spec: VlmSpec, freeze: tuple[str, ...]) -> Course:
    return courses(spec, plan_of(grad_accum=1), TRAIN, freeze)[0]


@pytest.mark.parametrize(
    ("plan", "tied", "freeze"),
    [
        ({}, False, ("language",)),
        ({"mesh": {"dp_replicate": 2}}, True, ("vision",)),
        ({"mesh": {"dp_shard": 2}, "sharding": "parameters"}, False, ("language",)),
        ({"mesh": {"cp": 2}}, True, ()),
    ],
)
def test_a_model_that_sees_and_towers_that_are_frozen(
    no_logits: Callable[[], None], plan: dict[str, Any], tied: bool, freeze: tuple[str, ...]
) -> None:
    spec = TIED if tied else SPEC
    reference = seen_by_logits(spec, freeze)
    no_logits()
    assert_alike(courses(spec, plan_of(**plan, loss="chunked"), TRAIN, freeze), reference)


@pytest.mark.parametrize(("plan", "loss"), [({}, "chunked"), slow(({"dp_shard": 2}, "fused"))])
def test_a_hugging_face_model_is_judged_at_its_own_head(
    harbour: Path, no_logits: Callable[[], None], plan: dict[str, Any], loss: str
) -> None:
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder, recipe = harbour / "llama", recipe_for(harbour, tied=False)
    LlamaConfig(
        vocab_size=320, max_position_embeddings=128, architectures=["LlamaForCausalLM"], **small
    ).save_pretrained(folder)
    recipe = recipe.model_copy(update={"model": ModelSection(family="hf", path=str(folder))})
    plain = trajectory_of(sail_to(recipe, plan_for(recipe, grad_accum=1), harbour / "runs"))
    no_logits()
    run = sail_to(recipe, plan_for(recipe, grad_accum=2, loss=loss, **plan), harbour / "runs")
    assert_same_course(trajectory_of(run), plain)
