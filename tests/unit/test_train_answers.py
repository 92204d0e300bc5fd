"""What a model says to held-out questions is its own: nothing that was right is whispered to it."""

import torch
from torch import Tensor

from trimaran.data.step_batch import Inputs
from trimaran.data.tokenizer import ByteTokenizer
from trimaran.train.answers import OWN_TOKENS, ModelAnswer, answers, own_words
from trimaran.train.loss.cross_entropy import IGNORED

IMAGE = 257


def asked(question: str, answer: str) -> Inputs:
    words = [*(question + answer).encode(), 256]
    labels = [IGNORED] * (len(question) - 1) + words[len(question) :] + [IGNORED]
    tokens = torch.tensor([words])
    return {
        "tokens": tokens,
        "labels": torch.tensor([labels]),
        "documents": torch.zeros_like(tokens, dtype=torch.int32),
    }


def parrot(inputs: Inputs) -> Tensor:
    """Says again what it heard last."""
    return inputs["tokens"].clone()


def spoken(inputs: Inputs, guesses: Tensor) -> list[ModelAnswer]:
    return list(answers(inputs, guesses, ByteTokenizer()))


def test_a_parrot_does_not_look_as_if_it_knew() -> None:
    inputs = asked("one?", "abc")
    assert spoken(inputs, parrot(inputs))[0].said == "?abc"  # each letter after the right one
    assert spoken(inputs, own_words(parrot, inputs)) == [ModelAnswer("one?", "abc", "????", right=False)]


def test_one_who_knows_is_right_all_through() -> None:
    inputs = asked("one?", "abc")

    def knows(heard: Inputs) -> Tensor:
        return torch.where(
            heard["tokens"] == ord("?"), ord("a"), torch.where(heard["tokens"] == ord("c"), 256, heard["tokens"] + 1)
        )

    assert spoken(inputs, own_words(knows, inputs)) == [ModelAnswer("one?", "abc", "abc", right=True)]


def test_words_after_the_end_are_not_shown() -> None:
    inputs = asked("one?", "abc")

    def brief(heard: Inputs) -> Tensor:
        return torch.where(heard["tokens"] == ord("?"), ord("b"), 256)

    assert spoken(inputs, own_words(brief, inputs)) == [ModelAnswer("one?", "abc", "b", right=False)]


def test_a_picture_that_is_not_there_is_not_put_in_and_long_answers_are_cut() -> None:
    inputs = asked("one?", "x" * 100)
    heard: list[Tensor] = []

    def sees(given: Inputs) -> Tensor:
        heard.append(given["tokens"].clone())
        return torch.full_like(given["tokens"], IMAGE)

    guesses = own_words(sees, inputs, image_token=IMAGE)
    assert len(heard) == OWN_TOKENS
    assert all(torch.equal(each, inputs["tokens"]) for each in heard)
    assert spoken(inputs, guesses)[0].expected == "x" * OWN_TOKENS
