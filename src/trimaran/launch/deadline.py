"""How long a rank may stand still before it has hung: learnt from how long the same thing took before."""

import statistics
from collections import deque
from collections.abc import Mapping

from trimaran.core import FaultsSection
from trimaran.run import Heartbeat, Section

STEPS = 20
STEP_FACTOR = 5.0
SECTION_FACTOR = 10.0
LEAST_SECONDS = 30.0
NAPS = 3


class Deadlines:
    """Looks at the heartbeats of a node's ranks, and says which of them are late.

    A step may take five times the median of the last 20, but at least `hang_seconds`. Everything else may take
    `start_seconds` the first time, and later ten times the longest that was seen, but at least 30 s. A wait for data
    always may: the loader has deadlines of its own, and names the sample. So may what is compiled: no two things take
    the same time. Seconds in which a rank could run and was
    given no core do not count, for it or for those that may be waiting for it.
    """

    def __init__(self, faults: FaultsSection) -> None:
        self._faults = faults
        self._steps: deque[float] = deque(maxlen=STEPS)
        self._longest: dict[Section, float] = {}
        self._before: dict[int, Heartbeat] = {}
        self._queued: dict[int, float] = {}
        self._crowded = 0.0  # seconds, of the rank that waited longest at each look, for a core
        self._crowded_at: dict[int, float] = {}  # what they were when a rank was last heard of
        self._naps: deque[float] = deque(maxlen=NAPS)  # when whoever watches was there again

    def start(self) -> None:
        """Forget the ranks, which are new, but not how long things take."""
        self._before.clear()
        self._queued.clear()
        self._crowded_at.clear()

    def of(self, section: Section) -> float:
        """Return the seconds that `section` may take."""
        if section == "step":
            usual = statistics.median(self._steps) if self._steps else 0.0
            return max(self._faults.hang_seconds, STEP_FACTOR * usual)
        if section in ("data", "compile") or section not in self._longest:
            return self._faults.start_seconds
        return min(self._faults.start_seconds, max(LEAST_SECONDS, SECTION_FACTOR * self._longest[section]))

    def excuse(self, now: float) -> None:
        """Count silence only from `now` on: whoever watches was not there, and the ranks may not have been either."""
        self._naps.append(now)

    def _counted(self, entered: float, now: float) -> float:
        """Return the seconds of a silence that count. Who naps again and again does not excuse it for ever."""
        is_excused = self._naps and not (len(self._naps) == NAPS and self._naps[0] > entered)
        return now - (max(entered, self._naps[-1]) if is_excused else entered)

    def late(
        self, heartbeats: Mapping[int, Heartbeat], now: float, queued: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """Return the seconds of silence of each rank that is past its deadline, and learn from the others.

        `queued` are the seconds that each rank has waited for a core since it was started.
        """
        queued, silent = queued or {}, {}
        # Of a rank that has just ended nothing is counted any more: its 0 takes nothing back.
        self._crowded += max([0.0, *(each - self._queued.get(rank, each) for rank, each in queued.items())])
        self._queued.update(queued)
        for rank, heartbeat in heartbeats.items():
            before = self._before.get(rank)
            self._learn(before, heartbeat)
            if before is None or heartbeat.entered > before.entered:
                self._crowded_at[rank] = self._crowded
            self._before[rank] = heartbeat
            seconds = self._counted(heartbeat.entered, now) - (self._crowded - self._crowded_at[rank])
            if seconds > self.of(heartbeat.section):
                silent[rank] = seconds
        return silent

    def _learn(self, before: Heartbeat | None, after: Heartbeat) -> None:
        if before is None or after.entered <= before.entered:
            return
        seconds = after.entered - before.entered
        if before.section == "step" and after.section in ("step", "data"):
            # A look is not taken at every step: several may have passed.
            self._steps.append(seconds / max(1, after.step - before.step))
        elif before.section != "step":
            self._longest[before.section] = max(seconds, self._longest.get(before.section, 0.0))
