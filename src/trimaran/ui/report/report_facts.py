"""The facts of a report as one JSON object: the page shows them, `--json` prints them."""

from typing import Any

from trimaran.runs import RunDirectory
from trimaran.ui.report.run_feed import RunFeed


def facts_of(run: RunDirectory) -> dict[str, Any]:
    """Return the facts about `run` from its files: strict JSON; keys without data are empty."""
    return RunFeed(run).refresh()
