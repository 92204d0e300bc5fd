"""Reads small third-party JSON files, with a size limit."""

import json
from pathlib import Path
from typing import Any

from trimaran.core import UserError
from trimaran.core.regular_files import read_regular_bytes


def read_json(path: Path, *, limit_bytes: int) -> dict[str, Any]:
    """Return the mapping in the file. Raises UserError if it is missing, malformed or too large."""
    try:
        text = read_regular_bytes(path, follow_links=True, limit_bytes=limit_bytes + 1)
    except OSError as error:
        raise UserError("M004", f"{path.name} cannot be read: {error.strerror}", where=str(path),
                        fix="name a folder with a Hugging Face model that you may read") from None  # fmt: skip
    if len(text) > limit_bytes:
        raise UserError("M005", f"{path.name} is larger than {limit_bytes / 1e6:.0f} MB, which no such file needs",
                        where=str(path), fix="check that this is the right file")  # fmt: skip
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("M005", f"{path.name} is not JSON: it is truncated or damaged", where=str(path),
                        fix="copy or download the file again") from None  # fmt: skip
    if not isinstance(tree, dict):
        raise UserError("M005", f"{path.name} holds no fields", where=str(path), fix="copy or download the file again")
    return tree
