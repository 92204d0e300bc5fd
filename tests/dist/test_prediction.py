"""Multi-token prediction trains the same trajectory under combined plans as in one process."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.cases import quick_or_slow
from tests.parity import Trajectory, assert_same_trajectory, plan_for, train_run, trajectory_of
from tests.prediction_models import save_predicting
from trimaran.checkpoint import DiskSource, export_hf
from trimaran.core import Recipe
from trimaran.runs import RunDirectory

OWN_STAGES = "pp-own-stages"
PLANS: dict[str, dict[str, Any]] = {
    "fsdp-tp-ep": {"dp_shard": 2, "tp": 2, "ep": 2},
    "pp-cp": {"pp": 2, "cp": 2, "grad_accum": 2},
    "ddp-2-fused": {"dp_replicate": 2, "loss": "fused"},
    "fsdp-2-recompute-chunked": {"dp_shard": 2, "recompute": "full", "loss": "chunked"},
    "optimizer-2": {"dp_shard": 2, "sharding": "optimizer", "grad_accum": 2},
    "gradients-2": {"dp_shard": 2, "sharding": "gradients", "grad_accum": 2, "recompute": 2},
    "pp-tp": {"pp": 2, "tp": 2, "grad_accum": 2},
    "pp-fsdp": {"pp": 2, "dp_shard": 2, "grad_accum": 2},
    OWN_STAGES: {"pp": 2, "grad_accum": 4},
    "interleaved": {"pp": 2, "grad_accum": 2, "pipeline": {"schedule": "interleaved"}},
    "cp-exchange-ep": {"cp": 2, "ep": 2, "comm": {"context": "exchange"}},
    "cp-ring": {"cp": 2, "comm": {"context": "ring"}},
}
MODELS = {"deepseek-v3": 2, "glm-4.5": 1}
QUICK = {("deepseek-v3", "pp-cp")}  # both shift the labels in their own way


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prediction")
    (folder / "runs").mkdir()
    return folder


@lru_cache
def recipe_for(workspace: Path, name: str) -> Recipe:
    save_predicting(name, workspace / name, MODELS[name])
    return Recipe.model_validate(
        {
            "model": {
                "path": str(workspace / name),
                "shape": {"experts": {"router": {"correction_rate": 0.02}}},
                "multi_token_prediction": {"layers": MODELS[name], "weight": 0.4},
            },
            "data": {"seq_len": 16, "isolate_documents": True},
            "train": {"steps": 2, "global_batch": 8, "lr": 1e-3, "seed": 3, "sample": {"tokens": 0}},
        }
    )


@lru_cache
def run_of(workspace: Path, name: str, plan: str) -> RunDirectory:
    recipe = recipe_for(workspace, name)
    fields = {"grad_accum": 1} | (PLANS[plan] if plan else {})
    if plan == OWN_STAGES:
        fields["pipeline"] = {"stages": (3, MODELS[name])}
    return train_run(recipe, plan_for(recipe, **fields), workspace / "runs")


@lru_cache
def trained(workspace: Path, name: str, plan: str) -> tuple[Trajectory, list[list[float]]]:
    """Return the trajectory of a plan, and the losses of later tokens of each step."""
    run = run_of(workspace, name, plan)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    names = [f"mtp-{number}" for number in range(1, MODELS[name] + 1)]
    return trajectory_of(run), [[line["losses"][each] for each in names] for line in lines]


@pytest.mark.parametrize(
    ("name", "plan"), quick_or_slow([(name, plan) for name in MODELS for plan in PLANS], QUICK.__contains__)
)
def test_every_plan_trains_the_same_trajectory(workspace: Path, name: str, plan: str) -> None:
    (expected, expected_later), (found, later) = trained(workspace, name, ""), trained(workspace, name, plan)
    assert_same_trajectory(found, expected)
    for ours, theirs in zip(later, expected_later, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    copies = [key for key in found.weights if key.endswith(("shared_head.head.weight", "layers.3.embed_tokens.weight"))]
    assert len(copies) == MODELS[name] + 1
    assert found.weights["model.layers.3.embed_tokens.weight"].equal(found.weights["model.embed_tokens.weight"])


def test_a_checkpoint_is_exported_as_the_run_wrote_it(workspace: Path) -> None:
    run, target = run_of(workspace, "deepseek-v3", ""), workspace / "exported"
    (step,) = (run.path / "checkpoints").glob("step-*")
    export_hf(DiskSource(step), run.read_recipe().model, target, dtype="fp32", add_files=lambda _: None,
              progress=lambda *_: None)  # fmt: skip
    written, expected = (load_file(next(folder.glob("*.safetensors"))) for folder in (target, run.model))
    assert written.keys() == expected.keys()
    assert all(each.equal(expected[name]) for name, each in written.items())
