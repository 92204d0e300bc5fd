"""A fused or chunked loss trains the same trajectory as full logits, under every plan that allows it.

`tests/unit/test_head_loss.py` cuts rows into several chunks, and sees that no logits exist.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from tests import plan_training, vlm_training
from tests.cases import slow
from tests.hf_models import save_model
from tests.parity import TOLERANCE, Trajectory, assert_same_trajectory, plan_for, train_run, trajectory_of
from trimaran.core import Recipe
from trimaran.runs import RunDirectory

PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "ddp-2": {"dp_replicate": 2},
    "ddp-3": {"dp_replicate": 3},  # with three or more ranks DDP searches unused parameters
    "fsdp-2": {"dp_shard": 2},
    "zero-2": {"dp_shard": 2, "sharding": "gradients"},
    "cp-2": {"cp": 2},
    "fsdp-2 x cp-2": {"dp_shard": 2, "cp": 2},
}
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}


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


@lru_cache
def with_logits(workspace: Path, precision: str, *, tied: bool) -> tuple[Trajectory, float]:
    return train_plan(workspace, tied=tied, precision=precision)


@pytest.mark.parametrize(
    ("plan", "loss", "tied"),
    [
        ("ddp-3", "fused", True),
        *[slow((plan, loss, tied)) for plan in PLANS for loss, tied in (("fused", False), ("chunked", True))],
    ],
)
def test_a_run_trains_and_evaluates_as_with_logits(workspace: Path, plan: str, loss: str, tied: bool) -> None:
    reference, measured = with_logits(workspace, "fp32", tied=tied)
    trajectory, found = train_plan(workspace, tied=tied, loss=loss, **PLANS[plan])
    assert_same_trajectory(trajectory, reference)
    assert found == pytest.approx(measured, rel=TOLERANCE)
    assert trajectory.losses[-1] < 0.95 * trajectory.losses[0], "the loss must fall, or the comparison proves nothing"


def test_every_plan_trains_as_with_logits(tmp_path: Path) -> None:
    def recipe(tied: bool) -> Recipe:
        return plan_training.recipe_of({"preset": "tiny", "shape": SHAPE | {"tied": tied}})

    hf = plan_training.recipe_of({"family": "hf", "path": str(save_model("llama", tmp_path))})
    alone = [(recipe(True), "chunked"), (recipe(False), "fused"), (hf, "chunked")]
    plan_training.assert_each_trains_as_one_process([
        (each, plan_for(each, grad_accum=2, loss=loss)) for each, loss in alone
    ])  # fmt: skip
    on_two_ranks = [(False, "chunked", "ddp-2"), (True, "chunked", "fsdp-2"), (False, "fused", "cp-2")]
    plan_training.assert_each_trains_as_one_process([
        (recipe(tied), plan_for(recipe(tied), grad_accum=2, loss=loss, **PLANS[plan]))
        for tied, loss, plan in on_two_ranks
    ])  # fmt: skip


@pytest.mark.slow  # 16-bit matmuls are slow on a CPU
@pytest.mark.parametrize(
    ("precision", "plan", "loss"),
    [(each, plan, loss) for each in ("bf16", "fp16") for plan in PLANS for loss in ("fused", "chunked")],
)
def test_in_16_bits_the_trajectory_is_that_of_logits_within_their_precision(
    workspace: Path, precision: str, plan: str, loss: str
) -> None:
    reference, measured = with_logits(workspace, precision, tied=False)
    trajectory, found = train_plan(workspace, tied=False, precision=precision, loss=loss, **PLANS[plan])
    near = 1e-3 if precision == "bf16" else 1e-4
    assert trajectory.losses == pytest.approx(reference.losses, rel=near)
    assert trajectory.norms == pytest.approx(reference.norms, rel=10 * near)
    assert found == pytest.approx(measured, rel=near)


def test_a_vision_language_model_with_frozen_towers_trains_the_same_trajectory() -> None:
    plans = [
        vlm_training.plan_of(mesh=mesh, sharding=sharding, loss="chunked")
        for mesh, sharding in (({"dp_replicate": 2}, "none"), ({"dp_shard": 2}, "parameters"), ({"cp": 2}, "none"))
    ]
    cases = [
        vlm_training.Case(vlm_training.TIED, plans[0], freeze=("vision",)),
        vlm_training.Case(vlm_training.SPEC, plans[1], freeze=("language",)),
        vlm_training.Case(vlm_training.TIED, plans[2]),
    ]  # fmt: skip
    vlm_training.assert_each_trains_as_one_process({str(each.plan): each for each in cases})
