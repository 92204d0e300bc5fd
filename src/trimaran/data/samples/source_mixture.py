"""How often each sample comes in one pass over several sources, and which samples are never trained on."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from trimaran.core import UserError
from trimaran.data.sample_order import positions

MAX_REPEATS = 100


def copies(counts: Sequence[int], weights: Sequence[float | None], epochs: Sequence[float | None]) -> list[Fraction]:
    """Return how often each sample of each source comes in one pass.

    Sources with a weight share the pass in that proportion, and it is long enough for each of them to be seen whole:
    the one with the most samples for its weight comes once. The others come as often as `epochs` says, or once.
    """
    per_weight = max(
        (Fraction(n) / Fraction(w) for n, w in zip(counts, weights, strict=True) if w), default=Fraction(0)
    )
    times = []
    for count, weight, epoch in zip(counts, weights, epochs, strict=True):
        if weight is not None and count:
            times.append(Fraction(weight) * per_weight / count)
        else:
            times.append(Fraction(1 if epoch is None else epoch))
    total = sum(n * time for n, time in zip(counts, times, strict=True))
    if any(weights) and total > MAX_REPEATS * sum(counts):
        raise UserError("T038", f"with these weights one pass over the mixture is {int(total):,} samples, of "
                        f"{sum(counts):,} different ones", where="data.mixture",
                        fix="give the largest source epochs below 1 in the place of a weight")  # fmt: skip
    return times


def repeat(samples: np.ndarray, times: Fraction, seed: int) -> np.ndarray:
    """Return the samples, each `times` times, sorted; the fraction of a time falls to samples that the seed chooses."""
    whole = int(times)
    extra = round((times - whole) * len(samples))
    chosen = samples[positions(seed, np.arange(extra), len(samples))] if extra else samples[:0]
    return np.sort(np.concatenate([np.repeat(samples, whole), chosen]))


def held_out(first: int, count: int, share: float, seed: int) -> np.ndarray:
    """Return the samples of `count` from `first` on that are kept for evaluation: at least one, and never all."""
    held = min(max(1, round(count * share)), count - 1) if share > 0 else 0
    return first + positions(seed, np.arange(held), count) if held else np.empty(0, dtype=np.int64)
