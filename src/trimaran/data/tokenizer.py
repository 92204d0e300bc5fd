"""Text to token ids and back."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.core import UserError
from trimaran.data import lazy_import

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """What packing and sampling need. `vocab_size` is one more than the largest id."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int:
        """The id that ends a document; `encode` never adds it."""
        ...

    def encode(self, text: str) -> np.ndarray: ...

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]: ...

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of each text; what looks like a special token is read as the letters it is written with."""
        ...

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return what `encode_plain` does, and the letters that each id stands for [tokens, 2]: from, and up to."""
        ...

    def special(self, name: str) -> int | None:
        """Return the id of a token that no text becomes by itself, such as `<|im_end|>`; None when there is none."""
        ...

    def word(self, token: int) -> str | None:
        """Return the ordinary word of the vocabulary that has this id; None for a special one, or when none has it."""
        ...

    def decode(self, ids: Iterable[int]) -> str: ...

    def describe(self) -> dict[str, str]:
        """Return what `open_tokenizer` needs to find this tokenizer again in a folder that `save` wrote to."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8, 256 ends a document. Needs no file."""

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

    def word(self, token: int) -> str | None:
        return bytes([token]).decode("latin-1") if 0 <= token < 256 else None

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; ids that are no bytes say nothing, broken UTF-8 shows as U+FFFD."""
        return bytes(each for each in ids if each < 256).decode(errors="replace")

    def describe(self) -> dict[str, str]:
        return {"kind": "bytes"}

    def save(self, folder: Path) -> None:
        """Write nothing: there is nothing to keep."""


def _byte_spans(text: str) -> np.ndarray:
    """Return the character that each byte belongs to."""
    if text.isascii():
        starts = np.arange(len(text))
    else:
        starts = np.repeat(np.arange(len(text)), [len(letter.encode()) for letter in text])
    return np.stack([starts, starts + 1], axis=1)


def load_tokenizer(path: str | None, *, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer of a `tokenizers` JSON file, or the byte-level one without a path.

    `end_token` names the token that ends a document; by default it is found among the usual names.
    """
    if path is not None:
        return lazy_import.load("json_tokenizer", "tokenizers", where="data.tokenizer").JsonTokenizer(
            Path(path), end_token
        )
    if end_token is not None:
        raise UserError("T012", "the byte-level tokenizer has an end of document of its own", where="end token",
                        fix="leave the end token out, or name a tokenizers JSON file in data.tokenizer")  # fmt: skip
    return ByteTokenizer()


def open_tokenizer(description: Mapping[str, str], folder: Path) -> Tokenizer:
    """Return the tokenizer that `describe` described and `save` put into `folder`."""
    if description["kind"] == "bytes":
        return ByteTokenizer()
    file = folder / TOKENIZER_FILE
    tokenizer = load_tokenizer(str(file), end_token=description["end_token"])
    if tokenizer.describe()["sha256"] != description["sha256"]:
        raise UserError("T015", "the tokenizer beside these shards is not the one that they were packed with",
                        where=str(file), fix="pack the data again: trimaran data pack")  # fmt: skip
    return tokenizer
