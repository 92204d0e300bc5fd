"""What the engine is asked for, and what it answers, one token at a time."""

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from trimaran.train.generation.next_token import PlacedImage
from trimaran.train.generation.sampling import Sampling

EngineFinish = Literal["stop", "length", "context", "error"]
TopTokens = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One text to continue, or with `embed` to embed.

    `prompt` has all tokens of each of its `images`. `generated` are tokens that an earlier engine already produced:
    they follow the prompt, count as new tokens, and as many draws of the seed are skipped. `logprobs` k asks for the
    log-probability of each new token and of the k likeliest ones; `prompt_logprobs` for those of the prompt. `adapter`
    names a loaded adapter, `grammar` is the text of a JSON schema that the answer must match. `embed` generates
    nothing: the answer is the mean of the last layer's outputs over the prompt, with norm 1.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    generated: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: bool = False
    adapter: str | None = None
    images: tuple[PlacedImage, ...] = ()
    embed: bool = False
    grammar: str | None = None


class TokenOutput(NamedTuple):
    """One step's result for one request. `finish` says why it ended; None if more follows.

    `stop`: `token` is one of the stop ids, and not part of the text; `length`: after `max_tokens`; `context`: the next
    token would not fit in the model's positions or in the cache; `error`: see `error`. `top` are the likeliest tokens.
    With `prompt_logprobs` the request's first output has one entry for each token of the prompt; the first is None,
    because nothing comes before it.
    """

    request: str
    token: int | None = None
    logprob: float | None = None
    top: TopTokens = ()
    finish: EngineFinish | None = None
    error: str = ""
    embedding: tuple[float, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_top: tuple[TopTokens, ...] = ()


class TokenConstraint(Protocol):
    """Limits the next token of a request, for guided output. `advance` is called with each token, in order."""

    def allowed(self) -> np.ndarray:
        """Return a mask, bool [vocabulary], of the next tokens that are allowed. At least one is."""
        ...

    def advance(self, token: int) -> None:
        """Take note of a token that was generated."""
        ...
