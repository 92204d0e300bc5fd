"""DeepSpeed trains the same trajectory as one plain process, and reports why it cannot start."""

import gc
import importlib
import importlib.abc
import json
import math
import os
import sys
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import Trajectory, assert_same_trajectory, train_run, train_trajectory
from tests.ranks import run_ranks
from trimaran.core import Mesh, ModelSection, Plan, Recipe, UserError
from trimaran.data.step_batch import text_batch
from trimaran.parallel import build_mesh
from trimaran.run import RunDirectory, create_run
from trimaran.train.build import build_networks, build_stepper
from trimaran.train.health.guard import Guard
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.process.rank_info import join_process_group, read_rank_info
from trimaran.train.steppers.deepspeed_stepper import load_deepspeed
from trimaran.train.worker import run_worker

# Wide enough that ZeRO-3 shards some matrices (from 10,000 elements) and leaves the others unsharded.
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192}


@pytest.fixture(scope="module", autouse=True)
def deepspeed() -> None:
    """Import the package, and what it imports lazily, once for all forked ranks."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed", reason="needs the extra: pip install trimaran[deepspeed]")
    for late in ("stage3", "muon.muon_optimizer"):
        importlib.import_module(f"deepspeed.runtime.zero.{late}")
    gc.freeze()  # DeepSpeed collects garbage often, which would copy the parent's pages into each rank


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with documents of very different lengths, so that ranks and micro-batches have different counts."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with (folder / "uneven.jsonl").open("w") as file:
        for number in range(900):
            file.write(json.dumps({"text": f"{number} " * (1 + number * number % 23)}) + "\n")
    (folder / "runs").mkdir()
    return folder


def recipe_for(workspace: Path, preset: str = "tiny", **train: object) -> Recipe:
    data = {"source": "jsonl", "path": str(workspace / "uneven.jsonl"), "seq_len": 32, "isolate_documents": True}
    settings = {"steps": 10, "global_batch": 12, "lr": 3e-3, "seed": 3, "schedule": {"warmup_steps": 2}}
    settings |= {"evaluate": {"batches": 0}, "sample": {"tokens": 0}}
    return Recipe.model_validate({"model": {"preset": preset, "shape": SHAPE}, "data": data, "train": settings | train})


def plan_for(sharding: str, *, world: int = 2, offload: str = "none", precision: str = "fp32") -> Plan:
    mesh = Mesh(dp_replicate=world) if sharding == "none" else Mesh(dp_shard=world)
    return Plan.model_validate(
        {
            "mesh": mesh,
            "sharding": sharding,
            "offload": offload,
            "precision": precision,
            "micro_batch": 6 // world,
            "grad_accum": 2,
            "engine": "deepspeed",
        }
    )


@lru_cache
def reference(workspace: Path, preset: str = "tiny") -> Trajectory:
    return train_trajectory(recipe_for(workspace, preset), Plan(micro_batch=12), workspace / "runs")


def event_data(run: RunDirectory, kind: str) -> dict[str, Any]:
    events = [json.loads(line) for line in run.events(0).read_text().splitlines()]
    return next(event["data"] for event in events if event["kind"] == kind)


@pytest.mark.parametrize(
    ("sharding", "offload", "recompute"),
    [
        ("none", "none", "none"),
        ("optimizer", "none", "none"),
        ("gradients", "none", "none"),
        slow(("parameters", "none", "none")),
        slow(("parameters", "none", "full")),
        ("gradients", "optimizer", "none"),
        ("parameters", "parameters", "none"),
    ],
)
def test_every_stage_trains_the_same_trajectory(workspace: Path, sharding: str, offload: str, recompute: str) -> None:
    plan = plan_for(sharding, offload=offload).model_copy(update={"recompute": recompute})
    trajectory = train_trajectory(recipe_for(workspace), plan, workspace / "runs")
    assert_same_trajectory(trajectory, reference(workspace))
    assert trajectory.losses[-1] < 0.9 * trajectory.losses[0], "the loss must fall, or the comparison proves nothing"


def test_experts_train_the_same_trajectory_with_parameters_sharded(workspace: Path) -> None:
    trajectory = train_trajectory(recipe_for(workspace, "tiny-moe"), plan_for("parameters"), workspace / "runs")
    assert_same_trajectory(trajectory, reference(workspace, "tiny-moe"))


def test_the_metrics_are_those_of_the_torch_engine(workspace: Path) -> None:
    recipe = recipe_for(workspace, "tiny-moe", steps=2)
    runs = [train_run(recipe, plan, workspace / "runs") for plan in (Plan(micro_batch=12), plan_for("optimizer"))]
    plain, sharded = (json.loads(run.metrics.read_text().splitlines()[-1]) for run in runs)
    # A single rank has neither of the first two; not every line has the third.
    assert sharded.keys() - {"ranks", "comm_seconds", "loader"} == plain.keys() - {"loader"}
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "samples", "router"):
        assert sharded[name] == pytest.approx(plain[name], rel=1e-5), name
    assert all(sharded["phases"][phase] > 0 for phase in ("data", "forward", "backward", "comm", "optimizer"))


@pytest.mark.slow  # 16-bit matmuls are slow on a CPU
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-2), ("fp16", 2e-3)])
def test_half_precision_stays_close_to_fp32(workspace: Path, precision: str, tolerance: float) -> None:
    run = train_run(recipe_for(workspace), plan_for("gradients", precision=precision), workspace / "runs")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(reference(workspace).losses, rel=tolerance)
    assert [line.get("loss_scale") for line in lines] == [65536.0 if precision == "fp16" else None] * 10


def test_every_precision_starts_from_the_same_weights(workspace: Path) -> None:
    """The learning rate is too small to change a weight. With three ranks, partitions are padded."""
    recipe = recipe_for(workspace, steps=1, lr=1e-14)
    first = train_trajectory(recipe, Plan(micro_batch=12), workspace / "runs").weights
    for sharding in ("gradients", "parameters"):
        weights = train_trajectory(recipe, plan_for(sharding, world=3, precision="bf16"), workspace / "runs").weights
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[name], first[name]) for name in first)


def test_the_network_evaluates_and_generates_as_without_deepspeed(workspace: Path) -> None:
    recipe = recipe_for(workspace, steps=3, evaluate={"batches": 2}, sample={"tokens": 8, "temperature": 0})
    plain, sharded = (
        train_run(recipe, plan, workspace / "runs") for plan in (Plan(micro_batch=12), plan_for("parameters"))
    )
    assert event_data(sharded, "evaluation")["loss"] == pytest.approx(event_data(plain, "evaluation")["loss"], rel=1e-5)
    assert event_data(sharded, "sample")["text"] == event_data(plain, "sample")["text"]


@pytest.mark.slow
def test_a_hugging_face_model_trains_the_same_trajectory(workspace: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    recipe = recipe_for(workspace).model_copy(update={"model": ModelSection(family="hf", path=str(tmp_path))})
    trajectory = train_trajectory(recipe, plan_for("parameters"), workspace / "runs")
    assert_same_trajectory(trajectory, train_trajectory(recipe, Plan(micro_batch=12), workspace / "runs"))
    assert trajectory.weights.keys() == load_file(tmp_path / "model.safetensors").keys()


def names_and_held_elements(recipe: Recipe, plan: Plan) -> tuple[list[str], int]:
    """Return the names of the parameters, and how many elements of the large ones this rank holds between steps."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device))
    parameters = dict(networks[0].module.named_parameters())
    split = [each for each in parameters.values() if getattr(each, "ds_numel", 0) > 10_000]
    return list(parameters), sum(each.numel() + each.ds_tensor.numel() for each in split)  # pyrefly: ignore[missing-attribute]


def test_parameters_keep_their_names_and_each_rank_holds_half(workspace: Path) -> None:
    recipe = recipe_for(workspace)
    whole = {name: each.numel() for name, each in reference(workspace).weights.items()}
    large = sum(size for size in whole.values() if size > 10_000)
    for names, elements in run_ranks(2, names_and_held_elements, recipe, plan_for("parameters")):
        assert {name if name.startswith("lm_head") else f"model.{name}" for name in names} == whole.keys()
        assert elements == large // 2


def steps_with_logits_times(recipe: Recipe, plan: Plan, factors: list[float]) -> list[tuple[float, bool, bool]]:
    """Run steps whose logits are multiplied by `factors`.

    Returns for each the gradient norm, whether the step was refused, and whether anything changed.
    """
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    guard, found = Guard(), []
    guard.restore({"mean": 5.0, "good_steps": 100, "in_a_row": 0})
    stepper: Any = build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device), guard)
    networks[0].module.register_forward_hook(lambda module, given, out: (out[0] * factors[len(found)], out[1]))

    def state() -> list[torch.Tensor]:
        states = stepper._engine.basic_optimizer.state.values()
        weights = [tensor for _, tensor in networks[0].disk_tensors()]
        return weights + [each.clone() for state in states for each in state.values()]

    tokens = torch.arange(2 * 6 * 32).view(2, 6, 32) % 100
    before = state()
    for _ in factors:
        stepper.step(text_batch(0, tokens, tokens.flip(2)))
        norm, refused = stepper.update(1e-3)
        after = state()
        found.append((norm.item(), bool(refused), not all(map(torch.equal, before, after))))
        before = after
    return found


@pytest.mark.parametrize(
    ("sharding", "precision"),
    [
        slow(("none", "fp32")),
        slow(("optimizer", "bf16")),
        ("gradients", "fp32"),
        slow(("parameters", "bf16")),
        slow(("gradients", "fp16")),
    ],
)
def test_a_step_with_a_nan_or_a_loss_spike_changes_nothing(workspace: Path, sharding: str, precision: str) -> None:
    plan, factors = plan_for(sharding, world=1, precision=precision), [1.0, math.nan, 1e4, 1.0]
    (found,) = run_ranks(1, steps_with_logits_times, recipe_for(workspace), plan, factors)
    norms, refused, moved = zip(*found, strict=True)
    assert [math.isfinite(norm) for norm in norms] == [True, False, precision != "fp16", True]
    assert list(refused) == [False, True, True, False]
    assert list(moved) == [True, False, False, True]


class Blocker(importlib.abc.MetaPathFinder):
    """Makes imports of DeepSpeed fail, as in an environment without it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name=name)
        return None


def forget_deepspeed() -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def work_without_deepspeed(path: Path, cache: Path) -> int:
    forget_deepspeed()
    sys.meta_path.insert(0, Blocker())
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def test_a_missing_package_is_reported_with_the_command_to_install_it(workspace: Path, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", recipe_for(workspace), plan_for("optimizer", world=1))
    assert run_ranks(1, work_without_deepspeed, run.path, CACHE) == [2]
    error = event_data(run, "error")
    assert (error["code"], error["where"]) == ("P037", "plan.engine")
    assert "pip install 'trimaran[deepspeed]'" in error["fix"]


def message_for(accelerator: str) -> str:
    forget_deepspeed()
    os.environ["DS_ACCELERATOR"] = accelerator
    with pytest.raises(UserError) as caught:
        load_deepspeed("cpu")
    return str(caught.value)


def test_an_accelerator_other_than_the_runs_device_is_refused() -> None:
    with pytest.raises(UserError, match="P038: DeepSpeed has chosen to compute on cpu, and this run computes on cuda"):
        load_deepspeed("cuda")
    (event_data,) = run_ranks(1, message_for, "abacus")
    assert event_data.startswith("P038")
    assert "DS_ACCELERATOR=cpu" in event_data
