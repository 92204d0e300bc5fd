"""Answers of a call: their text and tokens as they come, and how they look as JSON objects of OpenAI."""

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trimaran.data import Tokenizer
from trimaran.serve.conversation import MAX_BEFORE, TextStream
from trimaran.serve.engine.engine_request import TokenOutput, TopTokens
from trimaran.serve.server.calls import PreparedPrompt

AnswerFinish = Literal["stop", "length"]
UNDECODABLE, TOKEN_ID = "\ufffd", "token_id:"


class AnswerText:
    """Decodes tokens as they come. Text that may be the beginning of a stop sequence waits.

    A stop sequence may begin in one token and end in another. It is not part of the text, nor is what follows it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        self._stream, self._stops = TextStream(tokenizer, prompt[-MAX_BEFORE:]), tuple(stops)
        self._waiting = ""
        self.num_tokens, self.is_stopped = 0, False

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text that can be shown after these tokens; empty if it has to wait.

        `num_tokens` are those taken, up to the one that completes a stop sequence. With stop sequences, tokens are
        decoded one by one to find it.
        """
        if not self._stops:
            self.num_tokens += len(tokens)
            return self._stream.add(*tokens) if tokens else ""
        shown = ""
        for token in tokens:
            self.num_tokens += 1
            shown += self._next_part(self._stream.add(token), is_last=False)
            if self.is_stopped:
                break
        return shown

    def finish(self) -> str:
        """Return the text that waited. Nothing follows."""
        return "" if self.is_stopped else self._next_part(self._stream.finish(), is_last=True)

    def _next_part(self, text: str, *, is_last: bool) -> str:
        self._waiting += text
        found = [place for stop in self._stops if (place := self._waiting.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            shown, self._waiting = self._waiting[: min(found)], ""
            return shown
        keep = 0  # characters at the end that are the beginning of a stop sequence
        for stop in () if is_last else self._stops:
            lengths = range(min(len(stop) - 1, len(self._waiting)), keep, -1)
            keep = next((length for length in lengths if self._waiting.endswith(stop[:length])), keep)
        shown, self._waiting = self._waiting[: len(self._waiting) - keep], self._waiting[len(self._waiting) - keep :]
        return shown


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token of an answer or of an echoed prompt, with its log-probability and the likeliest tokens."""

    token: int
    logprob: float | None
    top: TopTokens


@dataclass(slots=True)
class ChoiceDelta:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    model: str
    prefix: str
    number: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def fields(self, kind: str, weights: str) -> dict[str, Any]:
        """Return the first fields of an object. `system_fingerprint` is the set of weights that answers."""
        return {
            "id": f"{self.prefix}-{self.number}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": weights,
        }


def usage_of(choices: Sequence[AnswerChoice], *, num_per_prompt: int = 1) -> dict[str, int]:
    """Return how many tokens a call had. A prompt counts once, however many answers it has."""
    prompt = sum(each.num_prompt_tokens for each in choices[::num_per_prompt])
    generated = sum(each.num_tokens for each in choices)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


@dataclass(slots=True)
class CompletionFormat:
    """Answers of /v1/completions. `logprobs` says whether log-probabilities were asked for.

    `whole` is the object with all answers. A stream has objects with `fields` first: one to `begin` with, if there is
    any, a `part` for each output, and the `last` with the usage and no answer.
    """

    head: AnswerHead
    tokenizer: Tokenizer
    num_per_prompt: int
    logprobs: bool
    _offsets: dict[int, int] = field(default_factory=dict)

    def whole(self, choices: Sequence[AnswerChoice], weights: str) -> dict[str, Any]:
        bodies = [self._choice(number, each.whole, 0) for number, each in enumerate(choices)]
        usage = usage_of(choices, num_per_prompt=self.num_per_prompt)
        return self.fields(weights) | {"choices": bodies, "usage": usage}

    def fields(self, weights: str) -> dict[str, Any]:
        return self.head.fields("text_completion", weights)

    def begin(self, number: int) -> dict[str, Any] | None:
        return None

    def part(self, number: int, delta: ChoiceDelta) -> dict[str, Any]:
        offset = self._offsets.get(number, 0)
        self._offsets[number] = offset + len(delta.text)
        return {"choices": [self._choice(number, delta, offset)]}

    def last(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        return {"choices": [], "usage": usage_of(choices, num_per_prompt=self.num_per_prompt)}

    def _choice(self, number: int, delta: ChoiceDelta, offset: int) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            texts = [token_text(self.tokenizer, each.token) for each in delta.tokens]
            starts = itertools.accumulate((len(each) for each in texts[:-1]), initial=offset)
            logprobs = {
                "tokens": texts,
                "token_logprobs": [each.logprob for each in delta.tokens],
                "top_logprobs": [
                    {token_text(self.tokenizer, token): value for token, value in each.top} if each.top else None
                    for each in delta.tokens
                ],
                "text_offset": list(starts)[: len(texts)],
            }
        return {"index": number, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """Answers of /v1/chat/completions."""

    head: AnswerHead
    tokenizer: Tokenizer
    logprobs: bool

    def whole(self, choices: Sequence[AnswerChoice], weights: str) -> dict[str, Any]:
        bodies = [
            self._choice(number, each.whole, message={"role": "assistant", "content": each.whole.text})
            for number, each in enumerate(choices)
        ]
        usage = usage_of(choices, num_per_prompt=len(choices))
        return self.head.fields("chat.completion", weights) | {"choices": bodies, "usage": usage}

    def fields(self, weights: str) -> dict[str, Any]:
        return self.head.fields("chat.completion.chunk", weights)

    def begin(self, number: int) -> dict[str, Any] | None:
        return {"choices": [self._choice(number, ChoiceDelta(), delta={"role": "assistant", "content": ""})]}

    def part(self, number: int, delta: ChoiceDelta) -> dict[str, Any]:
        return {"choices": [self._choice(number, delta, delta={"content": delta.text} if delta.text else {})]}

    def last(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        return {"choices": [], "usage": usage_of(choices, num_per_prompt=len(choices))}

    def _choice(self, number: int, added: ChoiceDelta, **content: Any) -> dict[str, Any]:
        logprobs = None
        if self.logprobs:
            records = [
                self._token(each.token, each.logprob) | {"top_logprobs": [self._token(*one) for one in each.top]}
                for each in added.tokens
            ]
            logprobs = {"content": records}
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": added.finish}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(self.tokenizer, token)
        data = None if text.startswith(TOKEN_ID) else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}


AnswerFormat = CompletionFormat | ChatFormat


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; a special token has its name, and a part of a character its id."""
    text = tokenizer.decode_all([token])
    return f"{TOKEN_ID}{token}" if UNDECODABLE in text else text
