"""Guided output: which tokens may follow, so that an answer matches a JSON schema. The work is llguidance's."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trimaran.core import UserError
from trimaran.data import ByteTokenizer, Tokenizer
from trimaran.data.text.model_tokenizer import JsonTokenizer
from trimaran.serve.engine.engine_request import EngineRequest, TokenConstraint

NUM_BYTES = 256
# As json.dumps writes it, which is what models have seen. Free white space is a place where a small model never ends.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonConstraint:
    """The tokens that may follow in one answer. When the JSON is complete, only the end of the text may."""

    def __init__(self, matcher: Any, vocabulary: int, end_ids: frozenset[int]) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._end_ids = [each for each in end_ids if each < vocabulary]

    def allowed(self) -> np.ndarray:
        """See TokenConstraint. Every id that ends the text is allowed where the end is."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.zeros(self._vocabulary, dtype=bool)
        found = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        mask[: len(found)] = found.astype(bool)
        if self._matcher.is_accepting() or not mask.any():
            mask[self._end_ids] = True
        return mask

    def advance(self, token: int) -> None:
        if not self._matcher.is_stopped() and token not in self._end_ids:
            self._matcher.consume_token(token)


def constraint_maker(tokenizer: Tokenizer, vocabulary: int) -> Callable[[EngineRequest], TokenConstraint] | None:
    """Return a function that makes the constraint of a request with a grammar; None if llguidance is missing."""
    try:
        import llguidance  # noqa: PLC0415 - optional
    except ImportError:
        return None
    prepared: list[Any] = []  # made for the first request that needs it: it takes a second for large vocabularies

    def make(request: EngineRequest) -> TokenConstraint:
        if not prepared:
            if isinstance(tokenizer, JsonTokenizer):
                guided = llguidance.LLTokenizer(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.end_id)
            else:
                assert isinstance(tokenizer, ByteTokenizer), "there is no other kind"
                guided = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_GuidedBytes()))
            prepared.append(guided)
        assert request.grammar is not None, "only requests with a grammar have a constraint"
        grammar = llguidance.LLMatcher.grammar_from_json_schema(request.grammar, overrides=JSON_STYLE)
        matcher = llguidance.LLMatcher(prepared[0], grammar, log_level=0)
        if matcher.is_error():
            raise UserError("U011", f"the schema cannot be used: {matcher.get_error()}",
                            where="response_format.json_schema",
                            fix="correct the schema, or leave out what is not supported")  # fmt: skip
        return JsonConstraint(matcher, vocabulary, request.stop_ids or frozenset([tokenizer.end_id]))

    return make


class _GuidedBytes:
    eos_token_id = ByteTokenizer.end_id
    bos_token_id = None
    tokens = (*(bytes([each]) for each in range(NUM_BYTES)), b"<end>")
    special_token_ids = (ByteTokenizer.end_id,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
