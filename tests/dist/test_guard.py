"""NaN, loss spikes, bad samples and stop requests: all ranks do the same, and no progress is lost."""

import json
import math
import os
import re
import signal
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.cases import slow
from tests.environment import CACHE
from tests.parity import plan_for
from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe, TrainSection
from trimaran.data import DataShare, StepBatch, TokenShards, positions, prepare, split
from trimaran.nets import Network, local_part
from trimaran.parallel import LossScale
from trimaran.runs import RunDirectory, create_run
from trimaran.train import (
    Checkpointer,
    PlainStepper,
    ReplicaCheck,
    StepDecision,
    Updater,
    build,
    rank_context,
    read_rank_info,
    run_worker,
)
from trimaran.train.features.compressed_gradients import CompressedGradients
from trimaran.train.health import guard
from trimaran.train.steppers import torch_engine

SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
BAD = 4  # the step that goes wrong


def recipe_with(**sections: dict[str, object]) -> Recipe:
    tree: dict[str, dict[str, object]] = {
        "model": {"preset": "tiny", "shape": SHAPE},
        "data": {"seq_len": 16},
        "train": {"steps": 6, "global_batch": 4, "sample": {"tokens": 0}, "evaluate": {"batches": 0}, "save": False},
        "checkpoint": {"every": 0, "memory": 1},
        "faults": {},
    }
    for name, fields in sections.items():
        tree[name] |= fields
    return Recipe.model_validate(tree)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (folder := tmp_path_factory.mktemp("guards") / "runs").mkdir()
    return folder


def run_of(folder: Path, recipe: Recipe, plan: Plan) -> RunDirectory:
    return create_run(folder / str(len(list(folder.iterdir()))), recipe, plan)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(run: RunDirectory, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [each for each in lines(run.events(rank)) if each["kind"] == kind]


def checkpoints(run: RunDirectory) -> list[str]:
    return sorted(each.name for each in run.checkpoints.glob("step-*"))


def samples_of(run: RunDirectory, step: int, rank: int = 0) -> list[int]:
    """Return the samples that a data rank works on at `step`, which counts from 1."""
    recipe, plan = run.read_recipe(), run.read_plan()
    training, _ = split(TokenShards.open(prepare(recipe.data, cache=CACHE)), recipe.data)
    share = DataShare(rank=rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    return positions(recipe.train.seed, share.indices(step - 1).ravel(), len(training)).tolist()


@dataclass(frozen=True)
class Fault:
    """What one rank's network multiplies its output with, or the gradient of it, at steps `step` to `last`.

    It also happens when the samples of these steps come again. `repeats`: also when there are no samples.
    """

    rank: int = 1
    output: float = 1.0
    gradient: float = 1.0
    step: int = BAD
    last: int = BAD
    repeats: bool = False


NAN = Fault(output=math.nan)


def plant(fault: Fault, grad_accum: int) -> None:
    """Add the fault to the networks that this process will build."""
    build_networks, seen = build.build_networks, []

    def corrupt(module: torch.nn.Module, args: Any, fields: dict[str, Any], out: tuple[Tensor, Tensor]) -> Any:
        if not module.training:
            return out
        tokens = fields["tokens"]
        seen.append(tokens.clone())
        number = (len(seen) - 1) // grad_accum + 1
        again = number > fault.last and any(torch.equal(tokens, each) for each in seen[fault.step - 1 : fault.last])
        if not (fault.step <= number <= fault.last or again or (fault.repeats and not tokens.any())):
            return out
        logits = out[0] * fault.output
        if logits.requires_grad:  # not in the forward of the NaN search
            logits.register_hook(lambda gradient: gradient * fault.gradient)
        return logits, out[1]

    def with_fault(*args: Any) -> tuple[Network, ...]:
        networks = build_networks(*args)
        networks[-1].module.register_forward_hook(corrupt, with_kwargs=True)
        return networks

    build.build_networks = with_fault  # pyrefly: ignore[bad-assignment]


def watch_optimizer() -> list[Optimizer]:
    """Return a list that gets the optimizer of this process once it is built."""
    build_optimizer, built = torch_engine.build_optimizer, list[Optimizer]()

    def noted(*args: Any, **options: Any) -> Optimizer:
        built.append(build_optimizer(*args, **options))
        return built[-1]

    torch_engine.build_optimizer = noted
    return built


def watch_updates() -> list[tuple[bool, bool]]:
    """Return a list of (was refused, changed nothing), which grows with each update of this process."""
    update, updates, built = Updater.update, [], watch_optimizer()

    def state(updater: Updater) -> list[Tensor]:
        (optimizer,) = built
        weights = [local_part(each) for group in optimizer.param_groups for each in group["params"]]
        moments = [local_part(each) for state in optimizer.state.values() for each in state.values()]
        feedback = (part.compressor.feedback() for part in updater.parts if isinstance(part, CompressedGradients))
        unsent = [each for state in feedback for tensors in state.values() for each in tensors.accepted.values()]
        return [each.detach().clone() for each in (*weights, *moments, *unsent)]

    def watched(updater: Updater, *arguments: Any, **more: Any) -> tuple[Tensor, Tensor]:
        before = state(updater)
        norm, refused = update(updater, *arguments, **more)
        after = state(updater)
        updates.append((bool(refused), len(before) == len(after) and all(map(torch.equal, before, after))))
        assert all(each.isfinite().all() for each in after)
        return norm, refused

    Updater.update = watched  # pyrefly: ignore[bad-assignment]
    return updates


def steady_scale(plan: Plan, train: TrainSection) -> LossScale | None:
    """Return a scale with which nothing overflows."""
    return LossScale(initial=1024.0) if plan.precision == "fp16" else None


def train_with(
    path: Path, fault: Fault | None, min_good_steps: int = guard.MIN_GOOD_STEPS
) -> tuple[int, list[tuple[bool, bool]]]:
    """Train with the fault; return the exit code and what `watch_updates` saw."""
    run, rank_info = RunDirectory(path), read_rank_info(os.environ)
    guard.MIN_GOOD_STEPS = min_good_steps  # pyrefly: ignore[bad-assignment]
    rank_context.build_loss_scale = steady_scale
    if fault is not None and fault.rank == rank_info.rank:
        plant(fault, run.read_plan().grad_accum)
    updates = watch_updates()
    return run_worker(run, rank_info, cache=CACHE), updates


def assert_skipped(run: RunDirectory, answers: list[Any]) -> dict[str, Any]:
    """Assert that every rank refused only the bad step, and changed nothing in it; return the event's data."""
    steps = range(1, run.read_recipe().train.steps + 1)
    assert [code for code, _ in answers] == [0] * len(answers)
    for _, updates in answers:
        assert [refused for refused, _ in updates] == [step == BAD for step in steps]
        assert [unchanged for _, unchanged in updates] == [step == BAD for step in steps]
    metrics = lines(run.metrics)
    assert [line["step"] for line in metrics] == list(steps)
    assert [line.get("skipped", False) for line in metrics] == [step == BAD for step in steps]
    (event,) = events(run, "skip")
    assert event["step"] == BAD
    return event["data"]


@pytest.mark.parametrize(
    "fields",
    [
        {"dp_shard": 2},
        slow({"tp": 2}),
        {"pp": 2, "grad_accum": 2},
        slow({"dp_shard": 2, "precision": "bf16", "grad_accum": 2}),
    ],
    ids=str,
)
def test_a_nan_loss_on_one_rank_changes_no_weight_on_any_rank(folder: Path, fields: dict[str, Any]) -> None:
    recipe = recipe_with()
    run = run_of(folder, recipe, plan_for(recipe, **({"grad_accum": 1} | fields)))
    data = assert_skipped(run, run_ranks(2, train_with, run.path, NAN))
    assert data["reason"] == "the loss is nan"
    assert data["ranks"] == ([0] if "tp" in fields else [1])  # of ranks with the same tokens, the first reports
    assert data["sample_ids"] == samples_of(run, BAD, rank=run.read_plan().mesh.dp - 1)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault(gradient=math.nan), "the gradient norm is nan"),
        (Fault(output=1e4), r"the loss jumped from \S+ to \S+"),
    ],
    ids=["gradient nan", "spike"],
)
def test_a_bad_gradient_or_a_loss_spike_changes_no_weight_on_any_rank(folder: Path, fault: Fault, reason: str) -> None:
    recipe = recipe_with()
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_replicate=2))
    data = assert_skipped(run, run_ranks(2, train_with, run.path, fault, 2))
    assert re.fullmatch(reason, data["reason"])
    is_known = "loss" in reason
    assert data["ranks"] == ([1] if is_known else [])  # the gradient norm is reduced over ranks before it is checked
    ranks = [1] if is_known else [0, 1]
    assert data["sample_ids"] == [each for rank in ranks for each in samples_of(run, BAD, rank)]


@pytest.mark.parametrize(
    ("train", "fields"),
    [
        ({"optimizer": {"states": "8bit"}}, {"dp_shard": 2}),
        ({}, {"dp_replicate": 2, "precision": "fp16"}),
        slow(({}, {"dp_replicate": 2, "comm": {"compression": "topk"}})),
        ({}, {"dp_replicate": 2, "comm": {"local_steps": 2}}),
    ],
    ids=str,
)
def test_state_between_steps_is_not_affected_by_a_bad_step(
    folder: Path, train: dict[str, Any], fields: dict[str, Any]
) -> None:
    recipe = recipe_with(train=train, faults={"max_skips": 1})
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, **fields))
    answers = run_ranks(2, train_with, run.path, NAN)
    if "comm" in fields and "local_steps" in fields["comm"]:  # only the replica with the bad loss refuses its update
        (_, good), (code, bad) = answers
        assert not any(refused for refused, _ in good)
        answers = [(code, [(refused, refused) for refused, _ in bad])]  # averaging changes weights all the same
    assert_skipped(run, answers)
    scales = [line.get("loss_scale") for line in lines(run.metrics)]
    assert len(set(scales)) == 1  # a bad loss does not change the scale


def test_a_rewind_continues_without_the_samples_at_fault(folder: Path) -> None:
    recipe = recipe_with(faults={"not_finite": "rewind"})
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_replicate=2))
    answers = run_ranks(2, train_with, run.path, NAN)
    assert [code for code, _ in answers] == [0, 0]
    assert {tuple(refused for refused, _ in updates) for _, updates in answers} == {
        tuple(number == BAD for number in range(1, 6 + 2 + 1))  # the bad step and the next one are repeated
    }
    (event,) = events(run, "rewind")
    assert event["data"] == {"to_step": BAD - 1}
    left_out = samples_of(run, BAD, rank=1)
    assert [line["sample"] for line in lines(run.quarantine)] == sorted(left_out)
    metrics = lines(run.metrics)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5, 6]
    assert [line.get("quarantined", 0) for line in metrics] == [0, 0, 0, 2, 0, 0]
    assert not any("skipped" in line for line in metrics)
    assert metrics[BAD - 1]["tokens"] == 2 * 16
    # The file also applies to the next run: the same samples are left out, and no step is bad.
    again = run_of(folder, recipe, run.read_plan())
    again.quarantine.write_text(run.quarantine.read_text())
    assert [code for code, _ in run_ranks(2, train_with, again.path, None)] == [0, 0]
    assert [line["loss"] for line in lines(again.metrics)] == [line["loss"] for line in metrics]


@pytest.mark.parametrize(
    ("faults", "fault", "step"),
    [
        ({"not_finite": "stop"}, NAN, BAD + 1),
        ({"max_skips": 2}, replace(NAN, last=100), BAD + 3),
        ({"not_finite": "rewind"}, replace(NAN, repeats=True), BAD + 1),
    ],
    ids=["stop", "too many", "again after a rewind"],
)
def test_a_run_that_cannot_continue_ends_with_a_good_checkpoint(
    folder: Path, faults: dict[str, Any], fault: Fault, step: int
) -> None:
    recipe = recipe_with(train={"steps": 50}, faults=faults)
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_replicate=2))
    assert [code for code, _ in run_ranks(2, train_with, run.path, fault)] == [93, 93]
    for rank in range(2):
        (event,) = events(run, "error", rank)
        assert (event["step"], event["data"]["cause"], event["data"]["action"]) == (step, "numeric", "stop")
        # Rows without a target have no loss. Their fault shows in the gradient norm, which is reduced over ranks.
        assert event["data"]["ranks"] == ([] if fault.repeats else [1])
        assert set(samples_of(run, BAD if fault.last == BAD else BAD + 2, rank=1)) <= {*event["data"]["sample_ids"]}
    assert checkpoints(run) == [f"step-{step:08d}"]


def test_a_step_with_all_samples_quarantined_works(folder: Path) -> None:
    recipe = recipe_with(train={"steps": 3})
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=2, dp_replicate=2))
    everyone = samples_of(run, 2, 0) + samples_of(run, 2, 1)
    run.quarantine.write_text("".join(json.dumps({"sample": each}) + "\n" for each in everyone))
    assert [code for code, _ in run_ranks(2, train_with, run.path, None)] == [0, 0]
    metrics = lines(run.metrics)
    assert [line["tokens"] for line in metrics] == [64, 0, 64]
    assert [line.get("quarantined", 0) for line in metrics] == [0, 4, 0]
    assert (metrics[1]["loss"], metrics[1]["grad_norm"]) == (0, 0)


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train_until_sigterm(path: Path, where: str) -> tuple[int, int]:
    """Send SIGTERM to rank 1 at some point; return the exit code and the number of evaluated batches."""
    is_signalled, evaluated = os.environ["RANK"] == "1", []
    build_networks, evaluate, after_step = build.build_networks, PlainStepper.evaluate, Checkpointer.after_step

    def building(*args: Any) -> tuple[Network, ...]:
        if is_signalled and where == "building":
            send_sigterm()
        return build_networks(*args)

    def evaluating(stepper: PlainStepper, batch: StepBatch) -> Tensor:
        evaluated.append(batch.step)
        if is_signalled and where == "evaluating" and len(evaluated) == 2:
            send_sigterm()
        return evaluate(stepper, batch)

    def saving(checkpointer: Checkpointer, step: int, decision: StepDecision) -> None:
        if is_signalled and where == "saving" and decision.save:
            send_sigterm()
        after_step(checkpointer, step, decision)

    build.build_networks = building  # pyrefly: ignore[bad-assignment]
    PlainStepper.evaluate = evaluating  # pyrefly: ignore[bad-assignment]
    Checkpointer.after_step = saving  # pyrefly: ignore[bad-assignment]
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=CACHE), len(evaluated)


@pytest.mark.parametrize(("where", "step", "batches"), [("building", 0, 0), ("evaluating", 4, 3), ("saving", 4, 1)])
def test_a_sigterm_to_one_rank_stops_all_ranks_at_the_same_step(
    folder: Path, where: str, step: int, batches: int
) -> None:
    """SIGTERM while the network is built, in the second of thirty evaluation batches, and while a checkpoint is saved.

    Ranks exchange stop requests before each batch, so the next batch is the last.
    """
    recipe = recipe_with(
        data={"holdout": 0.1},
        train={"steps": 100, "evaluate": {"every": 4, "batches": 30}},
        checkpoint={"every": 4 if where == "saving" else 0},
    )
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_replicate=2))
    answers = run_ranks(2, train_until_sigterm, run.path, where)
    assert [code for code, _ in answers] == [75, 75]
    assert {batches for _, batches in answers} == {batches}
    assert [events(run, "stop", rank)[0]["step"] for rank in range(2)] == [step, step]
    assert f"step-{step:08d}" in checkpoints(run)
    assert [line["step"] for line in lines(run.metrics)] == list(range(1, step + 1))


def train_with_a_flipped_bit(path: Path) -> int:
    """Train with a bit flip on rank 1 after the third step, and a replica check every second step."""
    update, updates, built = Updater.update, [], watch_optimizer()

    def flipping(updater: Updater, lr: float, loss: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        answer = update(updater, lr, loss, squares)
        updates.append(lr)
        if len(updates) == 3 and os.environ["RANK"] == "1":
            built[0].param_groups[0]["params"][0].data.view(torch.int32)[0, 0] ^= 1 << 20
        return answer

    Updater.update = flipping  # pyrefly: ignore[bad-assignment]
    rank_context.ReplicaCheck = partial(ReplicaCheck, every=2)  # pyrefly: ignore[bad-assignment]
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=CACHE)


def test_replicas_that_differ_rewind_to_a_step_where_they_were_equal(folder: Path) -> None:
    """Also with the default `not_finite: skip`: skipping does not help here."""
    recipe = recipe_with(checkpoint={"every": 1, "keep": 5, "asynchronous": False})
    run, clean = (run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_replicate=2)) for _ in range(2))
    assert run_ranks(2, train_with_a_flipped_bit, run.path) == [0, 0]
    (event,) = events(run, "differ")
    assert (event["step"], event["data"]["ranks"], event["data"]["since"]) == (4, [0, 1], 2)
    assert [each["data"]["to_step"] for each in events(run, "rewind")] == [2]
    assert not run.quarantine.exists()
    run_ranks(2, train_with, clean.path, None)
    assert [line["loss"] for line in lines(run.metrics)] == [line["loss"] for line in lines(clean.metrics)]
    assert checkpoints(run) == [f"step-{step:08d}" for step in (2, 4, 5, 6)]
    assert [each.name for each in run.checkpoints.glob("refused-*")] == ["refused-step-00000003"]


def test_replicas_that_differ_without_an_earlier_checkpoint_stop_the_run(folder: Path) -> None:
    recipe = recipe_with(checkpoint={"every": 3, "asynchronous": False})
    run = run_of(folder, recipe, plan_for(recipe, grad_accum=1, dp_replicate=2))
    assert run_ranks(2, train_with_a_flipped_bit, run.path) == [93, 93]
    (event,) = events(run, "error")
    assert (event["data"]["cause"], event["data"]["action"]) == ("numeric", "stop")
    assert "replicas differ" in event["data"]["message"]
    assert "no earlier state to restore" in event["data"]["message"]
    assert [each.name for each in run.checkpoints.iterdir()] == ["refused-step-00000003"], "its weights may be wrong"
