"""Tokenizers of the `tokenizers` library, from a JSON file. Imported only if a run uses one."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tokenizers

from trimaran.core import UserError, did_you_mean
from trimaran.core.regular_files import read_regular_bytes
from trimaran.data.text.tokenizer import TOKENIZER_FILE

END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class JsonTokenizer:
    """A tokenizer and the bytes of its file; shards store a copy of them."""

    begin_ids: tuple[int, ...] = ()

    def __init__(self, path: Path, end_token: str | None) -> None:
        self._path, self._file = path, _read(path)
        self._tokenizer = parse_tokenizer(self._file, path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._index(vocabulary, choose_end_token(vocabulary, end_token, path))

    def _index(self, vocabulary: dict[str, int], end_token: str) -> None:
        self._end_token = end_token
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
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
        with self._special_tokens_as_text():
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encodings]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._special_tokens_as_text():
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=np.int32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    @contextmanager
    def _special_tokens_as_text(self) -> Iterator[None]:
        """Encode special tokens that occur in a text as ordinary text."""
        self._tokenizer.encode_special_tokens = True
        try:
            yield
        finally:
            self._tokenizer.encode_special_tokens = False

    def special(self, name: str) -> int | None:
        return self._special.get(name)

    def ordinary_token(self, token: int) -> str | None:
        name = self._tokenizer.id_to_token(token) if token >= 0 else None
        return None if name in self._special else name

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=True)

    def decode_all(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(each) for each in ids], skip_special_tokens=False)

    def token_text(self, token: int) -> str | None:
        """Return the text of a special or added token; None for an ordinary one or an unused id."""
        name = self._tokenizer.id_to_token(token) if token >= 0 else None
        return name if name in self._special else None

    def vocabulary(self) -> dict[str, int]:
        return self._tokenizer.get_vocab(with_added_tokens=True)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a `tokenizers` file, with the tokens that a configuration added."""
        return self._tokenizer.to_str()

    def describe(self) -> dict[str, str]:
        digest = hashlib.sha256(self._file).hexdigest()
        return {"kind": "json", "path": str(self._path.resolve()), "sha256": digest, "end_token": self._end_token}

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_bytes(self._file)


def _read(path: Path) -> bytes:
    try:
        return read_regular_bytes(path, follow_links=True)
    except OSError as error:
        raise UserError("T011", f"the tokenizer cannot be read: {error.strerror}", where=f"data.tokenizer: {path}",
                        fix="name a tokenizer.json, a model folder, or `bytes`") from None  # fmt: skip


def parse_tokenizer(file: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file)
    except Exception as error:  # the library raises nothing more specific
        raise UserError("T011", f"this is not a tokenizers JSON file: {error}", where=f"data.tokenizer: {path}",
                        fix="name the tokenizer.json of a fast tokenizer") from None  # fmt: skip
    # Files from the hub often truncate and pad to a model's length; packing needs the exact tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def choose_end_token(vocabulary: dict[str, int], name: str | None, path: Path) -> str:
    candidates = [token for token in ([name] if name is not None else END_TOKENS) if token in vocabulary]
    if candidates:
        return candidates[0]
    if name is not None:
        raise UserError("T012", f"the tokenizer has no token '{name}'{did_you_mean(name, vocabulary)}",
                        where=str(path), fix="name a token of its vocabulary as the end of a document")  # fmt: skip
    raise UserError("T012", "the tokenizer has none of the usual end-of-document tokens", where=str(path),
                    fix="name it and use the packed shards: trimaran data pack --end-token TOKEN")  # fmt: skip
