"""Tokenizers: text to token ids and back."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trimaran.core import UserError
from trimaran.data import lazy_import
from trimaran.data.tokenizer_folder import TOKENIZER_FILE

BYTES = "bytes"
JSON_KIND = ("json_tokenizer", "JsonTokenizer")


class Tokenizer(Protocol):
    """The tokenizer interface that packing and sampling use. `vocab_size` is one more than the largest id."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_id(self) -> int:
        """The id that ends a document; `encode` never adds it."""
        ...

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """The ids that begin a document; `encode` never adds them."""
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

    def decode_all(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, special tokens included."""
        ...

    def vocabulary(self) -> dict[str, int]:
        """Return the id of each token; empty for bytes."""
        ...

    def describe(self) -> dict[str, str]:
        """Return the description with which `open_tokenizer` reopens this tokenizer from a folder of `save`."""
        ...

    def save(self, folder: Path) -> None: ...


class ByteTokenizer:
    """A byte-level tokenizer without a file: ids 0 to 255 are UTF-8 bytes, 256 ends a document."""

    vocab_size = 257
    end_id = 256
    begin_ids: tuple[int, ...] = ()

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
        return bytes([each for each in ids if each < 256]).decode(errors="replace")

    def decode_all(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`. The end-of-document token is shown as <end>, other ids above 255 by number."""
        texts = [bytes([each]) if each < 256 else b"<end>" if each == 256 else f"<{each}>".encode() for each in ids]
        return b"".join(texts).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {}

    def describe(self) -> dict[str, str]:
        return {"kind": BYTES}

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
    """Return the tokenizer of a model folder or a `tokenizers` JSON file; without a path, the byte-level one.

    `end_token` names the token that ends a document. By default it is the folder's own, or the usual names are tried.
    """
    if path is not None and path != BYTES:
        module, kind = ("model_tokenizer", "ModelTokenizer") if Path(path).is_dir() else JSON_KIND
        loaded = lazy_import.load(module, "tokenizers", where="data.tokenizer")
        return getattr(loaded, kind)(Path(path), end_token)
    if end_token is not None:
        raise UserError("T012", "the byte-level tokenizer has its own end-of-document token", where="end token",
                        fix="leave the end token out, or name a tokenizers JSON file in data.tokenizer")  # fmt: skip
    return ByteTokenizer()


def open_tokenizer(description: Mapping[str, str], folder: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote to `folder`; `description` is what its `describe` returned."""
    if description.get("kind") == BYTES:
        return ByteTokenizer()
    end_token = description.get("end_token")
    file = folder if description.get("kind") == "model" else folder / TOKENIZER_FILE
    if not isinstance(end_token, str):
        raise UserError("T011", "the description of the tokenizer has no kind or no end token", where=str(folder),
                        fix="pack the data or train the run again; this folder was damaged")  # fmt: skip
    tokenizer = load_tokenizer(str(file), end_token=end_token)
    if tokenizer.describe().get("sha256") != description.get("sha256"):
        raise UserError("T015", "the tokenizer saved with these shards is not the one they were packed with",
                        where=str(file), fix="pack the data again: trimaran data pack")  # fmt: skip
    return tokenizer


def check_vocabulary(num_ids: int, vocabulary: int | None) -> None:
    """Raise if data with ids below `num_ids` does not fit a model with `vocabulary` ids; None: not known."""
    if vocabulary is not None and num_ids > vocabulary:
        raise UserError("T020", f"the data has {num_ids:,} token ids, the model has {vocabulary:,}",
                        where="data.tokenizer", fix=f"set model.shape.vocab to {num_ids}, "
                        "or use the model's own tokenizer")  # fmt: skip


def is_same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether both give the same ids to the same tokens. Files of equal content need not be equal."""
    if one.describe().get("sha256") == other.describe().get("sha256"):
        return one.describe()["kind"] == other.describe()["kind"]
    return bool(one.vocabulary()) and one.vocabulary() == other.vocabulary()
