"""Checks whether strangers flood the run's channel: connections that do not prove the run's token."""

from collections.abc import Callable

from trimaran.launch.supervise.attempt_watch import AttemptWatch
from trimaran.runs import IncidentLog

MIN_REFUSED, MIN_REFUSED_PER_RANK = 100, 10  # ranks that connect all at once may be refused a few times too


class StrangerCheck:
    """Files one incident for an attempt if more than a few connections were refused during it."""

    def __init__(self, log: IncidentLog, watch: AttemptWatch, count_refused: Callable[[], int]) -> None:
        self._log, self._watch, self._count_refused = log, watch, count_refused
        self._before, self._done = count_refused(), False
        self._min_refused = max(MIN_REFUSED, MIN_REFUSED_PER_RANK * watch.spec.world_size)

    def poll(self) -> None:
        if self._done or (refused := self._count_refused() - self._before) < self._min_refused:
            return
        self._done = True
        self._log.notice(
            "network",
            f"another program connects to the supervisor's port without the run's token: {refused:,} connections "
            "were refused",
            attempt=self._watch.spec.attempt,
            step=self._watch.highest_step,
            action="continued",
            evidence={"refused": refused},
        )
