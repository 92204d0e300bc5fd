"""The data position is a function of the step (principle 4, docs/principles.md): resizes lose or repeat no sample."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.data import DataShare, positions


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def phased_runs(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    """A global batch and up to six phases of a run: ranks, micro-batch size, and steps until the next resize."""
    batch = draw(st.integers(1, 48))
    phases = []
    for _ in range(draw(st.integers(1, 6))):
        ranks = draw(st.sampled_from(divisors(batch)))
        micro_batch = draw(st.sampled_from(divisors(batch // ranks)))
        phases.append((ranks, micro_batch, draw(st.integers(0, 9))))
    return batch, phases


def global_order(batch: int, ranks: int, micro_batch: int, step: int) -> np.ndarray:
    """Return the indices of a step in the order in which they are computed: micro-step by micro-step, rank by rank."""
    accumulation = batch // (ranks * micro_batch)
    shares = [DataShare(rank=rank, dp=ranks, micro_batch=micro_batch, grad_accum=accumulation) for rank in range(ranks)]
    return np.stack([share.indices(step) for share in shares], axis=1).reshape(-1)


@given(phased_runs())
@settings(max_examples=40, deadline=None)
def test_resizes_change_neither_the_samples_nor_their_order(run: tuple[int, list[tuple[int, int, int]]]) -> None:
    batch, phases = run
    seen, step = [], 0
    for ranks, micro_batch, steps in phases:
        seen += [global_order(batch, ranks, micro_batch, each) for each in range(step, step + steps)]
        step += steps
    assert np.array_equal(np.concatenate([np.empty(0, dtype=int), *seen]), np.arange(step * batch))


@given(phased_runs(), st.integers(1, 400), st.integers(0, 2**63 - 1))
@settings(max_examples=25, deadline=None)
def test_every_epoch_sees_each_sample_once_with_any_resizes(
    run: tuple[int, list[tuple[int, int, int]]], length: int, seed: int
) -> None:
    batch, phases = run
    seen, step = [np.empty(0, dtype=int)], 0
    while step * batch < 2 * length:  # repeat the phases until two epochs are over
        for ranks, micro_batch, steps in phases:
            for each in range(step, step + max(1, steps)):
                seen.append(positions(seed, global_order(batch, ranks, micro_batch, each), length))
            step += max(1, steps)
    samples = np.concatenate(seen)
    for epoch in range(2):
        assert np.array_equal(np.sort(samples[epoch * length : (epoch + 1) * length]), np.arange(length))


@given(phased_runs())
@settings(max_examples=25, deadline=None)
def test_a_repeated_step_sees_the_same_samples(run: tuple[int, list[tuple[int, int, int]]]) -> None:
    """After a rewind, under another number of ranks."""
    batch, phases = run
    orders = [global_order(batch, ranks, micro_batch, 7) for ranks, micro_batch, _ in phases]
    assert all(np.array_equal(order, orders[0]) for order in orders)
