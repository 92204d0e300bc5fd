"""Tokens chosen for many sequences at once are those that `TokenSampler` chooses for each alone."""

import math

import numpy as np
import pytest
import torch

from tests.cases import slow
from trimaran.serve import NOT_A_TOKEN, TokenChooser, choose_tokens, logprobs_of
from trimaran.train import Sampling, TokenSampler

RULES = [
    Sampling(temperature=0),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.7, seed=4),
    Sampling(temperature=0.9, top_k=5, seed=5),
    Sampling(temperature=0.9, top_k=5, top_p=0.6, seed=6),
    Sampling(temperature=1.2, top_p=0.8, seed=7),
    Sampling(temperature=1.2, top_p=0.2, seed=8),
    Sampling(temperature=1e-9, seed=9),
]


class OnlyThese:
    """A constraint that allows the same few tokens at every step."""

    def __init__(self, vocabulary: int, *allowed: int) -> None:
        self._mask = np.zeros(vocabulary, dtype=bool)
        self._mask[list(allowed)] = True

    def allowed(self) -> np.ndarray:
        return self._mask

    def advance(self, token: int) -> None:
        assert self._mask[token]


@pytest.mark.parametrize("vocabulary", [96, slow(3000)])
def test_each_sequence_gets_the_tokens_of_its_own_sampler(vocabulary: int) -> None:
    random = torch.Generator().manual_seed(0)
    samplers, choosers = [TokenSampler(each) for each in RULES], [TokenChooser(each) for each in RULES]
    for step in range(150):
        logits = torch.randn(len(RULES), vocabulary, generator=random) * (3 if step % 2 else 0.1)
        expected = [sampler.next_token(row) for sampler, row in zip(samplers, logits, strict=True)]
        assert choose_tokens(logits, choosers) == expected


@pytest.mark.parametrize("sampling", RULES[1:6])
def test_the_draws_of_tokens_that_exist_already_are_skipped(sampling: Sampling) -> None:
    logits = torch.randn(130, 50, generator=torch.Generator().manual_seed(1))
    whole = TokenChooser(sampling)
    tokens = [choose_tokens(row[None], [whole])[0] for row in logits]
    for start in (1, 15, 16, 64, 100):
        later = TokenChooser(sampling, num_drawn=start)
        assert [choose_tokens(row[None], [later])[0] for row in logits[start:]] == tokens[start:]


def test_a_constraint_and_an_excluded_token_are_never_chosen() -> None:
    logits = torch.zeros(3, 20)
    logits[:, 7] = 50
    choosers = [
        TokenChooser(Sampling(temperature=0), OnlyThese(20, 3, 4)),
        TokenChooser(Sampling(temperature=1, seed=1), OnlyThese(20, 5, 6)),
        TokenChooser(Sampling(temperature=0)),
    ]
    for _ in range(20):
        first, second, third = choose_tokens(logits, choosers)
        assert first == 3
        assert second in (5, 6)
        assert third == 7
    assert choose_tokens(logits, choosers, excluded=7)[2] == 0


def test_nan_is_no_token_and_leaves_the_others_as_they_are() -> None:
    logits = torch.zeros(3, 8)
    logits[0, 3], logits[1, 2], logits[2, 5] = 1, math.nan, 9
    choosers = [TokenChooser(Sampling(temperature=0)) for _ in range(2)] + [TokenChooser(Sampling(top_k=1))]
    assert choose_tokens(logits, choosers) == [3, NOT_A_TOKEN, 5]


def test_log_probabilities_are_those_of_the_whole_vocabulary() -> None:
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(2))
    found = logprobs_of(logits, [4, 0, 9], [0, 2, 10])
    expected = logits.log_softmax(-1)
    assert [each.logprob for each in found] == pytest.approx([float(expected[0, 4]), float(expected[1, 0]),
                                                              float(expected[2, 9])])  # fmt: skip
    assert [len(each.top) for each in found] == [0, 2, 10]
    assert found[1].top[0] == (int(logits[1].argmax()), pytest.approx(float(expected[1].max())))
    assert [value for _, value in found[2].top] == sorted((value for _, value in found[2].top), reverse=True)
    assert sum(math.exp(value) for _, value in found[2].top) == pytest.approx(1)
