"""Tokenizers that come as a JSON file of the `tokenizers` library. Loaded only when a recipe names one."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers

from trimaran.core import UserError, nearest
from trimaran.data.tokenizer import TOKENIZER_FILE

END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class JsonTokenizer:
    """A tokenizer and the bytes of the file it came from, so that shards can keep a copy."""

    def __init__(self, path: Path, end_token: str | None) -> None:
        self._path, self._file = path, _read(path)
        self._tokenizer = _parse(self._file, path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._end_token = _end_token(vocabulary, end_token, path)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps, so counting them is not enough
        self.end_id = vocabulary[self._end_token]
        self._special = {
            str(each.content): number for number, each in self._tokenizer.get_added_tokens_decoder().items()
        }

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encodings]

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._reading_coordinator():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._reading_coordinator():
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=np.int32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    @contextmanager
    def _reading_coordinator(self) -> Iterator[None]:
        """Let special tokens in a text be read as the letters that they are written with."""
        self._tokenizer.encode_special_tokens = True
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = False

    def special(self, name: str) -> int | None:
        return self._special.get(name)

    def word(self, token: int) -> str | None:
        found = self._tokenizer.id_to_token(token) if token >= 0 else None
        return None if found in self._special else found

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=True)

    def describe(self) -> dict[str, str]:
        digest = hashlib.sha256(self._file).hexdigest()
        return {"kind": "json", "path": str(self._path.resolve()), "sha256": digest, "end_token": self._end_token}

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_bytes(self._file)


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise UserError("T011", "the tokenizer is a folder", where=f"data.tokenizer: {path}",
                        fix=f"name the file in it: {path / TOKENIZER_FILE}")  # fmt: skip
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError("T011", f"the tokenizer cannot be read: {error.strerror}", where=f"data.tokenizer: {path}",
                        fix="name a tokenizer.json, or leave data.tokenizer out for plain bytes") from None  # fmt: skip


def _parse(file: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file)
    except Exception as error:  # the library raises nothing more specific
        raise UserError("T011", f"this is not a tokenizers JSON file: {error}", where=f"data.tokenizer: {path}",
                        fix="name the tokenizer.json of a fast tokenizer") from None  # fmt: skip
    # Files from the hub often cut and pad texts to a model's length; packing wants every token and no others.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _end_token(vocabulary: dict[str, int], asked: str | None, path: Path) -> str:
    known = [token for token in ([asked] if asked is not None else END_TOKENS) if token in vocabulary]
    if known:
        return known[0]
    if asked is not None:
        raise UserError("T012", f"the tokenizer has no token '{asked}'{nearest(asked, vocabulary)}", where=str(path),
                        fix="name a token of its vocabulary as the end of a document")  # fmt: skip
    raise UserError("T012", "the tokenizer has none of the usual tokens that end a document", where=str(path),
                    fix="pack with it named: trimaran data pack --end-token TOKEN, then use the shards")  # fmt: skip
