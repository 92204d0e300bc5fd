"""Trains adapters under any plan with the real networks and steppers, on handmade batches."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from trimaran.core import Plan, Recipe
from trimaran.data.feed import DataShare
from trimaran.data.step_batch import StepBatch, text_batch
from trimaran.nets import Network
from trimaran.nets.adapters.lora_linear import adapter_parameters
from trimaran.nets.hf_weights import full_tensor
from trimaran.parallel import build_mesh
from trimaran.train.build import build_networks, build_stepper
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.process.rank_info import join_process_group, read_rank_info

SEQ_LEN, GLOBAL_BATCH, STEPS = 24, 8, 3
NUM_TOKENS = 6  # few, so that there is something to learn
LENGTHS = ((5, 19), (10, 6, 8), (12, 12), (1, 23))


@dataclass(frozen=True, slots=True)
class AdapterTrace:
    """What a rank recorded: losses, gradient norms, and the trained parameters at the start and at the end."""

    losses: list[float]
    norms: list[float]
    first: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def recipe_of(model: dict[str, Any], adapter: dict[str, Any] | None = None, **train: Any) -> Recipe:
    """Return a recipe that trains an adapter of rank 4 with a constant learning rate."""
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


def train_rank(recipe: Recipe, plan: Plan) -> AdapterTrace:
    """Train this rank's part of the adapter for a few steps."""
    rank_info = read_rank_info(os.environ)
    if not dist.is_initialized():
        join_process_group(rank_info)
    ranks = build_mesh(plan.mesh, device_type="cpu")
    networks = build_networks(recipe, plan, rank_info, ranks)
    stepper = build_stepper(networks, recipe.train, plan, ranks, StepClock(torch.device("cpu")))
    stepper.set_training(True)
    share = DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    first, losses, norms = trained_weights(networks), [], []
    for step in range(STEPS):
        ranks.reseed(recipe.train.seed, step)
        numbers = stepper.step(batch_of(step, share).to(torch.device("cpu")))
        norm, refused = stepper.update(recipe.train.lr)
        assert not refused
        losses.append(numbers[0].item())
        norms.append(norm.item())
    weights = trained_weights(networks)
    dist.barrier()  # no rank may exit while another still gathers
    return AdapterTrace(losses, norms, first, weights)


def trained_weights(networks: tuple[Network, ...]) -> dict[str, np.ndarray]:
    """Return every trained parameter of this rank's stages, unsharded. A collective."""
    named = [pair for network in networks for pair in adapter_parameters(network.module)]
    return {name: full_tensor(each).numpy().copy() for name, each in named}


def train_all_ranks(recipe: Recipe, plan: Plan) -> list[AdapterTrace]:
    return run_ranks(plan.mesh.world_size, train_rank, recipe, plan)


def assert_same_training(traces: list[AdapterTrace], single: AdapterTrace, tolerance: float = 1e-5) -> None:
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
