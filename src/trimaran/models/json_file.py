"""Small JSON files that other people wrote, read with suspicion."""

import json
from pathlib import Path
from typing import Any

from trimaran.core import UserError


def read_json(path: Path, *, limit_bytes: int) -> dict[str, Any]:
    """Return the mapping that the file holds; a missing, broken or oversized file is the person's mistake."""
    try:
        with path.open("rb") as file:
            text = file.read(limit_bytes + 1)
    except OSError as error:
        raise UserError("M004", f"{path.name} cannot be read: {error.strerror}", where=str(path),
                        fix="name a folder with a Hugging Face model that you may read") from None  # fmt: skip
    if len(text) > limit_bytes:
        raise UserError("M005", f"{path.name} is larger than {limit_bytes / 1e6:.0f} MB, which no such file needs",
                        where=str(path), fix="check that this is the right file")  # fmt: skip
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError("M005", f"{path.name} is not JSON: it is cut off or damaged", where=str(path),
                        fix="copy or download the file again") from None  # fmt: skip
    if not isinstance(tree, dict):
        raise UserError("M005", f"{path.name} holds no fields", where=str(path), fix="copy or download the file again")
    return tree
