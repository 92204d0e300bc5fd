"""A queue of future events: the clock of a discrete-event simulation."""

import heapq
from collections.abc import Callable
from itertools import count


class EventQueue:
    """Actions at future times. Of actions at the same time, the one that was added first runs first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (max(time, self.now), next(self._numbers), action))

    def run(self) -> None:
        """Run all actions in the order of their times; they may add others."""
        while self._events:
            self.now, _, action = heapq.heappop(self._events)
            action()
