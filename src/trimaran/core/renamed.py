"""Names of the Python API that have changed. The old ones work for one minor release, with a warning."""

import warnings

GONE_IN = "0.3"
# The old name, the new one. docs/guides/upgrade.md lists them for users; docs/decisions/0082 says how to add one.
RENAMED = {
    "trimaran.Boat": "trimaran.Loop",
    "trimaran.run": "trimaran.runs",
    "Loop.rounds": "Loop.uneven_batches",
}


def warn_of_old_name(old: str) -> None:
    """Warn the caller's caller that `old` has a new name. Every place that still knows an old name calls this."""
    message = f"{old} is now {RENAMED[old]}; the old name goes away in Trimaran {GONE_IN}"
    warnings.warn(message, FutureWarning, stacklevel=3)
