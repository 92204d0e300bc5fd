"""DeepSpeed trains the same trajectory as one plain process, and reports why it cannot start."""

import importlib.abc
import json
import math
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests import parity, resume
from tests.dist.test_resume import assert_exact_resume
from tests.environment import CACHE
from tests.parity import TOLERANCE, Trajectory, assert_same_trajectory, train_run, train_trajectory
from tests.ranks import run_ranks
from tests.resume import SEGMENT_STEPS
from trimaran.core import Mesh, ModelSection, Plan, Recipe, UserError
from trimaran.data import text_batch
from trimaran.nets import Network
from trimaran.parallel import build_mesh, copy_values
from trimaran.runs import RunDirectory, create_run
from trimaran.train import (
    Guard,
    StepClock,
    build_networks,
    build_stepper,
    join_process_group,
    load_deepspeed,
    read_rank_info,
    regions_of_range,
    run_worker,
)

# Wide enough that ZeRO-3 shards some matrices (from 10,000 elements) and leaves the others unsharded.
SHAPE = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 192}


pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs trimaran[deepspeed]")


@pytest.fixture(autouse=True)
def _computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "offload", "recompute"),
    [
        ("none", "none", "none"),
        ("optimizer", "none", "none"),
        ("gradients", "optimizer", "none"),
        ("parameters", "none", "full"),
        ("parameters", "parameters", "none"),
    ],
)
def test_every_stage_trains_the_same_trajectory(workspace: Path, sharding: str, offload: str, recompute: str) -> None:
    plan = plan_for(sharding, offload=offload).model_copy(update={"recompute": recompute})
    trajectory = train_trajectory(recipe_for(workspace), plan, workspace / "runs")
    assert_same_trajectory(trajectory, reference(workspace))
    assert trajectory.losses[-1] < 0.9 * trajectory.losses[0], "the loss must fall, or the comparison proves nothing"


@pytest.mark.slow
def test_experts_train_the_same_trajectory_with_parameters_sharded(workspace: Path) -> None:
    trajectory = train_trajectory(recipe_for(workspace, "tiny-moe"), plan_for("parameters"), workspace / "runs")
    assert_same_trajectory(trajectory, reference(workspace, "tiny-moe"))


@pytest.mark.slow  # 16-bit matmuls are slow on a CPU
@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 1e-2), ("fp16", 2e-3)])
def test_half_precision_stays_close_to_fp32(workspace: Path, precision: str, tolerance: float) -> None:
    run = train_run(recipe_for(workspace), plan_for("gradients", precision=precision), workspace / "runs")
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(reference(workspace).losses, rel=tolerance)
    assert [line.get("loss_scale") for line in lines] == [65536.0 if precision == "fp16" else None] * 10


@pytest.mark.slow
def test_every_precision_starts_from_the_same_weights(workspace: Path) -> None:
    """The learning rate is too small to change a weight. With three ranks, partitions are padded."""
    recipe = recipe_for(workspace, steps=1, lr=1e-14)
    first = train_trajectory(recipe, Plan(micro_batch=12), workspace / "runs").weights
    for sharding in ("gradients", "parameters"):
        weights = train_trajectory(recipe, plan_for(sharding, world=3, precision="bf16"), workspace / "runs").weights
        assert weights.keys() == first.keys()
        assert all(torch.equal(weights[name], first[name]) for name in first)


@pytest.mark.slow
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


def names_and_held_elements(recipe: Recipe, plan: Plan) -> tuple[dict[str, int], int]:
    """Return the sizes of the parameters by name, and how many elements of the large ones this rank holds."""
    networks, _ = built(recipe, plan)
    parameters = dict(networks[0].module.named_parameters())
    split = [each for each in parameters.values() if getattr(each, "ds_numel", 0) > 10_000]
    held = sum(each.numel() + each.ds_tensor.numel() for each in split)  # pyrefly: ignore[missing-attribute]
    return {name: getattr(each, "ds_numel", each.numel()) for name, each in parameters.items()}, held


def built(recipe: Recipe, plan: Plan, guard: Guard | None = None) -> tuple[tuple[Network, ...], Any]:
    """Return the networks of this rank and their stepper."""
    rank_info = read_rank_info(os.environ)
    if not dist.is_initialized():
        join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    return networks, build_stepper(networks, recipe.train, plan, ranks, StepClock(rank_info.device), guard)


def steps_with_logits_times(recipe: Recipe, plan: Plan, factors: list[float]) -> list[tuple[float, bool, bool]]:
    """Run steps whose logits are multiplied by `factors`.

    Returns for each the gradient norm, whether the step was refused, and whether anything changed.
    """
    guard, found = Guard(), []
    guard.restore({"mean": 5.0, "good_steps": 100, "in_a_row": 0})
    networks, stepper = built(recipe, plan, guard)
    networks[0].module.register_forward_hook(lambda module, given, out: (out[0] * factors[len(found)], out[1]))
    held = stepper.state(recipe.train)

    def state() -> list[torch.Tensor]:
        held.gather()
        found = [torch.empty(each.tensor.shape, dtype=each.tensor.dtype) for each in held.shards()]
        for each, copy in zip(held.shards(), found, strict=True):
            copy_values(each.tensor, copy)
        return found

    tokens = torch.arange(2 * 6 * 32).view(2, 6, 32) % 100
    before = state()
    for _ in factors:
        stepper.step(text_batch(0, tokens, tokens.flip(2)))
        norm, refused = stepper.update(1e-3)
        after = state()
        found.append((norm.item(), bool(refused), not all(map(torch.equal, before, after))))
        before = after
    return found


FACTORS = [1.0, math.nan, 1e4, 1.0]


def assert_bad_steps_change_nothing(found: list[tuple[float, bool, bool]], precision: str) -> None:
    norms, refused, moved = zip(*found, strict=True)
    assert [math.isfinite(norm) for norm in norms] == [True, False, precision != "fp16", True]
    assert list(refused) == [False, True, True, False]
    assert list(moved) == [True, False, False, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sharding", "precision"),
    [("none", "fp32"), ("optimizer", "bf16"), ("parameters", "bf16"), ("gradients", "fp16")],
)
def test_a_step_with_a_nan_or_a_loss_spike_changes_nothing(workspace: Path, sharding: str, precision: str) -> None:
    plan = plan_for(sharding, world=1, precision=precision)
    (found,) = run_ranks(1, steps_with_logits_times, recipe_for(workspace), plan, FACTORS)
    assert_bad_steps_change_nothing(found, precision)


def message_for(device: str) -> str:
    with pytest.raises(UserError) as caught:
        load_deepspeed(device)
    return str(caught.value)


RESUMED = resume.recipe_for(shape={"layers": 2, "hidden": 64, "head_dim": 16, "ffn": 192})


def zero(sharding: str, *, world: int = 2, **fields: Any) -> Plan:
    axis = "dp_replicate" if sharding == "none" else "dp_shard"
    fields |= {"mesh": {axis: world}, "sharding": sharding, "micro_batch": 12 // world, "engine": "deepspeed"}
    return Plan.model_validate(fields)


CHAIN = (
    parity.plan_for(RESUMED, grad_accum=1, dp_shard=2),
    zero("optimizer"),
    zero("parameters", offload="parameters"),
    zero("none"),
    zero("gradients", offload="optimizer"),
    parity.plan_for(RESUMED, grad_accum=1, dp_replicate=2),
)


@dataclass(frozen=True)
class Examined:
    """What a rank found. Each imports DeepSpeed once, which takes as long as everything else."""

    names: list[tuple[dict[str, int], int]]  # with torch, and with ZeRO-3
    bad_steps: list[tuple[float, bool, bool]]
    chain: list[Any]
    on_cuda: str
    exit_code: int


def examine(recipe: Recipe, path: Path) -> Examined:
    plans = Plan(mesh=Mesh(dp_replicate=2), micro_batch=3, grad_accum=2), plan_for("parameters")
    return Examined(
        names=[names_and_held_elements(recipe, plan) for plan in plans],
        bad_steps=steps_with_logits_times(recipe, plan_for("gradients"), FACTORS),
        chain=resume.chain_results(RESUMED, CHAIN, SEGMENT_STEPS),
        on_cuda=message_for("cuda"),
        exit_code=run_worker(RunDirectory(path), read_rank_info(os.environ), cache=CACHE),  # it leaves the group
    )


def mixture(workspace: Path) -> Recipe:
    return recipe_for(workspace, "tiny-moe", steps=2)


@pytest.fixture(scope="module")
def sharded(workspace: Path) -> RunDirectory:
    return create_run(workspace / "runs" / "sharded", mixture(workspace), plan_for("optimizer"))


@pytest.fixture(scope="module")
def examined(workspace: Path, sharded: RunDirectory) -> list[Examined]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        return run_ranks(2, examine, recipe_for(workspace), sharded.path)


def test_parameters_keep_their_names_and_each_rank_holds_half(examined: list[Examined]) -> None:
    for found in examined:
        (usual, _), (sizes, held) = found.names
        assert sizes == usual
        assert held == sum(size for size in sizes.values() if size > 10_000) // 2


def test_a_nan_or_a_loss_spike_changes_nothing_on_any_rank(examined: list[Examined]) -> None:
    for found in examined:
        assert_bad_steps_change_nothing(found.bad_steps, "fp32")


def test_a_run_that_switches_between_deepspeed_and_torch_has_the_same_losses(examined: list[Examined]) -> None:
    segments = resume.chain_segments([found.chain for found in examined], SEGMENT_STEPS)
    for before, segment in pairwise(segments):
        segment.assert_loaded(before.saved)
    alone = parity.plan_for(RESUMED, grad_accum=1)
    expected = resume.train_segment(RESUMED, alone, steps=SEGMENT_STEPS * len(CHAIN)).losses
    assert [loss for segment in segments for loss in segment.losses] == pytest.approx(expected, rel=TOLERANCE)
    assert expected[-1] < expected[0], "the loss must fall, or the comparison proves nothing"


def test_the_metrics_are_those_of_the_torch_engine(
    workspace: Path, examined: list[Examined], sharded: RunDirectory
) -> None:
    assert [found.exit_code for found in examined] == [0, 0]
    alone = train_run(mixture(workspace), Plan(micro_batch=12), workspace / "runs")
    plain, ours = (json.loads(run.metrics.read_text().splitlines()[-1]) for run in (alone, sharded))
    # A single rank has neither of the first two; not every line has the third.
    assert ours.keys() - {"ranks", "comm_seconds", "loader"} == plain.keys() - {"loader"}
    for name in ("step", "loss", "grad_norm", "lr", "tokens", "samples", "router"):
        assert ours[name] == pytest.approx(plain[name], rel=1e-5), name
    assert all(ours["phases"][phase] > 0 for phase in ("data", "forward", "backward", "comm", "optimizer"))


class Blocker(importlib.abc.MetaPathFinder):
    """Makes imports of DeepSpeed fail, as in an environment without it."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name=name)
        return None


def work_without_deepspeed(path: Path, cache: Path) -> int:
    sys.meta_path.insert(0, Blocker())
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def test_a_missing_package_is_reported_with_the_command_to_install_it(workspace: Path, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", recipe_for(workspace), plan_for("optimizer", world=1))
    assert run_ranks(1, work_without_deepspeed, run.path, CACHE) == [2]
    error = event_data(run, "error")
    assert (error["code"], error["where"]) == ("P037", "plan.engine")
    assert "pip install 'trimaran[deepspeed]'" in error["fix"]


def test_an_accelerator_other_than_the_runs_device_is_refused(
    examined: list[Examined], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = "P038: DeepSpeed has chosen to compute on cpu, and this run computes on cuda"
    assert all(found.on_cuda.startswith(expected) for found in examined)
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    (message,) = run_ranks(1, message_for, "cpu")
    assert message.startswith("P038")
    assert "DS_ACCELERATOR=cpu" in message


@pytest.mark.slow
def test_a_resume_under_the_same_plan_is_exact() -> None:
    plan = zero("gradients", precision="fp16")
    full = resume.train_segment(RESUMED, plan, steps=2 * SEGMENT_STEPS)
    assert_exact_resume(RESUMED, plan, full)
    assert full.saved.progress["loss_scale"] == {"value": 65536.0, "good_steps": 2 * SEGMENT_STEPS}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_compute_weights_are_rounded_from_the_saved_weights(sharding: str) -> None:
    plan = zero(sharding, precision="bf16", world=3)
    assert_exact_resume(RESUMED, plan, resume.train_segment(RESUMED, plan, steps=2 * SEGMENT_STEPS))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
@settings(deadline=None)
def test_a_flat_range_is_a_few_regions(shape: list[int], data: st.DataObject) -> None:
    count = math.prod(shape)
    first, last = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    found = list(regions_of_range(tuple(shape), first, last))
    spans = [
        (sum(at * math.prod(shape[d + 1 :]) for d, at in enumerate(start)), math.prod(size)) for start, size in found
    ]
    assert sum(size for _, size in spans) == last - first
    assert all(begin + size == after for (begin, size), (after, _) in pairwise(spans))
    assert not spans or spans[0][0] == first
    assert len(found) <= max(1, 2 * len(shape) - 1)
