"""Compressed gradients are equal on all ranks, error feedback loses nothing, and a NaN on one rank reaches all."""

import os
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cases import slow
from tests.ranks import run_ranks
from trimaran.core import KIND_FIELDS, Mesh, Plan
from trimaran.nets import Network
from trimaran.parallel import apply_plan, build_mesh, compressor_of
from trimaran.train import join_process_group, read_rank_info

KINDS = [kind for kind in KIND_FIELDS if kind != "none"]
ROWS, COLUMNS = 96, 160  # no multiple of ranks x block


class Layers(nn.Module):
    """Two matrices, a vector and a 3-D parameter, in names that have kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.Linear(COLUMNS, ROWS)
        self.lm_head = nn.Linear(COLUMNS, 24, bias=False)
        self.experts = nn.Parameter(torch.zeros(3, 40, 20))

    def forward(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(each * targets[name]).sum() for name, each in self.named_parameters()]).sum()


def gradient_of(name: str, shape: tuple[int, ...], rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((len(name), rank, step)) % 2**31)
    return torch.randn(shape, generator=generator) * 10.0 ** (rank - 1)


def build(compression: Any, bucket_mb: int = 25) -> tuple[Layers, Any, int, int]:
    """Return the replicated layers, their compressor, this rank and the number of ranks."""
    rank_info = read_rank_info(os.environ)
    if not torch.distributed.is_initialized():
        join_process_group(rank_info)
        torch.set_num_threads(1)
    model = Layers()
    comm = {"compression": compression, "bucket_mb": bucket_mb}
    plan = Plan.model_validate({"mesh": Mesh(dp_replicate=rank_info.world_size), "comm": comm})
    apply_plan(Network(model, (), None), plan, build_mesh(plan.mesh, device_type="cpu"))
    compressor = compressor_of(model)
    assert compressor is not None
    return model, compressor, rank_info.rank, rank_info.world_size


def reduced(model: Layers, rank: int, step: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Return the reduced gradients of a step, by parameter."""
    model.zero_grad()
    targets = {name: gradient_of(name, tuple(each.shape), rank, step) for name, each in model.named_parameters()}
    (model(targets) * scale).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def each_of(function: Any, cases: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return the results of several calls in one process."""
    return {name: function(*arguments) for name, arguments in cases.items()}


@lru_cache
def seen_gradients(ranks: int) -> list[dict[str, list[dict[str, np.ndarray]]]]:
    """Return the gradients of all kinds, by rank."""
    cases: dict[str, tuple[Any, ...]] = {kind: (settings(kind), 2) for kind in KINDS}
    cases["layers"] = settings("1bit", layers=["attention"]), 1
    cases["warm-up"] = {"kind": "topk", "warmup_steps": 2}, 3
    return run_ranks(ranks, each_of, gradients, cases)


def gradients(compression: Any, steps: int) -> list[dict[str, np.ndarray]]:
    """Return the reduced gradients of each step. All steps are accepted."""
    model, compressor, rank, _ = build(compression)
    seen = []
    for step in range(steps):
        seen.append({name: each.numpy() for name, each in reduced(model, rank, step).items()})
        compressor.settle(torch.zeros(()))
    return seen


def mean_gradient(name: str, shape: tuple[int, ...], step: int, ranks: int) -> np.ndarray:
    return torch.stack([gradient_of(name, shape, rank, step) for rank in range(ranks)]).mean(0).numpy()


def settings(kind: str, **fields: Any) -> dict[str, Any]:
    no_warmup = {"warmup_steps": 0} if kind in ("1bit", "topk", "powersgd") else {}
    return {"kind": kind} | no_warmup | fields


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_every_rank_gets_the_same_gradient_and_vectors_are_exact(ranks: int) -> None:
    first, *others = seen_gradients(ranks)
    for kind in KINDS:
        for step, seen in enumerate(first[kind]):
            assert all(np.array_equal(seen[name], other[kind][step][name]) for other in others for name in seen), kind
            bias = mean_gradient("self_attn.bias", (ROWS,), step, ranks)
            assert np.allclose(seen["self_attn.bias"], bias, rtol=2e-2 if kind in ("fp16", "bf16") else 1e-5, atol=1e-2)


@pytest.mark.parametrize(("kind", "tolerance"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)])
def test_rounding_kinds_are_close_in_every_step(kind: str, tolerance: float) -> None:
    for step, seen in enumerate(seen_gradients(2)[0][kind]):
        for name, each in seen.items():
            if name == "self_attn.bias":
                continue
            wanted = mean_gradient(name, each.shape, step, 2)
            error = np.linalg.norm(each - wanted) / np.linalg.norm(wanted)
            assert 0 < error < tolerance, name


def test_the_average_of_int8_over_many_draws_is_exact() -> None:
    """Stochastic rounding is unbiased: the error of a mean over n draws falls with the square root of n."""
    draws = 100
    (seen, _) = run_ranks(2, draws_of_one_gradient, draws)
    wanted = mean_gradient("lm_head.weight", (24, COLUMNS), 0, 2)
    one = np.linalg.norm(seen[0] - wanted)
    mean = np.linalg.norm(np.mean(seen, axis=0) - wanted)
    assert 0.5 * one / np.sqrt(draws) < mean < 2 * one / np.sqrt(draws)


def draws_of_one_gradient(draws: int) -> list[np.ndarray]:
    model, compressor, rank, _ = build("int8")
    seen = []
    for step in range(draws):
        compressor.begin_step(step)
        seen.append(reduced(model, rank, 0)["lm_head.weight"].numpy())
    return seen


def telescoped(compression: Any, steps: int, scale: float) -> dict[str, tuple[float, float]]:
    """Return how far sent + unsent is from the sum of all gradients, and how far sent alone is, relative to it."""
    model, compressor, rank, ranks = build(compression)
    sent = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in model.named_parameters()}
    for step in range(steps):
        compressor.begin_step(step, scale * 2.0**step)
        for name, each in reduced(model, rank, step, scale * 2.0**step).items():
            sent[name] += each.double() / (scale * 2.0**step)
        compressor.settle(torch.zeros(()))
    found, state = {}, compressor.state
    for name, residual in state.residual.accepted.items():
        unsent = residual.double()
        if state.velocity is not None:
            momentum = compressor.settings.momentum
            unsent += state.velocity.accepted[name].double() * momentum / (1 - momentum)
        torch.distributed.all_reduce(unsent)
        shape = tuple(sent[name].shape)
        every = sum(
            gradient_of(name, shape, each, step).double() / ranks for each in range(ranks) for step in range(steps)
        )
        assert isinstance(every, torch.Tensor)
        size = every.norm()
        found[name] = (
            float((sent[name] + unsent / ranks - every).norm() / size),
            float((sent[name] - every).norm() / size),
        )
    return found


def test_what_was_sent_and_what_is_kept_are_all_gradients() -> None:
    kinds = [settings("1bit"), settings("topk", ratio=0.05), settings("topk", momentum=0.9), settings("powersgd")]
    for kind, found in run_ranks(2, each_of, telescoped, {str(each): (each, 6, 0.25) for each in kinds})[0].items():
        assert len(found) >= 2
        for whole, part in found.values():
            assert whole < 1e-5 < 0.05 < part, kind


def kept_by(compressor: Any) -> dict[str, torch.Tensor]:
    """Return a copy of what is remembered between steps."""
    feedback = compressor.feedback()
    return {f"{kind}/{name}": each.clone() for kind in feedback for name, each in feedback[kind].accepted.items()}


def refused_step(compression: Any, bad: float) -> tuple[bool, bool, bool]:
    """Return whether rank 0 sees a bad value of rank 1, and whether a refused step changes what is kept."""
    model, compressor, rank, _ = build(compression)
    reduced(model, rank, 0)
    compressor.settle(torch.zeros(()))
    before = kept_by(compressor)
    model.zero_grad()
    targets = {name: gradient_of(name, tuple(each.shape), rank, 1) for name, each in model.named_parameters()}
    if rank == 1:
        targets["self_attn.weight"][3, 4] = bad
    model(targets).backward()
    assert model.self_attn.weight.grad is not None
    saw = not bool(model.self_attn.weight.grad.isfinite().all())
    compressor.settle(torch.ones(()))
    kept = all(torch.equal(before[name], each) for name, each in kept_by(compressor).items())
    reduced(model, rank, 2)
    compressor.settle(torch.zeros(()))
    changed = all(not torch.equal(before[name], each) for name, each in kept_by(compressor).items())
    return saw, kept, changed


def test_a_bad_gradient_reaches_all_ranks_and_a_refused_step_keeps_nothing() -> None:
    cases = {f"{kind} {bad}": (settings(kind), float(bad)) for kind in KINDS for bad in ("nan", "inf")}
    for answers in run_ranks(2, each_of, refused_step, cases):
        assert answers == dict.fromkeys(cases, (True, True, True))


def test_top_k_sends_few_values() -> None:
    first = seen_gradients(2)[0]["topk"][0]
    for name in ("self_attn.weight", "lm_head.weight", "experts"):
        assert 0 < np.count_nonzero(first[name]) <= 2 * 0.01 * first[name].size


def test_chosen_layers_are_compressed_and_the_rest_is_exact() -> None:
    seen = seen_gradients(2)[0]["layers"][0]
    for name, each in seen.items():
        is_exact = np.allclose(each, mean_gradient(name, each.shape, 0, 2), rtol=1e-5, atol=1e-6)
        assert is_exact == (name != "self_attn.weight"), name


def test_gradients_are_exact_during_the_warm_up() -> None:
    first, second, third = seen_gradients(2)[0]["warm-up"]
    for step, seen, is_exact in ((0, first, True), (1, second, True), (2, third, False)):
        wanted = mean_gradient("experts", (3, 40, 20), step, 2)
        assert np.allclose(seen["experts"], wanted, rtol=1e-5, atol=1e-6) == is_exact


def measured_errors(compression: Any) -> list[float | None]:
    model, compressor, rank, ranks = build(compression)
    found: list[float | None] = []
    for step in range(3):
        compressor.begin_step(step)
        seen = reduced(model, rank, step)
        error = compressor.error
        found.append(None if error is None else float(error))
        if error is not None:
            pairs = [(seen[name].numpy(), mean_gradient(name, seen[name].shape, step, ranks)) for name in seen
                     if name != "self_attn.bias"]  # fmt: skip
            exact = sum(float(((ours - wanted) ** 2).sum()) for ours, wanted in pairs)
            exact /= sum(float((wanted**2).sum()) for _, wanted in pairs)
            found.append(exact**0.5)
        compressor.settle(torch.zeros(()))
    return found


def test_the_error_of_the_sum_is_measured_at_its_steps() -> None:
    cases = {kind: (settings(kind, check_every=2),) for kind in ("int8", "powersgd")}
    for first, wanted, none, last, wanted_last in run_ranks(2, each_of, measured_errors, cases)[0].values():
        assert none is None
        assert (first, last) == pytest.approx((wanted, wanted_last), rel=0.2)  # it is measured on a sample
