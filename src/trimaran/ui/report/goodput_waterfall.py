"""Goodput as a waterfall of wall-clock: from all time since the run was made, step by step down to the useful time."""

import json
from typing import Any

from trimaran.app.runs.run_state import RunState
from trimaran.core.regular_files import read_regular_text
from trimaran.runs import RunDirectory
from trimaran.runs.record_types import is_time
from trimaran.runs.run_directory import MARKER

Tree = dict[str, Any]
GROUPS = {  # categories of the ledger, in the order of the drawing
    "queue": ("idle",),
    "start": ("init", "compile"),
    "restart": ("restart",),
    "replay": ("replay",),
    "stall": ("data", "straggler", "save", "evaluation"),
    "useful": ("compute", "communication"),
}


def waterfall_of(state: RunState) -> Tree:
    """Return the seconds of each group and of its categories, which add up to `total`; empty before the first start.

    `queue` is the time before the first start and between a stop and a resume, when no process ran.
    """
    if (ledger := state.ledger) is None:
        return {}
    waited = max(0.0, ledger.since - created) if (created := created_time(state.run)) else 0.0
    parts = {name: {each: ledger.seconds[each] for each in categories} for name, categories in GROUPS.items()}
    parts["queue"] = {"before the first start": waited, **parts["queue"]}
    groups = [
        {"name": name, "seconds": sum(found.values()), "parts": {each: value for each, value in found.items() if value}}
        for name, found in parts.items()
    ]
    return {"total": ledger.total + waited, "goodput": ledger.goodput, "groups": groups}


def created_time(run: RunDirectory) -> float | None:
    """Return when the run directory was made; None if it does not say."""
    try:
        created = json.loads(read_regular_text(run.path / MARKER))["created"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return float(created) if is_time(created) else None
