"""Tokenizers of the `tokenizers` library: from a JSON file, or of a model folder as its configuration says.

Imported only if a run uses one.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from trimaran.core import UserError, did_you_mean, read_regular_bytes
from trimaran.data import lazy_import
from trimaran.data.text.tokenizer import TOKENIZER_FILE, has_tokenizer, read_record, read_tokenizer_folder, unusable

END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")


class JsonTokenizer:
    """A tokenizer and the bytes of its file; shards store a copy of them."""

    begin_ids: tuple[int, ...] = ()

    def __init__(self, path: Path, end_token: str | None) -> None:
        self._path = path
        try:
            self._file = read_regular_bytes(path, follow_links=True)
        except OSError as error:
            raise UserError(
                "T011.tokenizer-cannot-read", where=f"data.tokenizer: {path}", reason=error.strerror
            ) from None
        self._tokenizer = parse_tokenizer(self._file, path)
        self._index(end_token)

    def _index(self, end_token: str | None) -> None:
        vocabulary, added = self.vocabulary(), self._tokenizer.get_added_tokens_decoder()
        candidates = [token for token in ([end_token] if end_token is not None else END_TOKENS) if token in vocabulary]
        if not candidates and end_token is not None:
            raise UserError(
                "T012.tokenizer-no-token",
                where=str(self._path),
                end_token=end_token,
                guess=did_you_mean(end_token, vocabulary),
            )
        if not candidates:
            raise UserError("T012.tokenizer-none-usual", where=str(self._path))
        self._end_token = candidates[0]
        self.vocab_size, self.end_id = max(vocabulary.values()) + 1, vocabulary[self._end_token]  # ids may have gaps
        self._special = {str(each.content): number for number, each in added.items()}

    def encode(self, text: str) -> np.ndarray:
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(each.ids, dtype=np.int32) for each in encodings]

    def encode_plain(self, texts: Sequence[str]) -> list[np.ndarray]:
        with self._special_tokens_as_text():
            return self.encode_many(texts)

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        with self._special_tokens_as_text():
            return self.encode_chats(texts)

    def encode_chats(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and character spans of texts that a chat template wrote: special tokens are recognised."""
        return [
            (np.array(each.ids, dtype=np.int32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
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


def parse_tokenizer(file: bytes, path: Path) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(file)
    except Exception as error:  # the library raises nothing more specific
        raise UserError("T011.not-tokenizers-json", where=f"data.tokenizer: {path}", error=error) from None
    # Files from the hub often truncate and pad to a model's length; packing needs the exact tokens.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class ModelTokenizer(JsonTokenizer):
    """The tokenizer in a model folder. `save` writes the model's own files, and the tokenizer.json that was used."""

    def __init__(self, folder: Path, end_token: str | None = None) -> None:
        if not has_tokenizer(folder):
            raise UserError("T011.folder-holds", where=f"data.tokenizer: {folder}")
        self._path, self.content = folder, read_tokenizer_folder(folder)
        if TOKENIZER_FILE not in self.content.files:
            lazy_import.require("transformers", where=f"data.tokenizer: {folder}")
            self.content.files[TOKENIZER_FILE] = _converted_tokenizer(folder)
        self._file = self.content.files[TOKENIZER_FILE]
        self._tokenizer = parse_tokenizer(self._file, folder / TOKENIZER_FILE)
        # Add the tokens that only tokenizer_config.json lists, under the ids that it gives them.
        listed: Any = self.content.config.get("added_tokens_decoder") or {}
        known = self._tokenizer.get_added_tokens_decoder()
        for number, fields in sorted(((int(key), value) for key, value in listed.items()), key=lambda each: each[0]):
            if number in known:
                continue
            options = {key: bool(fields.get(key)) for key in ("single_word", "lstrip", "rstrip", "normalized")}
            token = tokenizers.AddedToken(fields["content"], **options, special=bool(fields.get("special")))
            self._tokenizer.add_special_tokens([token]) if token.special else self._tokenizer.add_tokens([token])
            if self._tokenizer.token_to_id(fields["content"]) != number:
                raise unusable(f"tokenizer_config.json gives '{fields['content']}' the id {number}, tokenizer.json "
                               f"{self._tokenizer.token_to_id(fields['content'])}", self._path)  # fmt: skip
        asked, pre_tokenizer = self.content.config.get("add_prefix_space"), self._tokenizer.pre_tokenizer
        if isinstance(asked, bool) and isinstance(pre_tokenizer, pre_tokenizers.ByteLevel):  # as transformers does
            pre_tokenizer.add_prefix_space = asked
        self._index(end_token or self.content.special_tokens.get("eos_token") or read_record(folder).get("end_token"))
        # The ids before each document: as `add_bos_token` says, or else as the post-processor does it.
        asked, begin = self.content.config.get("add_bos_token"), self.content.special_tokens.get("bos_token")
        if isinstance(asked, bool):
            vocabulary = self.vocabulary()
            self.begin_ids = (vocabulary[begin],) if asked and begin in vocabulary else ()
        else:
            plain = self._tokenizer.encode("a", add_special_tokens=False).ids
            full = self._tokenizer.encode("a", add_special_tokens=True).ids
            starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
            self.begin_ids = tuple(full[: next(starts, 0)])

    def describe(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for name in sorted(self.content.files):
            digest.update(json.dumps([name, hashlib.sha256(self.content.files[name]).hexdigest()]).encode())
        return super().describe() | {"kind": "model", "sha256": digest.hexdigest()}

    def save(self, folder: Path) -> None:
        for name, data in self.content.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    def special_texts(self) -> list[str]:
        """Return the texts of the tokens that are marked as special."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [str(each.content) for each in added if each.special]


def _converted_tokenizer(folder: Path) -> bytes:
    """Return the content of a tokenizer.json for a folder that has only a vocabulary. No code of the model is run."""
    from transformers import AutoTokenizer  # noqa: PLC0415  few models need it, and it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many types, and import errors of sentencepiece and tiktoken
        reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
        raise unusable(f"it has no tokenizer.json, and transformers cannot convert it: {reason}", folder) from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise unusable("it has no tokenizer.json, and transformers knows no fast version of it", folder)
    return backend.to_str().encode()
