"""Trains recipes under many plans with the real networks and steppers, on handmade batches.

Ranks are forked once for many cases, which is several times cheaper than a run of each: `tests/parity.py` trains with
the real worker.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe
from trimaran.data import DataShare, StepBatch, text_batch
from trimaran.nets import Network, adapter_parameters
from trimaran.parallel import build_mesh
from trimaran.train import StepClock, Stepper, build_networks, build_stepper, join_process_group, read_rank_info

SEQ_LEN, GLOBAL_BATCH, STEPS = 24, 8, 2
NUM_TOKENS = 6  # few, so that there is something to learn
LENGTHS = ((5, 19), (10, 6, 8), (12, 12), (1, 23))


@dataclass(frozen=True, slots=True)
class Trace:
    """What a rank recorded: losses, gradient norms, and the trained parameters at the start and at the end."""

    losses: list[float]
    norms: list[float]
    first: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def recipe_of(model: dict[str, Any], adapter: dict[str, Any] | None = None, **train: Any) -> Recipe:
    """Return a recipe with a constant learning rate; with `adapter`, it trains one of rank 4."""
    section = None if adapter is None else {"rank": 4, "alpha": 6.0} | adapter
    # A large eps: otherwise the first AdamW updates have the same size for any gradient, even for rounding noise.
    constants = {"steps": STEPS, "global_batch": GLOBAL_BATCH, "lr": 3e-2, "seed": 3, "optimizer": {"eps": 1e-3}}
    return Recipe.model_validate(
        {"model": model | {"adapter": section}, "data": {"seq_len": SEQ_LEN}, "train": constants | train}
    )


def batch_of(step: int, share: DataShare) -> StepBatch:
    """Return this rank's rows of a step: documents of uneven length, with some labels left out."""
    rows = [np.random.default_rng([step, int(each)]) for micro in share.indices(0) for each in micro]
    shape = (share.grad_accum, share.micro_batch, SEQ_LEN)
    tokens = torch.from_numpy(np.stack([each.integers(0, NUM_TOKENS, SEQ_LEN) for each in rows])).view(shape)
    kept = torch.from_numpy(np.stack([each.random(SEQ_LEN) < 0.7 for each in rows])).view(shape)
    documents = [np.repeat(np.arange(len(each)), each) for each in LENGTHS]
    chosen = np.stack([documents[int(each) % len(LENGTHS)] for micro in share.indices(0) for each in micro])
    labels = torch.where(kept, tokens.roll(-1, dims=-1), -100)
    return text_batch(step, tokens, labels, torch.from_numpy(chosen).int().view(shape))


def train_rank(recipe: Recipe, plan: Plan) -> Trace:
    """Train this rank's part for a few steps."""
    rank_info = read_rank_info(os.environ)
    if not dist.is_initialized():
        join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(torch.device("cpu")))
    stepper.set_training(True)
    share = DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    first, losses, norms = trained_weights(networks, stepper), [], []
    for step in range(STEPS):
        ranks.reseed(recipe.train.seed, step)
        numbers = stepper.step(batch_of(step, share).to(torch.device("cpu")))
        norm, refused = stepper.update(recipe.train.lr)
        assert not refused
        losses.append(numbers[0].item())
        norms.append(norm.item())
    weights = trained_weights(networks, stepper)
    dist.barrier()  # no rank may exit while another still gathers
    return Trace(losses, norms, first, weights)


def trained_weights(networks: tuple[Network, ...], stepper: Stepper) -> dict[str, np.ndarray]:
    """Return every trained parameter of this rank's stages, unsharded. A collective."""
    named = [pair for network in networks for pair in adapter_parameters(network.module)]
    return {name: stepper.full_tensor(each).numpy().copy() for name, each in named}


def train_rank_in_turn(cases: Sequence[tuple[Recipe, Plan]]) -> list[Trace]:
    return [train_rank(*case) for case in cases]


def train_all_ranks(recipe: Recipe, plan: Plan) -> list[Trace]:
    return train_in_turn([(recipe, plan)])[0]


def train_in_turn(cases: Sequence[tuple[Recipe, Plan]]) -> list[list[Trace]]:
    """Return the traces of every rank for each case. All plans need as many ranks."""
    (world_size,) = {plan.mesh.world_size for _, plan in cases}
    by_rank = run_ranks(world_size, train_rank_in_turn, list(cases))
    return [list(traces) for traces in zip(*by_rank, strict=True)]


def train_alone(recipes: Sequence[Recipe]) -> list[Trace]:
    """Return the trace of each recipe in one process."""
    plan = Plan(micro_batch=GLOBAL_BATCH)
    return [trace for (trace,) in train_in_turn([(recipe, plan) for recipe in recipes])]


def assert_each_trains_as_one_process(cases: Sequence[tuple[Recipe, Plan]]) -> None:
    """Train every case on the same ranks; fail with the plans whose trajectory is not that of one process."""
    texts = {recipe.model_dump_json(): recipe for recipe, _ in cases}
    alone = dict(zip(texts, train_alone([*texts.values()]), strict=True))
    wrong = []
    for (recipe, plan), traces in zip(cases, train_in_turn(cases), strict=True):
        expected = alone[recipe.model_dump_json()]
        assert expected.losses[-1] < expected.losses[0], "the loss must fall, or the comparison proves nothing"
        try:
            assert_same_training(traces, expected)
        except AssertionError as error:
            wrong.append(f"{recipe.model}\n{plan}\n{error}")
    assert not wrong, "\n\n".join(wrong)


def assert_same_training(traces: list[Trace], single: Trace, tolerance: float = 1e-5) -> None:
    """Fail unless every rank's numbers are those of one process, from the same first values, and none is missing."""
    weights: dict[str, np.ndarray] = {}
    for trace in traces:
        np.testing.assert_allclose(trace.losses, single.losses, rtol=tolerance)
        np.testing.assert_allclose(trace.norms, single.norms, rtol=tolerance)
        weights |= trace.weights
        for name, ours in trace.first.items():
            np.testing.assert_array_equal(ours, single.first[name], err_msg=name)
        for name, ours in trace.weights.items():
            off = np.linalg.norm(ours - single.weights[name]) / max(np.linalg.norm(single.weights[name]), 1e-12)
            assert off <= tolerance, f"{name} is off by {off:.1e}"
    assert weights.keys() == single.weights.keys()
