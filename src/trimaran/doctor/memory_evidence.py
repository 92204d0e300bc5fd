"""Reads the memory snapshots of a run: which modules held how much memory, on which rank."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import read_regular_text

MAX_SNAPSHOTS = 16  # the newest
MAX_FILE_BYTES = 16 << 20
FILE_NAME = re.compile(r"memory-step-\d+-rank-(\d+)\.json")


def read_snapshots(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest snapshots by time, each with its `rank`. Files that are not our snapshots are skipped."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("memory-step-*-rank-*.json"))[-MAX_SNAPSHOTS:]:
        name = FILE_NAME.fullmatch(path.name)
        try:
            tree = json.loads(read_regular_text(path)) if path.stat().st_size <= MAX_FILE_BYTES else None
        except (OSError, ValueError):
            continue
        if name and isinstance(tree, dict) and isinstance(tree.get("time"), int | float):
            found.append(tree | {"rank": int(name[1]), "file": path.name})
    yield from sorted(found, key=lambda each: each["time"])


def largest_holder(snapshot: dict[str, Any]) -> tuple[str, float] | None:
    """Return the largest holder, such as `activations of layers.0`, and its bytes; None if there is none."""
    within = snapshot.get("within")
    lists = (snapshot.get("holders"), within.get("holders") if isinstance(within, dict) else None)
    holders = [each for found in lists if isinstance(found, list) for each in found if isinstance(each, dict)]
    known = [each for each in holders if isinstance(each.get("bytes"), int | float) and each.get("kind") != "free"]
    if not known:
        return None
    most = max(known, key=lambda each: each["bytes"])
    return f"{most.get('kind')} of {most.get('module') or 'no module'}", float(most["bytes"])
