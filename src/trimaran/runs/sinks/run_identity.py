"""What a sink with a server of its own says of a run: an id that a resume keeps, and the settings."""

import hashlib
import json
from typing import Any

from trimaran.core.regular_files import read_regular_bytes, read_regular_text
from trimaran.runs.run_directory import MARKER, RunDirectory


def run_id(run: RunDirectory) -> str:
    """Return a unique ID of the run, which stays the same when it is resumed."""
    try:
        identity = read_regular_bytes(run.path / MARKER)
    except OSError:
        identity = str(run.location).encode()
    return f"{run.location.name[:40]}-{hashlib.sha256(identity).hexdigest()[:8]}"


def run_settings(run: RunDirectory) -> dict[str, Any]:
    """Return the recipe and the plan; nothing about the machine or its environment."""
    plan = json.loads(read_regular_text(run.plan))
    return {"recipe": run.read_recipe().model_dump(mode="json"), "plan": plan.get("plan", {})}
