"""What a model answers to questions that it was not trained on, beside what it should have answered."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.data.step_batch import Inputs
from trimaran.data.tokenizer import Tokenizer
from trimaran.train.loss.cross_entropy import IGNORED

OWN_TOKENS = 24  # of an answer are the model's own, each after those that it said before; more are not shown


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """One question in words, what is right, what the model says, and whether that is the same, token by token.

    Of a long answer this is the beginning, and of a talk with several answers the first one.
    """

    question: str
    expected: str
    said: str
    right: bool


def own_words(guess: Callable[[Inputs], Tensor], inputs: Inputs, *, image_token: int | None = None) -> Tensor:
    """Return the likeliest next tokens [B, T], on the CPU, where each answer goes on as the model itself began it.

    Every pass puts the last guesses in the place of what would have been right, in all answers at once, and so makes
    one token more of each the model's own. Every rank makes as many passes. A guessed `image_token` is not put in: no
    image is there for it.
    """
    tokens, labels, documents = inputs["tokens"].clone(), inputs["labels"], inputs["documents"]
    answered = (labels[:, :-1] != IGNORED) & (documents[:, 1:] == documents[:, :-1])
    guesses = guess(inputs)
    for _ in range(OWN_TOKENS - 1):
        said = guesses.to(tokens.device)[:, :-1]
        heard = answered if image_token is None else answered & (said != image_token)
        tokens[:, 1:] = torch.where(heard, said, inputs["tokens"][:, 1:])
        guesses = guess({**inputs, "tokens": tokens})
    return guesses


def answers(inputs: Inputs, guesses: Tensor, tokenizer: Tokenizer) -> Iterator[ModelAnswer]:
    """Yield the answers of one micro-batch; `guesses` [B, T] are what `own_words` returns."""
    tokens, labels, documents = (inputs[name].cpu() for name in ("tokens", "labels", "documents"))
    for row in range(len(tokens)):
        for document in torch.unique(documents[row]).tolist():
            here = documents[row] == document
            places = (here & (labels[row] != IGNORED)).nonzero().flatten()
            if not len(places):
                continue
            whole = places[places - torch.arange(len(places)) == places[0]]
            expected, said = (each[row][whole[:OWN_TOKENS]] for each in (labels, guesses))
            right = torch.equal(expected, said)
            ended = (said == labels[row][whole[-1]]).nonzero().flatten().tolist()
            before = here & (torch.arange(len(here)) <= places[0])
            parts = (tokens[row][before], expected, said[: ended[0] + 1] if ended else said)
            yield ModelAnswer(*(tokenizer.decode(each.tolist()).strip() for each in parts), right=right)
