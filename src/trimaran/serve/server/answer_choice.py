"""One answer of a call while it is generated: its text, its tokens with log-probabilities, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimaran.data.text.tokenizer import Tokenizer
from trimaran.serve.engine.engine_request import TokenOutput, TopTokens
from trimaran.serve.server.answer_text import AnswerText
from trimaran.serve.server.prompt_reader import PreparedPrompt

AnswerFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of an answer or of an echoed prompt, with its log-probability and the likeliest tokens."""

    token: int
    logprob: float | None
    top: TopTokens


@dataclass(slots=True)
class ChoiceDelta:
    """What outputs add to an answer."""

    text: str = ""
    tokens: list[TokenRecord] = field(default_factory=list)
    finish: AnswerFinish | None = None


class AnswerChoice:
    """An answer in progress. `echo` is the text of the prompt that it begins with."""

    def __init__(
        self, prompt: PreparedPrompt, tokenizer: Tokenizer, stops: Sequence[str], *, echo: str = "", records: bool
    ) -> None:
        self._prompt, self._text = prompt, AnswerText(tokenizer, prompt.ids, stops)
        self._echo, self._records = echo, records
        self._parts: list[str] = []
        self._tokens: list[TokenRecord] = []
        self._finish: AnswerFinish | None = None
        self.has_stops = bool(stops)
        self.embedding: tuple[float, ...] | None = None

    @property
    def is_finished(self) -> bool:
        return self._finish is not None

    @property
    def whole(self) -> ChoiceDelta:
        """All that was added."""
        return ChoiceDelta("".join(self._parts), self._tokens, self._finish)

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt.ids)

    def add(self, outputs: Sequence[TokenOutput]) -> ChoiceDelta:
        """Return what these outputs add. A stop sequence ends the answer although the engine would go on."""
        first, last = outputs[0], outputs[-1]
        delta = ChoiceDelta(text=self._echo)
        if self._echo and first.prompt_logprobs:
            tops: Sequence[TopTokens] = first.prompt_top or [()] * len(self._prompt.ids)
            delta.tokens += [TokenRecord(*each) for each in zip(self._prompt.ids, first.prompt_logprobs, tops,
                                                                strict=True)]  # fmt: skip
        self._echo, self.embedding = "", last.embedding
        shown = [each for each in outputs if each.token is not None and each.finish != "stop"]
        num_before = self._text.num_tokens
        delta.text += self._text.add([each.token for each in shown if each.token is not None])
        if self._records:
            taken = shown[: self._text.num_tokens - num_before]
            delta.tokens += [
                TokenRecord(each.token, each.logprob, each.top) for each in taken if each.token is not None
            ]
        if self._text.is_stopped:
            delta.finish = "stop"
        elif last.finish is not None:
            delta.text += self._text.finish()
            delta.finish = "stop" if last.finish == "stop" or self._text.is_stopped else "length"
        self._parts.append(delta.text)
        self._tokens += delta.tokens
        self._finish = delta.finish
        return delta
