"""The evaluations of a run's checkpoints by `trimaran eval`, one JSON line each."""

import json
from typing import Any

from trimaran.core.regular_files import read_regular_text
from trimaran.runs.run_directory import RunDirectory


def read_evaluations(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the evaluations in the order in which they were made. Lines that are damaged are left out."""
    try:
        text = read_regular_text(run.evaluations)
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            found.append(record)
    return found
