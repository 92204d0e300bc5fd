"""What people and schedulers say to a supervisor: SIGTERM, SIGINT, SIGHUP, SIGQUIT, and SIGUSR1, which only asks."""

import signal
from types import FrameType

SHOW = signal.SIGUSR1
HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, SHOW)
NAMES = {signal.SIGINT: "Ctrl-C (SIGINT)", signal.SIGHUP: "SIGHUP: the command or the terminal that started it is gone"}


class Signals:
    """Takes note of signals instead of dying of them. `asked`: for an end with a checkpoint; `urgent`: for one at once.

    Any number of SIGTERMs is one wish: schedulers send it to every process of a job, and some of these pass it on. A
    second SIGINT, or a SIGQUIT, is meant. `curious`: somebody wants to see what the ranks do; whoever shows it sets
    that back.
    """

    def __init__(self) -> None:
        self.asked, self.urgent, self.curious = False, False, False
        self._last, self._presses = 0, 0

    def listen(self) -> None:
        """Hear them from now on, and those that were held back until now. Call it from the main thread."""
        for number in HEARD:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # that is what `nohup` is for
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == SHOW:
            self.curious = True
            return
        self._presses += number == signal.SIGINT
        self.urgent |= number == signal.SIGQUIT or self._presses > 1
        self.asked, self._last = True, number

    @property
    def exit_code(self) -> int:
        """What a shell expects of a command that a signal ended."""
        return 128 + self._last

    @property
    def name(self) -> str:
        if not self._last:
            return "the stop file"
        return NAMES.get(signal.Signals(self._last), signal.Signals(self._last).name)
