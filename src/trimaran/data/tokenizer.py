"""Tokenizers: text to token ids and back."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.core import UserError
from trimaran.data import lazy_import

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """The tokenizer interface that packing and sampling use. `vocab_size` is one more than the largest id."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int:
        """The id that ends a document; `encode` never adds it."""
        ...

    def encode(self, text: str) -> np.ndarray: ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text. Special tokens that occur in it are encoded as ordinary text."""
        ...

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of `encode_plain`, and the character span [tokens, 2] (start, stop) of each id."""
        ...

    def special(self, name: str) -> int | None:
        """Return the id of a special token such as `<|im_end|>`; None if the tokenizer does not have it."""
        ...

    def ordinary_token(self, token: int) -> str | None:
        """Return the ordinary vocabulary entry with this id; None for a special token or an unused id."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def describe(self) -> dict[str, str]:
        """Return the description with which `open_tokenizer` reopens this tokenizer from a folder of `save`."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """A byte-level tokenizer without a file: ids 0 to 255 are UTF-8 bytes, 256 ends a document."""

    vocab_size = 257
    end_id = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(bytearray(text.encode()), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        return self.encode_many(texts)

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        return [(self.encode(text), _byte_spans(text)) for text in texts]

    def special(self, name: str) -> int | None:
        return None

    def ordinary_token(self, token: int) -> str | None:
        return bytes([token]).decode("latin-1") if 0 <= token < 256 else None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. Ids above 255 are skipped; invalid UTF-8 becomes U+FFFD."""
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def describe(self) -> dict[str, str]:
        return {"kind": "bytes"}

    def save(self, folder: Path) -> None:
        """Do nothing: this tokenizer has no file."""


def _byte_spans(text: str) -> np.ndarray:
    """Return the character span (start, stop) that each byte belongs to."""
    if text.isascii():
        starts = np.arange(len(text))
    else:
        starts = np.repeat(np.arange(len(text)), [len(character.encode()) for character in text])
    return np.stack([starts, starts + 1], axis=1)


def load_tokenizer(path: str | None, *, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer of a `tokenizers` JSON file; without a path, the byte-level one.

    `end_token` names the token that ends a document. By default the usual names are tried.
    """
    if path is not None:
        return lazy_import.load("json_tokenizer", "tokenizers", where="data.tokenizer").JsonTokenizer(
            Path(path), end_token
        )
    if end_token is not None:
        raise UserError("T012", "the byte-level tokenizer has its own end-of-document token", where="end token",
                        fix="leave the end token out, or name a tokenizers JSON file in data.tokenizer")  # fmt: skip
    return ByteTokenizer()


def open_tokenizer(description: Mapping[str, str], folder: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote to `folder`; `description` is what its `describe` returned."""
    if description.get("kind") == "bytes":
        return ByteTokenizer()
    file, end_token = folder / TOKENIZER_FILE, description.get("end_token")
    if not isinstance(end_token, str):
        raise UserError("T011", "the description of the tokenizer has no kind or no end token", where=str(folder),
                        fix="pack the data or train the run again; this folder was damaged")  # fmt: skip
    tokenizer = load_tokenizer(str(file), end_token=end_token)
    if tokenizer.describe().get("sha256") != description.get("sha256"):
        raise UserError("T015", "the tokenizer saved with these shards is not the one they were packed with",
                        where=str(file), fix="pack the data again: trimaran data pack")  # fmt: skip
    return tokenizer
