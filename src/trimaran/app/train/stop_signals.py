"""Signals of `trimaran train`: Ctrl-C or SIGTERM stops the ranks, a second Ctrl-C kills them, SIGUSR1 shows them."""

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from trimaran.core.regular_files import read_regular_text
from trimaran.launch.supervise.early_supervisor import SHOW_SIGNAL
from trimaran.launch.supervise.local import LocalRun

PAUSED_NOTICE_SECONDS = 10.0


class StopSignals:
    """Counts Ctrl-C and SIGTERM; `handle` passes them on to the ranks.

    Any number of SIGTERMs counts once: schedulers may send several. The signal handlers only count, because printing
    there could garble the live view.
    """

    def __init__(self, ranks: LocalRun, show: Callable[[str], None]) -> None:
        self._ranks, self._show = ranks, show
        self._received = self._handled = 0
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
            self._ranks.kill()  # leave no rank behind, whatever went wrong here

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or not self._received:
            self._received += 1
            self._signal = number

    @property
    def exit_code(self) -> int | None:
        """The exit code of a command that was ended by a signal; None if it was not."""
        return None if self._signal is None or self._handled < 2 else 128 + self._signal

    def handle(self) -> None:
        if self._received > self._handled:
            first, self._handled = self._handled == 0 and self._received == 1, self._received
            if first:
                self._show("stopping after this step, with a checkpoint; Ctrl-C again to stop at once")
                self._ranks.request_stop(self._signal or signal.SIGTERM)
            else:
                self._show(f"stopping at once; finished checkpoints stay in {self._ranks.run.path}")
                self._ranks.end()


class PausedSupervisorNotice:
    """Prints a notice if a signal such as SIGSTOP has paused the supervisor for a while; it cannot do so itself."""

    def __init__(
        self, ranks: LocalRun, show: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ranks, self._show, self._clock = ranks, show, clock
        self._since: float | None = None
        self._shown = False

    def check(self) -> None:
        if not self._ranks.is_stopped:
            self._since, self._shown = None, False
            return
        self._since = self._clock() if self._since is None else self._since
        if not self._shown and self._clock() >= self._since + PAUSED_NOTICE_SECONDS:
            self._shown, pid = True, self._ranks.process.pid
            self._show(f"the supervisor (process {pid}) is stopped by a signal; to continue it: kill -CONT {pid}")


class ShowRanksSignal:
    """Forwards SIGUSR1 to the supervisor and prints what it then writes: the stacks and the memory of every rank."""

    def __init__(self, ranks: LocalRun, show: Callable[[str], None]) -> None:
        self._ranks, self._show, self._file = ranks, show, ranks.run.ranks_shown
        self._received = False
        self._awaited: int | None = None  # version of the file when SIGUSR1 was forwarded
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(SHOW_SIGNAL, self._mark)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(SHOW_SIGNAL, self._before)

    def _mark(self, number: int, frame: FrameType | None) -> None:
        self._received = True

    def handle(self) -> None:
        if self._received:
            self._received, self._awaited = False, self._version()
            self._ranks.process.send_signal(SHOW_SIGNAL)
        elif self._awaited is not None and self._version() != self._awaited:
            self._awaited = None
            for line in read_regular_text(self._file, errors="replace").splitlines():
                self._show(line)

    def _version(self) -> int:
        return self._file.stat().st_mtime_ns if self._file.exists() else 0
