"""Sampling: the likeliest token, a random one by its probability, and the filters top-k and top-p."""

import math
from collections import Counter

import pytest
import torch

from trimaran.core import UserError
from trimaran.train import Sampling, TokenSampler

LOGITS = torch.tensor([1.0, 3.0, 0.0, 2.5, -1.0, 2.0])


def drawn(count: int = 300, **fields: float) -> Counter[int]:
    sampler = TokenSampler(Sampling(**{"temperature": 1.0, **fields}))  # pyrefly: ignore[bad-argument-type]
    return Counter(sampler.next_token(LOGITS) for _ in range(count))


def test_temperature_zero_and_one_close_to_it_take_the_likeliest_token() -> None:
    assert drawn(20, temperature=0.0) == {1: 20}
    assert drawn(20, temperature=1e-300) == {1: 20}


def test_tokens_are_drawn_by_their_probabilities() -> None:
    probabilities, counts = torch.softmax(LOGITS, 0), drawn(3000)
    for token, probability in enumerate(probabilities.tolist()):
        deviation = math.sqrt(3000 * probability * (1 - probability))
        assert abs(counts[token] - 3000 * probability) < 5 * deviation


def test_the_same_seed_draws_the_same_tokens() -> None:
    assert drawn(50, seed=4) == drawn(50, seed=4)
    assert drawn(50, seed=4) != drawn(50, seed=5)


def test_top_k_keeps_the_likeliest_tokens() -> None:
    assert set(drawn(top_k=1)) == {1}
    assert set(drawn(top_k=3)) == {1, 3, 5}
    assert set(drawn(top_k=100)) == set(range(6))


def test_top_p_keeps_the_fewest_tokens_with_that_probability() -> None:
    first, second = torch.softmax(LOGITS, 0).sort(descending=True).values[:2].tolist()
    assert set(drawn(top_p=first - 0.01)) == {1}
    assert set(drawn(top_p=first + 0.01)) == {1, 3}
    assert set(drawn(top_p=first + second + 0.01)) == {1, 3, 5}
    assert set(drawn(top_p=0.0)) == {1}


def test_top_p_applies_to_what_top_k_keeps() -> None:
    first, second = torch.softmax(LOGITS, 0).sort(descending=True).values[:2].tolist()
    assert set(drawn(top_k=2, top_p=first / (first + second) - 0.01)) == {1}
    assert set(drawn(top_k=2, top_p=first / (first + second) + 0.01)) == {1, 3}


def test_nan_is_an_error() -> None:
    with pytest.raises(UserError, match="M022"):
        TokenSampler(Sampling()).next_token(torch.tensor([0.0, math.nan]))


def test_infinite_logits_are_the_likeliest() -> None:
    assert TokenSampler(Sampling(temperature=0.5)).next_token(torch.tensor([0.0, 50.0, -math.inf])) == 1
