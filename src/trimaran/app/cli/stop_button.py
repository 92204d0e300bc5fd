"""What Ctrl-C means while ranks are at work: once asks them to stop, twice ends them."""

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from trimaran.launch import LocalRun


class StopButton:
    """Counts Ctrl-C (and SIGTERM) instead of dying of it; `act` passes on what was asked since the last look.

    The handlers only count: what they would print or kill could land in the middle of a frame.
    """

    def __init__(self, ranks: LocalRun, say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._presses = self._acted = 0
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error is not None:
            self._ranks.kill()  # whatever went wrong here, no rank is left behind

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._presses += 1
        self._signal = number

    @property
    def exit_code(self) -> int | None:
        """What a shell expects of a command that a signal ended; None when nothing was pressed."""
        return None if self._signal is None else 128 + self._signal

    def act(self) -> None:
        if self._presses > self._acted:
            first, self._acted = self._acted == 0 and self._presses == 1, self._presses
            if first:
                self._say("stopping after this step; Ctrl-C again to stop at once")
                self._ranks.request_stop()
            else:
                self._say(f"stopping at once; what was written stays in {self._ranks.run.path}")
                self._ranks.kill()
