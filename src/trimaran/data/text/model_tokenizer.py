"""The tokenizer of a model folder, with its special tokens and chat templates as its configuration says."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import pre_tokenizers

from trimaran.core import UserError
from trimaran.data import lazy_import
from trimaran.data.text.json_tokenizer import JsonTokenizer, choose_end_token, parse_tokenizer
from trimaran.data.text.tokenizer import TOKENIZER_FILE, has_tokenizer, read_record, read_tokenizer_folder, unusable


class ModelTokenizer(JsonTokenizer):
    """The tokenizer in a model folder. `save` writes the model's own files, and the tokenizer.json that was used."""

    def __init__(self, folder: Path, end_token: str | None = None) -> None:
        if not has_tokenizer(folder):
            raise UserError("T011", "the folder holds no tokenizer: no tokenizer.json and no vocabulary",
                            where=f"data.tokenizer: {folder}",
                            fix="name a model folder with a tokenizer, or a tokenizer.json")  # fmt: skip
        self._path, self.content = folder, read_tokenizer_folder(folder)
        if TOKENIZER_FILE not in self.content.files:
            module = lazy_import.load("text.slow_tokenizer", "transformers", where=f"data.tokenizer: {folder}")
            self.content.files[TOKENIZER_FILE] = module.converted_tokenizer(folder)
        self._file = self.content.files[TOKENIZER_FILE]
        self._tokenizer = parse_tokenizer(self._file, folder / TOKENIZER_FILE)
        self._add_configured_tokens()
        self._set_prefix_space()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        named = end_token or self.content.special_tokens.get("eos_token") or read_record(folder).get("end_token")
        self._index(vocabulary, choose_end_token(vocabulary, named, folder))
        self.begin_ids = self._begin_ids(vocabulary)

    def _add_configured_tokens(self) -> None:
        """Add the tokens that only tokenizer_config.json lists, under the ids that it gives them."""
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

    def _set_prefix_space(self) -> None:
        """Apply `add_prefix_space` of the config to a byte-level pre-tokenizer, as transformers does."""
        asked, pre_tokenizer = self.content.config.get("add_prefix_space"), self._tokenizer.pre_tokenizer
        if isinstance(asked, bool) and isinstance(pre_tokenizer, pre_tokenizers.ByteLevel):
            pre_tokenizer.add_prefix_space = asked

    def _begin_ids(self, vocabulary: dict[str, int]) -> tuple[int, ...]:
        """Return the ids before each document: as `add_bos_token` says, or else as the post-processor does it."""
        asked, begin = self.content.config.get("add_bos_token"), self.content.special_tokens.get("bos_token")
        if isinstance(asked, bool):
            return (vocabulary[begin],) if asked and begin in vocabulary else ()
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
        return tuple(full[: next(starts, 0)])

    def describe(self) -> dict[str, str]:
        digest = hashlib.sha256()
        for name in sorted(self.content.files):
            digest.update(json.dumps([name, hashlib.sha256(self.content.files[name]).hexdigest()]).encode())
        path, end_token = str(self._path.resolve()), self._end_token
        return {"kind": "model", "path": path, "sha256": digest.hexdigest(), "end_token": end_token}

    def save(self, folder: Path) -> None:
        for name, data in self.content.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    def encode_chats(self, texts: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and character spans of texts that a chat template wrote: special tokens are recognised."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            (np.array(each.ids, dtype=np.int32), np.array(each.offsets, dtype=np.int64).reshape(-1, 2))
            for each in encodings
        ]

    def special_texts(self) -> list[str]:
        """Return the texts of the tokens that are marked as special."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [str(each.content) for each in added if each.special]
