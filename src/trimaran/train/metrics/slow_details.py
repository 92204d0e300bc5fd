"""Leaves slowly changing details out of most metrics lines, so that a long run's file stays small."""

import json
from collections.abc import Mapping
from typing import Any

from trimaran.core import SLOW_DETAILS

NUM_COMPLETE_STEPS = 100  # the first after each start, whose lines have every detail
MAX_SLOW_BYTES_PER_STEP = 48  # on average, of the details in SLOW_DETAILS
MAX_GROUP_BYTES_PER_STEP = 20  # on average, of `groups`


class SlowDetails:
    """Selects the details of each line. With the other fields a line takes at most 500 bytes on average.

    A line has the details in `SLOW_DETAILS` if its step is a multiple of a power of two, which follows from their size.
    `groups` are written as often as they are measured, if that is not too often for their size.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._interval = 1
        self._groups_step: float = float("-inf")  # the last step with `groups`, and their size
        self._groups_bytes = 0

    def select(self, step: int, details: Mapping[str, Any]) -> dict[str, Any]:
        """Return the details to write for `step`."""
        self._num_steps += 1
        selected = dict(details)
        is_complete = self._num_steps <= NUM_COMPLETE_STEPS
        if is_complete or step % self._interval == 0:
            slow_bytes = _num_bytes({name: details[name] for name in SLOW_DETAILS if name in details})
            self._interval = _power_of_two(slow_bytes / MAX_SLOW_BYTES_PER_STEP)
        if not is_complete and step % self._interval:
            selected = {name: value for name, value in details.items() if name not in SLOW_DETAILS}
        if "groups" in details and not self._is_groups_due(step, details["groups"]) and not is_complete:
            del selected["groups"]
        return selected

    def _is_groups_due(self, step: int, groups: Mapping[str, Any]) -> bool:
        if (step - self._groups_step) * MAX_GROUP_BYTES_PER_STEP < self._groups_bytes:
            return False
        self._groups_step, self._groups_bytes = step, _num_bytes({"groups": groups})
        return True


def _num_bytes(details: Mapping[str, Any]) -> int:
    return len(json.dumps(details, separators=(",", ":"))) if details else 0


def _power_of_two(least: float) -> int:
    """Return the smallest power of two that is at least `least`."""
    power = 1
    while power < least:
        power *= 2
    return power
