"""Replicas that train alone for some steps: against a plain reference, under sharding, in fragments, and resumed."""

import copy
import json
import os
import time
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import quick_or_slow, slow
from tests.environment import CACHE
from tests.parity import plan_for
from tests.ranks import run_ranks
from tests.resume import SavedState, TrainedSegment, recipe_for, train_segment
from trimaran.core import EXIT_USER, LocalSteps, Mesh, Plan, synchronisation_bytes
from trimaran.nets import Network
from trimaran.parallel import build_mesh, build_outer_step
from trimaran.runs import RunDirectory, create_run
from trimaran.train import PlainStepper, RefusedStep, StepDecision, join_process_group, read_rank_info, run_worker

ROUNDS, NESTEROV = 3, {"optimizer": "nesterov"}
Weights = list[np.ndarray]


def toy_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def train_toy(model: nn.Module, optimizer: torch.optim.Optimizer, replica: int, step: int) -> None:
    """One update on data that differ between replicas and steps."""
    draw = torch.Generator().manual_seed(1000 * replica + step)
    optimizer.zero_grad()
    (model(torch.randn(6, 8, generator=draw)) - torch.randn(6, 4, generator=draw)).square().mean().backward()
    optimizer.step()


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).numpy().copy()


def replicas(local_steps: Any, num_steps: int, inner: str) -> tuple[Weights, list[dict[str, Any]], np.ndarray]:
    """Return this replica's weights and metrics after every step, and its inner optimizer's second moments."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    plan = Plan(mesh=Mesh(dp_replicate=rank_info.world_size), comm={"local_steps": local_steps})
    model = toy_model()
    network = Network(model, (model[0], model[2], model[4]), None)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    outer_step = build_outer_step(plan, ranks, [network], last_step=num_steps)
    assert outer_step is not None
    optimizer = getattr(torch.optim, inner)(model.parameters(), lr=0.05)
    seen, metrics = [], []
    for step in range(num_steps):
        train_toy(model, optimizer, rank_info.rank, step)
        metrics.append(outer_step.after_update(step + 1)())
        seen.append(flat(model))
    moments = [each["exp_avg_sq"].flatten() for each in optimizer.state.values() if "exp_avg_sq" in each]
    return seen, metrics, torch.cat(moments).numpy() if moments else np.zeros(0)


def reference(world_size: int, local: LocalSteps, num_steps: int, inner: str) -> tuple[list[Weights], Weights]:
    """Return what DiLoCo's paper says, one replica after another in this process: weights by replica and step."""
    shared = toy_model()
    models = [copy.deepcopy(shared) for _ in range(world_size)]
    optimizers = [getattr(torch.optim, inner)(each.parameters(), lr=0.05) for each in models]
    outer = torch.optim.SGD(
        shared.parameters(),
        lr=local.outer.resolved_lr,
        momentum=local.outer.resolved_momentum,
        nesterov=local.outer.optimizer == "nesterov",
    )
    seen: list[Weights] = [[] for _ in models]
    for step in range(num_steps):
        for replica, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            train_toy(model, optimizer, replica, step)
        if (step + 1) % local.steps == 0:
            for synced, *mine in zip(shared.parameters(), *(each.parameters() for each in models), strict=True):
                synced.grad = torch.stack([synced.detach() - each.detach() for each in mine]).mean(0)
            outer.step()
            for model in models:
                model.load_state_dict(shared.state_dict())
        for model, weights in zip(models, seen, strict=True):
            weights.append(flat(model))
    states = [[each["exp_avg_sq"].flatten() for each in opt.state.values()] for opt in optimizers if inner == "AdamW"]
    return seen, [torch.cat(each).numpy() for each in states]


OUTER: dict[str, dict[str, Any]] = {
    "nesterov": {"optimizer": "nesterov"},
    "momentum": {"optimizer": "sgd", "lr": 0.8, "momentum": 0.5},
    "average": {"optimizer": "average"},
    "offload": {"optimizer": "nesterov", "lr": 0.5, "offload": True},
}


@pytest.mark.parametrize(
    ("name", "world_size"),
    quick_or_slow(product(OUTER, (2, 4)), lambda case: case in (("nesterov", 2), ("average", 2))),
)
def test_replicas_follow_the_papers_algorithm(name: str, world_size: int) -> None:
    local = LocalSteps.model_validate({"steps": 4, "outer": OUTER[name]})
    wanted, moments = reference(world_size, local, 4 * ROUNDS, "AdamW")
    found = run_ranks(world_size, replicas, local.model_dump(), 4 * ROUNDS, "AdamW")
    for (weights, metrics, mine), theirs, moment in zip(found, wanted, moments, strict=True):
        for step, (a, b) in enumerate(zip(weights, theirs, strict=True), 1):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6, err_msg=f"after step {step}")
        np.testing.assert_allclose(mine, moment, rtol=1e-4, atol=1e-9)  # each replica keeps its own
        synced = [number for number, each in enumerate(metrics, 1) if each]
        assert synced == [4, 8, 12]
        sent = round(synchronisation_bytes(local, weights[0].size, world_size))
        assert all(metrics[number - 1]["outer"]["bytes"] == sent for number in synced)
    assert not np.array_equal(found[0][2], found[1][2])
    together = [np.array_equal(a, b) for a, b in zip(found[0][0], found[1][0], strict=True)]
    assert together == [step % 4 == 0 for step in range(1, 13)]


def test_an_average_after_every_step_is_synchronous_training() -> None:
    """With SGD inside, averaged weights are weights after the averaged gradient."""
    local = {"steps": 1, "outer": {"optimizer": "sgd"}}
    (weights, *_), *_ = run_ranks(2, replicas, local, 6, "SGD")
    model = toy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(6):
        gradients = []
        for replica in range(2):
            one = copy.deepcopy(model)
            train_toy(one, torch.optim.SGD(one.parameters(), lr=0.0), replica, step)
            gradients.append([each.grad for each in one.parameters()])
        for each, *parts in zip(model.parameters(), *gradients, strict=True):
            each.grad = torch.stack(parts).mean(0)
        optimizer.step()
        np.testing.assert_allclose(weights[step], flat(model), rtol=0, atol=1e-6)


def test_one_fragment_without_overlap_is_the_same_as_none() -> None:
    plain = {"steps": 4, "outer": NESTEROV}
    both = [run_ranks(2, replicas, each, 8, "AdamW") for each in (plain, plain | {"fragments": 1, "overlap_steps": 0})]
    for ours, theirs in zip(*both, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))


STREAMING = {"steps": 6, "outer": NESTEROV, "fragments": 3, "overlap_steps": 1}


@pytest.mark.parametrize("compression", quick_or_slow(("none", "bf16", "int8", "sparse"), lambda each: each == "int8"))
def test_fragments_are_exchanged_in_turn_and_all_at_the_end(compression: str) -> None:
    outer = {"optimizer": "sgd"} if compression == "sparse" else NESTEROV
    local = STREAMING | {"compression": compression, "outer": outer}
    first, again = (run_ranks(2, replicas, local, 18, "AdamW") for _ in range(2))
    for ours, theirs in zip(first, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True)), "it is deterministic"
    due = [each["outer"]["fragments"] if each else [] for each in first[0][1]]
    assert due == [[], [0], [], [1], [], [2]] * 2 + [[], [0], [], [1], [], [0, 1, 2]]
    equal = [np.array_equal(a, b) for a, b in zip(first[0][0], first[1][0], strict=True)]
    assert equal == [False] * 17 + [True]


def test_a_fragment_mixes_local_and_synchronised_weights() -> None:
    """A fragment of the whole model: after 4 steps it is half local, and half what was exchanged after 2."""
    local = {"steps": 4, "outer": {"optimizer": "average"}, "overlap_steps": 2, "mixing": 0.5}
    found = run_ranks(2, replicas, local, 8, "SGD")
    mean = (found[0][0][1] + found[1][0][1]) / 2
    for replica, (weights, *_) in enumerate(found):
        model = toy_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(4):
            train_toy(model, optimizer, replica, step)
        np.testing.assert_allclose(weights[3], (flat(model) + mean) / 2, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("compression", "bound", "world_size"),
    [("int8", 0.02, 3), slow(("bf16", 0.01, 3))],
)
def test_quantised_outer_gradients_are_close_and_equal_on_all_replicas(
    compression: str, bound: float, world_size: int
) -> None:
    local = {"steps": 2, "outer": NESTEROV}
    exact = run_ranks(world_size, replicas, local, 2, "AdamW")[0][0]
    found = [each[0][1] for each in run_ranks(world_size, replicas, local | {"compression": compression}, 2, "AdamW")]
    assert all(np.array_equal(found[0], each) for each in found[1:])
    moved = np.linalg.norm(exact[1] - flat(toy_model()))
    assert 0 < np.linalg.norm(found[0] - exact[1]) < bound * moved


def sparse_rounds(density: float) -> tuple[Weights, Weights]:
    """Return the synchronised weights and the error feedback after each of some rounds of one step."""
    rank_info = read_rank_info(os.environ)
    join_process_group(rank_info)
    model = nn.Linear(128, 64, bias=False)
    torch.manual_seed(0)
    nn.init.normal_(model.weight)
    local = {"steps": 1, "compression": "sparse", "density": density, "error_decay": 1.0}
    plan = Plan(mesh=Mesh(dp_replicate=rank_info.world_size), comm={"local_steps": local})
    ranks = build_mesh(plan.mesh, device_type="cpu")
    outer_step = build_outer_step(plan, ranks, [Network(model, (), None)], last_step=10**6)
    assert outer_step is not None
    weights, errors = [flat(model)], []
    draw = torch.Generator().manual_seed(rank_info.rank)
    change = torch.randn(64, 128, generator=draw)
    for step in range(1, 40):
        with torch.no_grad():
            model.weight.add_(change)
        outer_step.after_update(step)
        weights.append(flat(model))
        errors.append(next(each for each in outer_step.tensors() if each.kind == "error").tensor.flatten().numpy())
    return weights, [each.copy() for each in errors]


def test_sparse_outer_gradients_send_few_values_and_the_rest_later() -> None:
    ours, theirs = run_ranks(2, sparse_rounds, 1 / 64)
    assert all(np.array_equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    moved = np.count_nonzero(ours[0][1] - ours[0][0])
    assert 0 < moved <= 2 * 2 * 64, "64 values of each of 2 blocks and 2 replicas"
    change = torch.stack(
        [torch.randn(64, 128, generator=torch.Generator().manual_seed(each)) for each in range(2)]
    ).mean(0)
    total = 39 * change.flatten().numpy()
    errors = (ours[1][-1] + theirs[1][-1]) / 2  # what was not sent yet, of the negative change
    np.testing.assert_allclose(ours[0][-1] - ours[0][0] - errors, total, rtol=0, atol=2e-3)


RECIPE = recipe_for()
WHOLE: dict[str, Any] = {"dp_replicate": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": {"dp_replicate": 2, "dp_shard": 2},
    "tensor": {"dp_replicate": 2, "tp": 2},
    "context": {"dp_replicate": 2, "cp": 2},
    "pipeline": {"dp_replicate": 2, "pp": 2, "grad_accum": 2},
    "optimizer-shards": {"dp_replicate": 2, "dp_shard": 2, "sharding": "optimizer"},
    "context-shards": {"dp_replicate": 2, "cp": 2, "sharding": "parameters"},
}


def plan_of(local: dict[str, Any], **fields: Any) -> Plan:
    plan = plan_for(RECIPE, **{"grad_accum": 1} | fields)
    return Plan.model_validate(plan.model_dump() | {"comm": {"local_steps": local}})


@cache
def whole(grad_accum: int = 1) -> TrainedSegment:
    return train_segment(RECIPE, plan_of({"steps": 2, "outer": NESTEROV}, grad_accum=grad_accum, **WHOLE), steps=4)


@pytest.mark.parametrize("name", quick_or_slow(LAYOUTS, lambda name: name == "shards"))
def test_replicas_that_are_split_inside_train_as_whole_ones(name: str) -> None:
    local = {"steps": 2, "outer": NESTEROV}
    theirs = whole(LAYOUTS[name].get("grad_accum", 1))  # which replica has which samples depends on it
    ours = train_segment(RECIPE, plan_of(local, **LAYOUTS[name]), steps=4)
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    for key in (each for each in theirs.saved.index if each.startswith(("model/", "outer/"))):
        a, b = ours.saved.full_tensor(key), theirs.saved.full_tensor(key)
        assert float((a - b).norm()) <= 1e-4 * float(b.norm()) + 1e-7, key


RESUMED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "diloco": ({"steps": 2, "outer": NESTEROV}, WHOLE),
    "average": ({"steps": 2}, WHOLE),
    "shards": ({"steps": 2, "outer": NESTEROV}, LAYOUTS["shards"]),
    "streaming": ({"steps": 4, "outer": NESTEROV, "fragments": 2, "overlap_steps": 1}, WHOLE),
    "sparse": ({"steps": 2, "compression": "sparse"}, WHOLE),
    "int8": ({"steps": 4, "outer": NESTEROV, "compression": "int8", "overlap_steps": 3}, LAYOUTS["shards"]),
}


@pytest.mark.parametrize("name", quick_or_slow(RESUMED, lambda name: name == "streaming"))
def test_a_resume_is_exact(name: str) -> None:
    local, layout = RESUMED[name]
    plan = plan_of(local, **layout)
    full = train_segment(RECIPE, plan, steps=8)
    again = train_segment(RECIPE, plan, steps=4, after=full.midway)
    again.assert_loaded(full.midway)
    again.assert_same_end(replace(full, losses=full.losses[4:]))


def test_every_replica_saves_its_own_moments() -> None:
    saved = whole().saved
    moments = [key for key in saved.index if key.startswith("optimizer/exp_avg/")]
    assert moments
    for key in moments:
        assert not torch.equal(saved.full_tensor(key), saved.full_tensor(f"replica-1/{key}"))
    weights = [key.removeprefix("model/") for key in saved.index if key.startswith("model/")]
    assert {f"outer/{kind}/{name}" for kind in ("weights", "momentum") for name in weights} <= saved.index.keys()
    for name in weights:
        assert torch.equal(saved.full_tensor(f"model/{name}"), saved.full_tensor(f"outer/weights/{name}"))


def without(saved: SavedState, *prefixes: str) -> SavedState:
    for key in [each for each in saved.index if each.startswith(prefixes)]:
        del saved.index[key]
    return saved


@pytest.mark.slow
def test_other_plans_load_the_state_of_the_first_replica_and_outer_state_can_start_over() -> None:
    local = {"steps": 2, "outer": NESTEROV}
    saved = train_segment(RECIPE, plan_of(local, **WHOLE), steps=4).saved  # which is changed below
    assert train_segment(RECIPE, plan_for(RECIPE, grad_accum=1, **WHOLE), steps=2, after=saved).losses
    three = train_segment(RECIPE, plan_of(local, dp_replicate=3), steps=2, after=saved)
    assert sum(key.startswith("replica-2/") for key in three.saved.index)
    old = without(saved, "outer/", "replica-")  # as an older version or a synchronous plan writes it
    ours = train_segment(RECIPE, plan_of(local, **WHOLE), steps=2, after=old)
    zeros = {key for key in ours.saved.index if key.startswith("outer/momentum/")}
    assert zeros


LATE_STEP, PATIENCE_SECONDS = 3, 60.0


def train_with_a_late_rank(path: Path, cache: Path) -> int:
    """Train a run whose second rank begins one step when the first has done six more."""
    rank_info, step, ahead = read_rank_info(os.environ), PlainStepper.step, path / "ahead"

    def late_step(self: PlainStepper, batch: Any, **options: Any) -> torch.Tensor:
        if rank_info.rank == 0 and batch.step == LATE_STEP + 6:
            ahead.touch()
        began = time.monotonic()
        while rank_info.rank == 1 and batch.step == LATE_STEP and not ahead.exists():
            assert time.monotonic() - began < PATIENCE_SECONDS, "the first rank waits for the second"
            time.sleep(0.01)
        return step(self, batch, **options)

    PlainStepper.step = late_step
    return run_worker(RunDirectory(path), rank_info, cache=cache)


def test_a_replica_does_not_wait_for_a_late_one_before_they_synchronise(tmp_path: Path) -> None:
    recipe = recipe_for("tiny", steps=12, seed=1)
    plan = plan_for(recipe, grad_accum=1, dp_replicate=2, comm={"local_steps": 12})
    run = create_run(tmp_path / "run", recipe, plan)
    assert run_ranks(2, train_with_a_late_rank, run.path, CACHE) == [0, 0]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [*range(1, 13)]


def refused(action: Any, step: int) -> StepDecision:
    refusal = RefusedStep(
        step=step, good_step=0, reason="", loss=1.0, grad_norm=1.0, ranks=(), sample_ids=(), action=action
    )
    return StepDecision(refusal=refusal)


def test_of_several_decisions_the_first_that_ends_the_loop_counts() -> None:
    decision = StepDecision(save=True).then(refused("skip", 1)).then(refused("stop", 2)).then(refused("rewind", 3))
    assert decision.save
    assert decision.refusal is not None
    assert decision.refusal.step == 2
    assert StepDecision().then(StepDecision(stop=True)).then(StepDecision()).stop


def train_without_supervisor(path: Path, cache: Path) -> int:
    return run_worker(RunDirectory(path), read_rank_info(os.environ), cache=cache)


def test_elastic_replicas_are_refused_without_a_supervisor(tmp_path: Path) -> None:
    recipe = recipe_for("tiny", steps=4, seed=1)
    plan = plan_for(recipe, grad_accum=1, dp_replicate=2, comm={"local_steps": {"steps": 2, "elastic": True}})
    run = create_run(tmp_path / "run", recipe, plan)
    assert run_ranks(2, train_without_supervisor, run.path, CACHE) == [EXIT_USER] * 2
    (event,) = [json.loads(line) for line in run.events(1).read_text().splitlines()]
    assert event["data"]["code"] == "P003"
