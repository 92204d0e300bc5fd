"""Sample answers to held-out questions: the model sees only its own tokens, never the expected ones."""

import torch
from torch import Tensor

from trimaran.data import ByteTokenizer, Inputs
from trimaran.train import IGNORED, MAX_ANSWER_TOKENS, SampleAnswer, decode_answers, generate_answers

IMAGE = 257


def question_and_answer(question: str, answer: str) -> Inputs:
    ids = [*(question + answer).encode(), 256]
    labels = [IGNORED] * (len(question) - 1) + ids[len(question) :] + [IGNORED]
    tokens = torch.tensor([ids])
    return {
        "tokens": tokens,
        "labels": torch.tensor([labels]),
        "documents": torch.zeros_like(tokens, dtype=torch.int32),
    }


def repeat_last(inputs: Inputs) -> Tensor:
    """Predicts the last token again."""
    return inputs["tokens"].clone()


def decode(inputs: Inputs, predicted: Tensor) -> list[SampleAnswer]:
    return list(decode_answers(inputs, predicted, ByteTokenizer()))


def test_a_model_that_repeats_its_input_does_not_get_the_answer_from_it() -> None:
    inputs = question_and_answer("one?", "abc")
    assert decode(inputs, repeat_last(inputs))[0].generated == "?abc"  # with teacher forcing
    assert decode(inputs, generate_answers(repeat_last, inputs)) == [SampleAnswer("one?", "abc", "????", correct=False)]


def test_a_model_that_knows_the_answer_is_correct() -> None:
    inputs = question_and_answer("one?", "abc")

    def predict(given: Inputs) -> Tensor:
        return torch.where(
            given["tokens"] == ord("?"), ord("a"), torch.where(given["tokens"] == ord("c"), 256, given["tokens"] + 1)
        )

    assert decode(inputs, generate_answers(predict, inputs)) == [SampleAnswer("one?", "abc", "abc", correct=True)]


def test_tokens_after_the_end_of_an_answer_are_not_shown() -> None:
    inputs = question_and_answer("one?", "abc")

    def predict(given: Inputs) -> Tensor:
        return torch.where(given["tokens"] == ord("?"), ord("b"), 256)

    assert decode(inputs, generate_answers(predict, inputs)) == [SampleAnswer("one?", "abc", "b", correct=False)]


def test_a_predicted_image_token_is_not_fed_back_and_long_answers_are_truncated() -> None:
    inputs = question_and_answer("one?", "x" * 100)
    given_tokens: list[Tensor] = []

    def predict(given: Inputs) -> Tensor:
        given_tokens.append(given["tokens"].clone())
        return torch.full_like(given["tokens"], IMAGE)

    predicted = generate_answers(predict, inputs, image_token=IMAGE)
    assert len(given_tokens) == MAX_ANSWER_TOKENS
    assert all(torch.equal(each, inputs["tokens"]) for each in given_tokens)
    assert decode(inputs, predicted)[0].expected == "x" * MAX_ANSWER_TOKENS
