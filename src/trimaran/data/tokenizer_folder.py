"""The tokenizer of a Hugging Face model folder: its files, special tokens and chat templates. Nothing is run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.core.regular_files import read_regular_bytes

TOKENIZER_FILE = "tokenizer.json"
CONFIG, SPECIAL_TOKENS = "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, OLD_TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "chat_template.json", "additional_chat_templates"
# The files from which the library transformers can make a tokenizer.json.
VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
FILES = (TOKENIZER_FILE, CONFIG, SPECIAL_TOKENS, "added_tokens.json", "merges.txt", *VOCABULARIES, TEMPLATE,
         OLD_TEMPLATE)  # fmt: skip
RECORD = "trimaran-tokenizer.json"  # what a run writes beside its weights: `describe` of its tokenizer
MAX_FILE_BYTES = 512 << 20


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
    special = {**_object(files, SPECIAL_TOKENS, folder), **config}
    return TokenizerFolder(
        files=files,
        config=config,
        special_tokens={key: text for key, value in special.items() if (text := _token_text(key, value)) is not None},
        templates=_templates(files, config, folder),
    )


def read_record(folder: Path) -> dict[str, Any]:
    """Return the description of the tokenizer in a folder that a run has saved; empty for any other folder."""
    if not (folder / RECORD).is_file():
        return {}
    return _object({RECORD: _read(folder / RECORD)}, RECORD, folder)


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
    named = template if isinstance(template, list) else []
    return {
        str(each["name"]): each["template"]
        for each in named
        if isinstance(each, dict) and isinstance(each.get("name"), str) and isinstance(each.get("template"), str)
    }


def _token_text(key: str, value: Any) -> str | None:
    """Return the text of a special token such as `eos_token`, which a config writes as a text or an object."""
    if not key.endswith("_token") or key.startswith("add_"):
        return None
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read(file: Path) -> bytes:
    try:
        return read_regular_bytes(file, follow_links=True, limit_bytes=MAX_FILE_BYTES)
    except OSError as error:
        raise unusable(f"it cannot be read: {error.strerror}", file) from None


def _object(files: Mapping[str, bytes], name: str, folder: Path) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        found = json.loads(files[name])
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
    return UserError("T023", f"the model's tokenizer cannot be used: {what}", where=str(file),
                     fix="copy the file from the model again, or name another tokenizer in data.tokenizer")  # fmt: skip
