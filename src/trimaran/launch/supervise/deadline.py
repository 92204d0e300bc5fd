"""How long a rank may stay in one section or step before it counts as hung, learnt from earlier durations."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from trimaran.core import FaultsSection
from trimaran.runs import Heartbeat, Section

NUM_RECENT_STEPS = 20
STEP_FACTOR = 5.0
SECTION_FACTOR = 10.0
MIN_SECTION_SECONDS = 30.0
MAX_PAUSES = 3  # of the supervisor during one silence; then the silence counts in full
LEARNT_SECTIONS: tuple[Section, ...] = ("first", "copy", "evaluation", "sampling")


class Deadlines:
    """Reads the heartbeats of a node's ranks, and finds those past their deadline.

    A step may take five times the median of the last 20 steps, but at least `hang_seconds`. A unit of
    `LEARNT_SECTIONS` may take `start_seconds` the first time, and later ten times the longest so far, but at least
    30 s. A unit of any other section may always take `start_seconds`: it reads, writes, compiles or waits for data, and
    how long that took before says nothing about the next time. Seconds in which a rank was ready to run and had no core
    do not count, neither for it nor for the ranks that may wait for it.
    """

    def __init__(self, faults: FaultsSection) -> None:
        self._faults = faults
        self._steps: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._longest: dict[Section, float] = {}
        self._before: dict[int, Heartbeat] = {}
        self._step_began: dict[int, Heartbeat] = {}  # the first heartbeat of each rank's current step
        self._step_learnt: dict[int, int] = {}  # the last step of each rank whose duration is known
        self._queued: dict[int, float] = {}
        self._core_wait = 0.0  # seconds of waiting for a core, of the rank that waited longest in each interval
        self._core_wait_at: dict[int, float] = {}  # the same when a rank last made progress
        self.expected_seconds = 0.0  # of a step, before one was measured; 0: not known
        self._is_changed = False  # the plan may have changed since the last steps
        self._pauses: deque[float] = deque(maxlen=MAX_PAUSES)  # when the supervisor resumed polling after a pause

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """Forget these ranks, which are started again, or all of them. The durations learnt so far are kept."""
        gone = {*(self._before.keys() | self._queued.keys() if ranks is None else ranks)}
        for known in (self._before, self._step_began, self._step_learnt, self._queued, self._core_wait_at):
            for rank in gone & known.keys():
                del known[rank]

    def of(self, section: Section) -> float:
        """Return the seconds that one unit of `section` may take."""
        if section == "step":
            usual = statistics.median(self._steps) if self._steps else self.expected_seconds
            return max(self._faults.hang_seconds, STEP_FACTOR * usual)
        if section not in self._longest:
            return self._faults.start_seconds
        return min(self._faults.start_seconds, max(MIN_SECTION_SECONDS, SECTION_FACTOR * self._longest[section]))

    def note_pause(self, now: float) -> None:
        """Count silence only from `now` on: the supervisor did not run until now, and maybe neither did the ranks."""
        self._pauses.append(now)

    def counted_silence(self, since: float, now: float) -> float:
        """Return the seconds from `since` to `now` that count. After `MAX_PAUSES` pauses all of them count."""
        is_excused = self._pauses and not (len(self._pauses) == MAX_PAUSES and self._pauses[0] > since)
        return now - (max(since, self._pauses[-1]) if is_excused else since)

    def overdue(
        self, heartbeats: Mapping[int, Heartbeat], now: float, queued: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """Return the seconds of silence of each rank that is past its deadline, and learn from the others.

        `queued` are the seconds that each rank has waited for a core since it was started.
        """
        queued, silent = queued or {}, {}
        # The value of a rank that has just ended drops to 0; the difference must not become negative.
        self._core_wait += max([0.0, *(each - self._queued.get(rank, each) for rank, each in queued.items())])
        self._queued.update(queued)
        for rank, heartbeat in heartbeats.items():
            before = self._before.get(rank)
            self._learn(rank, before, heartbeat)
            if before is None or heartbeat.entered > before.entered:
                self._core_wait_at[rank] = self._core_wait
            self._before[rank] = heartbeat
            seconds = self.counted_silence(heartbeat.entered, now) - (self._core_wait - self._core_wait_at[rank])
            if seconds > self.of(heartbeat.section):
                silent[rank] = seconds
        return silent

    def _learn(self, rank: int, before: Heartbeat | None, after: Heartbeat) -> None:
        if before is not None and after.entered <= before.entered:
            return
        if after.section == "restore" and self._steps:
            self._is_changed = True
            self._longest.pop("first", None)  # the first step of another plan may compile
        if before is not None and before.section == "first" and self._is_changed:
            self._is_changed = False
            self._steps.clear()  # steps of the new plan may take longer by any factor
            self._steps.append(after.entered - before.entered)
        if before is not None and before.section in LEARNT_SECTIONS:
            seconds = after.entered - before.entered
            self._longest[before.section] = max(seconds, self._longest.get(before.section, 0.0))
        # Learn the duration of a step when the next one begins, or the wait for its data.
        # What happens inside a step, such as a copy of the state or an evaluation, is part of its duration.
        began = self._step_began.get(rank)
        if began is not None and after.section in ("step", "data") and after.step > began.step:
            # Several steps may have passed since the last poll.
            self._steps.append((after.entered - began.entered) / (after.step - began.step))
            self._step_learnt[rank] = self._step_began.pop(rank).step
            began = None
        is_new = after.step != self._step_learnt.get(rank) and (began is None or began.step != after.step)
        if after.section == "step" and is_new:
            self._step_began[rank] = after
