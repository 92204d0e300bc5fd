"""What Ctrl-C and SIGTERM mean while ranks are at work: one asks them to stop, a second Ctrl-C ends them. SIGUSR1 asks
what they do."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from trimaran.app.views.logs import printable
from trimaran.launch.local import LocalRun
from trimaran.launch.signals import SHOW

HELD_SECONDS = 10.0


class StopButton:
    """Counts Ctrl-C instead of dying of it; `act` passes on what was asked since the last look.

    Any number of SIGTERMs is one press: schedulers may send several. The handlers only count: what they would print or
    kill could land in the middle of a frame.
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
        if number == signal.SIGINT or not self._presses:
            self._presses += 1
            self._signal = number

    @property
    def exit_code(self) -> int | None:
        """What a shell expects of a command that a signal ended; None unless that is what happened."""
        return None if self._signal is None or self._acted < 2 else 128 + self._signal

    def act(self) -> None:
        if self._presses > self._acted:
            first, self._acted = self._acted == 0 and self._presses == 1, self._presses
            if first:
                self._say("stopping after this step, with a checkpoint; Ctrl-C again to stop at once")
                self._ranks.request_stop(self._signal or signal.SIGTERM)
            else:
                self._say(f"stopping at once; what was written stays in {self._ranks.run.path}")
                self._ranks.end()


class HeldSupervisor:
    """Says once, each time, that a signal has held the supervisor for a while: nothing else would ever be said."""

    def __init__(self, ranks: LocalRun, say: Callable[[str], None]) -> None:
        self._ranks, self._say = ranks, say
        self._since: float | None = None
        self._said = False

    def look(self) -> None:
        if not self._ranks.is_stopped:
            self._since, self._said = None, False
            return
        self._since = self._since or time.monotonic()
        if not self._said and time.monotonic() >= self._since + HELD_SECONDS:
            self._said, pid = True, self._ranks.process.pid
            self._say(f"the supervisor (process {pid}) is stopped by a signal; it goes on after: kill -CONT {pid}")


class ShowButton:
    """Hands SIGUSR1 on to the supervisor, and says what it then writes: the stacks and the memory of every rank."""

    def __init__(self, ranks: LocalRun, say: Callable[[str], None]) -> None:
        self._ranks, self._say, self._file = ranks, say, ranks.run.ranks_shown
        self._pressed = False
        self._waits_for: int | None = None  # what the file was when the supervisor was asked
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(SHOW, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(SHOW, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pressed = True

    def act(self) -> None:
        if self._pressed:
            self._pressed, self._waits_for = False, self._version()
            self._ranks.process.send_signal(SHOW)
        elif self._waits_for is not None and self._version() != self._waits_for:
            self._waits_for = None
            for line in self._file.read_text(encoding="utf-8", errors="replace").splitlines():
                self._say(printable(line))

    def _version(self) -> int:
        return self._file.stat().st_mtime_ns if self._file.exists() else 0
