"""Finds the ids of InternVL's image tokens in the tokenizer files of a model folder."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.models.from_hf_internvl import CHAT, OWN_LAYOUT, TOKEN_FIELDS
from trimaran.models.json_file import read_json

MAX_TOKENIZER_BYTES = 200_000_000


def with_image_tokens(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return `config` with the ids of the image tokens, if it is an InternVL's and lacks them."""
    if config.get("model_type") not in (CHAT, OWN_LAYOUT):
        return dict(config)
    wanted = {token: field for token, field in TOKEN_FIELDS.items() if config.get(field) is None}
    found: dict[str, Any] = {}
    for token, number in _added_tokens(folder) if wanted else ():
        if token in wanted and isinstance(number, int):
            found.setdefault(wanted[token], number)
        if len(found) == len(wanted):
            break
    return {**config, **found}


def _added_tokens(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Yield the tokens that were added to the vocabulary, and their ids, from the smallest file to the largest."""
    yield from _read(folder / "added_tokens.json").items()
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    for number, token in decoder.items() if isinstance(decoder, Mapping) else ():
        if isinstance(token, Mapping) and str(number).isdecimal():
            yield token.get("content"), int(number)
    listed = _read(folder / "tokenizer.json").get("added_tokens")
    for token in listed if isinstance(listed, list) else ():
        if isinstance(token, Mapping):
            yield token.get("content"), token.get("id")


def _read(file: Path) -> Mapping[str, Any]:
    """Return the file's mapping; an empty one if it is missing or unreadable: the tokenizer's own checks say why."""
    try:
        return read_json(file, limit_bytes=MAX_TOKENIZER_BYTES) if file.is_file() else {}
    except UserError:
        return {}
