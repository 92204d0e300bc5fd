"""One answer of a call while it is generated: its text, its tokens with log-probabilities, and why it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from trimaran.data.tokenizer import Tokenizer
from trimaran.infer.engine.engine_request import TokenOutput, TopTokens
from trimaran.infer.server.answer_text import AnswerText
from trimaran.infer.server.prompt_reader import PreparedPrompt

AnswerFinish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of an answer or of an echoed prompt, with its log-probability and the likeliest tokens."""

    token: int
    logprob: float | None
    top: TopTokens


@dataclass(slots=True)
class ChoiceDelta:
    """What an output adds to an answer."""

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
        self.num_tokens = 0
        self.whole = ChoiceDelta()
        self.embedding: tuple[float, ...] | None = None

    @property
    def is_finished(self) -> bool:
        return self.whole.finish is not None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._prompt.ids)

    def add(self, output: TokenOutput) -> ChoiceDelta:
        """Return what this output adds. A stop sequence ends the answer although the engine would go on."""
        delta = ChoiceDelta(text=self._echo)
        if self._echo and output.prompt_logprobs:
            tops: Sequence[TopTokens] = output.prompt_top or [()] * len(self._prompt.ids)
            delta.tokens += [TokenRecord(*each) for each in zip(self._prompt.ids, output.prompt_logprobs, tops,
                                                                strict=True)]  # fmt: skip
        self._echo = ""
        self.embedding = output.embedding
        if output.token is not None and output.finish != "stop":
            self.num_tokens += 1
            delta.text += self._text.add(output.token)
            if self._records:
                delta.tokens.append(TokenRecord(output.token, output.logprob, output.top))
        if self._text.is_stopped:
            delta.finish = "stop"
        elif output.finish is not None:
            delta.text += self._text.finish()
            delta.finish = "stop" if output.finish == "stop" or self._text.is_stopped else "length"
        self.whole.text += delta.text
        self.whole.tokens += delta.tokens
        self.whole.finish = delta.finish
        return delta
