"""The former name of `trimaran.runs`."""

from typing import Any

import trimaran.runs
from trimaran.core import warn_of_old_name


def __getattr__(name: str) -> Any:
    """Return the public name of `trimaran.runs`."""
    found = getattr(trimaran.runs, name)
    warn_of_old_name("trimaran.run")
    return found
