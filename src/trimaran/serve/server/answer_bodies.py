"""Answers as OpenAI's JSON objects: whole ones, and the parts of a stream."""

import itertools
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trimaran.data.text.tokenizer import Tokenizer
from trimaran.serve.server.answer_choice import AnswerChoice, ChoiceDelta, TokenRecord

UNDECODABLE, TOKEN_ID = "\ufffd", "token_id:"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all objects of an answer share."""

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


class AnswerFormat(Protocol):
    """How answers of one endpoint look."""

    def whole(self, choices: Sequence[AnswerChoice], weights: str) -> dict[str, Any]:
        """Return the object with all answers."""
        ...

    def fields(self, weights: str) -> dict[str, Any]:
        """Return the first fields of every object of a stream."""
        ...

    def begin(self, number: int) -> dict[str, Any] | None:
        """Return the other fields of the object that a stream begins with; None if there is none."""
        ...

    def part(self, number: int, delta: ChoiceDelta) -> dict[str, Any]:
        """Return the other fields of an object of a stream."""
        ...

    def last(self, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
        """Return the other fields of the object of a stream with the usage and no answer."""
        ...


def usage_of(choices: Sequence[AnswerChoice], *, num_per_prompt: int = 1) -> dict[str, int]:
    """Return how many tokens a call had. A prompt counts once, however many answers it has."""
    prompt = sum(each.num_prompt_tokens for each in choices[::num_per_prompt])
    generated = sum(each.num_tokens for each in choices)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


@dataclass(slots=True)
class CompletionFormat:
    """Answers of /v1/completions. `logprobs` says whether log-probabilities were asked for."""

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
        logprobs = self._logprobs(delta.tokens, offset) if self.logprobs else None
        return {"index": number, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}

    def _logprobs(self, records: Sequence[TokenRecord], offset: int) -> dict[str, Any]:
        texts = [token_text(self.tokenizer, each.token) for each in records]
        starts = itertools.accumulate((len(each) for each in texts[:-1]), initial=offset)
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in records],
            "top_logprobs": [
                {token_text(self.tokenizer, token): value for token, value in each.top} if each.top else None
                for each in records
            ],
            "text_offset": list(starts)[: len(texts)],
        }


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
        logprobs = {"content": [self._record(each) for each in added.tokens]} if self.logprobs else None
        return {"index": number, **content, "logprobs": logprobs, "finish_reason": added.finish}

    def _record(self, record: TokenRecord) -> dict[str, Any]:
        top = [self._token(token, value) for token, value in record.top]
        return self._token(record.token, record.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = token_text(self.tokenizer, token)
        data = None if text.startswith(TOKEN_ID) else list(text.encode())
        return {"token": text, "logprob": logprob, "bytes": data}


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of one token; a special token has its name, and a part of a character its id."""
    text = tokenizer.decode_all([token])
    return f"{TOKEN_ID}{token}" if UNDECODABLE in text else text
