"""Keeps what a folder with its own model code needs to be loaded: its code, and the fields of config.json for it."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.models import read_json
from trimaran.models.vlm_spec import INTERNVL_CHAT

MAX_CONFIG_BYTES = 10_000_000
CODE_TYPES = (INTERNVL_CHAT,)  # their classes are in the folder, and not in transformers


def with_origin_fields(config: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Return `config` with the fields that only the `origin` has, if that is a model with its own code."""
    kind = config.get("model_type")
    try:
        before = read_json(origin / "config.json", limit_bytes=MAX_CONFIG_BYTES) if kind in CODE_TYPES else {}
    except UserError:  # it was moved after the start
        before = {}
    return _merged(before, config) if before.get("model_type") == kind else dict(config)


def copy_remote_code(config: Mapping[str, Any], origin: Path, folder: Path) -> None:
    """Copy the Python files of the `origin`, if its model has its own code. They are not run."""
    if config.get("model_type") in CODE_TYPES and "auto_map" in config:
        for file in sorted(origin.glob("*.py")):
            shutil.copyfile(file, folder / file.name)


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**before}
    for name, value in after.items():
        old = before.get(name)
        both = isinstance(value, Mapping) and isinstance(old, Mapping)
        merged[name] = _merged(old, value) if both else value
    return merged
