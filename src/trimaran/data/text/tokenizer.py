"""Tokenizers: text to token ids and back, and the files of a Hugging Face model folder. Nothing in it is run."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trimaran.core import UserError, read_regular_bytes
from trimaran.data import lazy_import

TOKENIZER_FILE = "tokenizer.json"
CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, OLD_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
# The files from which the library transformers can make a tokenizer.json.
VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
FILES = (TOKENIZER_FILE, CONFIG, SPECIAL_TOKENS, "added_tokens.json", "merges.txt", *VOCABULARIES, TEMPLATE,
         OLD_TEMPLATE)  # fmt: skip
RECORD = "trimaran-tokenizer.json"  # what a run writes beside its weights: `describe` of its tokenizer
MAX_FILE_BYTES = 512 << 20
BYTES = "bytes"
WORD_START = "\u2581"  # how SentencePiece writes a space
BYTE_LENGTH = len("<0x00>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFolder:
    """What the tokenizer files of a model say. `files` has their bytes by relative name."""

    files: dict[str, bytes]
    config: dict[str, Any]
    special_tokens: dict[str, str]
    templates: dict[str, str]


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder holds a tokenizer: a tokenizer.json, or a vocabulary that can be converted to one."""
    return any((folder / name).is_file() for name in (TOKENIZER_FILE, *VOCABULARIES))


def read_tokenizer_folder(folder: Path) -> TokenizerFolder:
    """Return the tokenizer files of a model folder, and what they say."""
    names = [name for name in FILES if (folder / name).is_file()]
    more = folder / MORE_TEMPLATES
    if more.is_dir():
        names += sorted(f"{MORE_TEMPLATES}/{file.name}" for file in more.iterdir() if file.suffix == ".jinja")
    files = {name: _read(folder / name) for name in names}
    config = _object(files, CONFIG, folder)
    texts: dict[str, str] = {}  # of special tokens such as `eos_token`, which a config writes as a text or an object
    for key, value in {**_object(files, SPECIAL_TOKENS, folder), **config}.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and not key.startswith("add_") and isinstance(text, str):
            texts[key] = text
    return TokenizerFolder(
        files=files,
        config=config,
        special_tokens=texts,
        templates=_templates(files, config, folder),
    )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the description of the tokenizer in a folder that a run has saved; empty for any other folder."""
    return _object({RECORD: _read(folder / RECORD)} if (folder / RECORD).is_file() else {}, RECORD, folder)


def chat_template_names(folder: Path) -> list[str]:
    """Return the names of the chat templates in a model folder; an empty list if it has none."""
    return list(read_tokenizer_folder(folder).templates)


def _templates(files: Mapping[str, bytes], config: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return the chat templates by name, in the order of precedence that transformers has."""
    found = {Path(name).stem: _text(files, name, folder) for name in files if name.startswith(f"{MORE_TEMPLATES}/")}
    if TEMPLATE in files:
        found["default"] = _text(files, TEMPLATE, folder)
    if found:
        return found
    template = config.get("chat_template")
    if template is None:  # a processor's file, of vision-language models
        template = _object(files, OLD_TEMPLATE, folder).get("chat_template")
    if isinstance(template, str):
        return {"default": template}
    named = [each for each in template if isinstance(each, dict)] if isinstance(template, list) else []
    pairs = ((each.get("name"), each.get("template")) for each in named)
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}


def _read(file: Path) -> bytes:
    try:
        return read_regular_bytes(file, follow_links=True, limit_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise unusable(f"it cannot be read: {error.strerror}", file) from None


def _object(files: Mapping[str, bytes], name: str, folder: Path) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}"))
    except (ValueError, RecursionError) as error:
        raise unusable(f"it is not JSON: {error}", folder / name) from None
    if not isinstance(found, dict):
        raise unusable("it is not a JSON object", folder / name)
    return found


def _text(files: Mapping[str, bytes], name: str, folder: Path) -> str:
    try:
        return files[name].decode()
    except UnicodeDecodeError:
        raise unusable("it is not UTF-8 text", folder / name) from None


def unusable(what: str, file: Path) -> UserError:
    return UserError("T023.model-tokenizer", where=str(file), text=what)


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
        found = []
        for text in texts:
            starts = np.arange(len(text))
            if not text.isascii():
                starts = np.repeat(starts, [len(character.encode()) for character in text])
            found.append((self.encode(text), np.stack([starts, starts + 1], axis=1)))
        return found

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


def load_tokenizer(path: str | None, *, end_token: str | None = None) -> Tokenizer:
    """Return the tokenizer of a model folder or a `tokenizers` JSON file; without a path, the byte-level one.

    `end_token` names the token that ends a document. By default it is the folder's own, or the usual names are tried.
    """
    if path is not None and path != BYTES:
        module = lazy_import.load("text.model_tokenizer", "tokenizers", where="data.tokenizer")
        kind = module.ModelTokenizer if Path(path).is_dir() else module.JsonTokenizer
        return kind(Path(path), end_token)
    if end_token is not None:
        raise UserError("T012.byte-level-tokenizer", where="end token")
    return ByteTokenizer()


def open_tokenizer(description: Mapping[str, str], folder: Path) -> Tokenizer:
    """Return the tokenizer that `save` wrote to `folder`; `description` is what its `describe` returned."""
    if description.get("kind") == BYTES:
        return ByteTokenizer()
    end_token = description.get("end_token")
    file = folder if description.get("kind") == "model" else folder / TOKENIZER_FILE
    if not isinstance(end_token, str):
        raise UserError("T011.description-tokenizer", where=str(folder))
    tokenizer = load_tokenizer(str(file), end_token=end_token)
    if tokenizer.describe().get("sha256") != description.get("sha256"):
        raise UserError("T015.tokenizer-saved", where=str(file))
    return tokenizer


def check_vocabulary(num_ids: int, vocabulary: int | None) -> None:
    """Raise if data with ids below `num_ids` does not fit a model with `vocabulary` ids; None: not known."""
    if vocabulary is not None and num_ids > vocabulary:
        raise UserError("T020.data-token-ids", where="data.tokenizer", num_ids=num_ids, vocabulary=vocabulary)


def is_same_tokenizer(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether both give the same ids to the same tokens. Files of equal content need not be equal."""
    if one.describe().get("sha256") == other.describe().get("sha256"):
        return one.describe()["kind"] == other.describe()["kind"]
    return bool(one.vocabulary()) and one.vocabulary() == other.vocabulary()


def byte_alphabet() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level BPE, as GPT-2 defined it."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + number) for number, byte in enumerate(hidden)}


def token_byte_lengths(tokenizer: Tokenizer, vocabulary: int) -> np.ndarray | None:
    """Return the bytes of each token id [vocabulary]; None if the tokens of this tokenizer do not say.

    Special tokens and unused ids are 0 bytes. Bytes, byte-level BPE and SentencePiece with bytes for unknown characters
    are known.
    """
    lengths = np.zeros(vocabulary, dtype=np.int64)
    if isinstance(tokenizer, ByteTokenizer):
        lengths[: min(256, vocabulary)] = 1
        return lengths
    numbers = range(min(vocabulary, tokenizer.vocab_size))
    ordinary = {number: text for number in numbers if (text := tokenizer.ordinary_token(number))}
    alphabet = set(byte_alphabet().values())
    is_byte_level = all(alphabet.issuperset(text) for text in ordinary.values())
    if not is_byte_level and "<0x00>" not in tokenizer.vocabulary():
        return None
    for number, text in ordinary.items():
        is_byte = len(text) == BYTE_LENGTH and text.startswith("<0x")
        plain = 1 if is_byte else len(text.replace(WORD_START, " ").encode())
        lengths[number] = len(text) if is_byte_level else plain
    return lengths
