"""fp16 on several ranks: one loss scale for all, and an overflow on any rank skips the step on all."""

import json
import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.cases import quick_or_slow, slow
from tests.environment import CACHE
from tests.parity import plan_for, train_run
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe
from trimaran.parallel import INITIAL_SCALE
from trimaran.runs import Journal, RunDirectory, create_run
from trimaran.train import WorkerParts, build_worker_parts, join_process_group, read_context, read_rank_info, run_worker

PLANS = {
    "one-process": {},
    "ddp-2": {"dp_replicate": 2},
    "fsdp-2": {"dp_shard": 2},
    "tp-2": {"tp": 2},
    "pp-2": {"pp": 2},
}
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
STEPS = 4


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{number} " * 9}) + "\n" for number in range(900)))
    (folder / "runs").mkdir()
    return folder


def recipe_for(workspace: Path, preset: str = "tiny", **train: object) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": preset, "shape": SHAPE},
            "data": {"source": "jsonl", "path": str(workspace / "text.jsonl"), "seq_len": 16},
            "train": {"steps": STEPS, "global_batch": 4, "lr": 2e-2, "save": False, "sample": {"tokens": 0}} | train,
        }
    )


def plan_in(precision: str, recipe: Recipe, name: str, grad_accum: int = 2) -> Plan:
    return plan_for(recipe, grad_accum=grad_accum, **PLANS[name]).model_copy(update={"precision": precision})


def lines(recipe: Recipe, plan: Plan, workspace: Path) -> list[dict[str, float]]:
    run = train_run(recipe, plan, workspace / "runs")
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def column(metrics: list[dict[str, float]], name: str) -> list[Any]:
    return [line[name] for line in metrics]


@lru_cache
def fp32(workspace: Path, preset: str) -> list[dict[str, float]]:
    recipe = recipe_for(workspace, preset)
    return lines(recipe, plan_in("fp32", recipe, "one-process"), workspace)


@pytest.mark.parametrize(
    ("preset", "name"),
    quick_or_slow(
        [*(("tiny", name) for name in PLANS), ("tiny-moe", "ddp-2")],
        lambda case: case == ("tiny", "fsdp-2"),
    ),
)
def test_fp16_follows_fp32_within_its_precision(workspace: Path, preset: str, name: str) -> None:
    recipe, reference = recipe_for(workspace, preset), fp32(workspace, preset)
    metrics = lines(recipe, plan_in("fp16", recipe, name), workspace)
    # The router input is rounded, so a token between two experts may choose the other one.
    tolerance = 1e-4 if preset == "tiny" else 1e-3
    assert column(metrics, "loss") == pytest.approx(column(reference, "loss"), rel=tolerance)
    assert column(metrics, "grad_norm") == pytest.approx(column(reference, "grad_norm"), rel=10 * tolerance)
    assert column(metrics, "loss_scale") == [INITIAL_SCALE] * STEPS
    assert column(metrics, "loss")[-1] < 0.9 * column(metrics, "loss")[0]


def test_only_fp16_reports_a_loss_scale(workspace: Path) -> None:
    assert not any("loss_scale" in line for line in fp32(workspace, "tiny"))


def full_weights(parts: WorkerParts) -> np.ndarray:
    parameters = (each.detach() for each in parts.networks[0].module.parameters())
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in parameters]
    return torch.cat([each.flatten() for each in whole]).numpy()


def overflow_on_one_rank(run: RunDirectory, cache: Path) -> list[tuple[float, float, np.ndarray]]:
    """Return (gradient norm, loss scale, weights) after each of four steps; in the second, rank 1 overflows."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    reports, overflows = [], [False]

    def blow_up(_: object, __: object, logits: torch.Tensor) -> None:
        logits.register_hook(lambda gradient: gradient * (1e6 if overflows[0] else 1))

    with Journal(run, rank_info.rank) as journal:
        parts = build_worker_parts(read_context(run, rank_info, journal, cache=cache))
        parts.networks[0].module.get_submodule("lm_head").register_forward_hook(blow_up)
        stepper = parts.trainer.stepper
        with parts.trainer.loader_from(0) as loader:
            for batch in loader:
                overflows[0] = rank_info.rank == 1 and batch.step == 1
                stepper.step(batch)
                norm, _ = stepper.update(1e-3)
                reports.append((float(norm), stepper.details()()["loss_scale"], full_weights(parts)))
    return reports


@pytest.mark.parametrize("name", [slow("ddp-2"), "fsdp-2"])
def test_an_overflow_on_one_rank_makes_all_ranks_skip_and_halve(workspace: Path, name: str) -> None:
    recipe = recipe_for(workspace, steps=4)
    run = create_run(workspace / "runs" / f"overflow-{name}", recipe, plan_in("fp16", recipe, name))
    one, other = run_ranks(2, overflow_on_one_rank, run, CACHE)
    for reports in (one, other):
        norms, scales, weights = zip(*reports, strict=True)
        assert np.isfinite(norms).tolist() == [True, False, True, True]
        assert list(scales) == [INITIAL_SCALE, INITIAL_SCALE, INITIAL_SCALE / 2, INITIAL_SCALE / 2]
        assert np.array_equal(weights[1], weights[0])
        assert not np.array_equal(weights[2], weights[1])
        assert np.isfinite(weights).all()
    assert all(np.array_equal(mine[2], theirs[2]) for mine, theirs in zip(one, other, strict=True))


def mixed_precision_recipe(workspace: Path, *, tied: bool) -> Recipe:
    recipe = recipe_for(workspace, precision={"lm_head": "fp32", "layers.*.mlp.down_proj": "fp32", "layers.1": "fp16"})
    model = recipe.model.model_copy(update={"shape": SHAPE | {"tied": tied}})
    return recipe.model_copy(update={"model": model})


@lru_cache
def single_process_metrics(workspace: Path, *, tied: bool) -> list[dict[str, float]]:
    recipe = mixed_precision_recipe(workspace, tied=tied)
    return lines(recipe, plan_in("bf16", recipe, "one-process"), workspace)


@pytest.mark.parametrize(
    ("name", "tied"),
    quick_or_slow(
        [(name, tied) for name in ("ddp-2", "fsdp-2", "tp-2") for tied in (True, False)],
        lambda case: case == ("tp-2", True),
    ),
)
def test_modules_with_precision_overrides_match_one_process(workspace: Path, name: str, tied: bool) -> None:
    recipe, alone = mixed_precision_recipe(workspace, tied=tied), single_process_metrics(workspace, tied=tied)
    metrics = lines(recipe, plan_in("bf16", recipe, name), workspace)
    assert column(metrics, "loss") == pytest.approx(column(alone, "loss"), rel=1e-4)
    assert column(metrics, "loss_scale") == [INITIAL_SCALE] * STEPS  # some modules are fp16


@pytest.mark.parametrize("name", ["fsdp-2", slow("ddp-2"), slow("tp-2"), slow("pp-2")])
def test_a_network_with_fp32_modules_evaluates_and_generates_in_bf16(workspace: Path, name: str) -> None:
    asked = {"evaluate": {"every": 1, "batches": 1}, "sample": {"tokens": 2, "prompt": "1"}}
    recipe = recipe_for(workspace, precision={"norm": "fp32", "layers.*.input_layernorm": "fp32"}, steps=2, **asked)
    run = train_run(recipe, plan_in("bf16", recipe, name), workspace / "runs")
    kinds = [json.loads(line)["kind"] for line in run.events(0).read_text().splitlines()]
    logged = [kind for kind in kinds if kind not in ("checkpoint", "loss_bound")]  # logged when a write finishes
    assert logged == ["start", "ready", "evaluation", "started", "trained", "evaluation", "sample", "done"]


@lru_cache
def short_and_plain(workspace: Path, precision: str) -> list[dict[str, float]]:
    recipe = recipe_for(workspace, steps=3, lr=3e-3)
    return lines(recipe, plan_in(precision, recipe, "one-process"), workspace)


OTHERS = (("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"))


@pytest.mark.parametrize(
    ("name", "plan", "all_modules"),
    quick_or_slow(
        [(name, *each) for name in ("one-process", "ddp-2", "fsdp-2", "tp-2") for each in OTHERS],
        lambda case: case == ("one-process", "bf16", "fp32"),
    ),
)
def test_all_modules_in_another_precision_are_that_precision(
    workspace: Path, name: str, plan: str, all_modules: str
) -> None:
    recipe = recipe_for(workspace, precision={"*": all_modules}, steps=3, lr=3e-3)
    metrics = lines(recipe, plan_in(plan, recipe, name), workspace)
    reference = short_and_plain(workspace, all_modules)
    # bf16 shows the order of summation, which differs between one rank and several.
    tolerance = 1e-5 if all_modules == "fp32" else 2e-3
    assert column(metrics, "loss") == pytest.approx(column(reference, "loss"), rel=tolerance)
    assert column(metrics, "grad_norm") == pytest.approx(column(reference, "grad_norm"), rel=tolerance)


def worker(run: RunDirectory, cache: Path) -> int:
    return run_worker(run, read_rank_info(os.environ), cache=cache)


def test_a_module_that_does_not_exist_ends_the_run_before_it_starts(workspace: Path) -> None:
    recipe = recipe_for(workspace, precision={"layers.*.mlp.gate": "fp32"})
    run = create_run(workspace / "runs" / "unknown", recipe, plan_in("bf16", recipe, "one-process"))
    assert run_ranks(1, worker, run, CACHE) == [2]
    error = json.loads(run.events(0).read_text().splitlines()[-1])["data"]
    assert (error["code"], error["where"]) == ("P033", "train.precision")
