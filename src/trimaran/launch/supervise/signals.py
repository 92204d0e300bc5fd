"""The signals that a supervisor handles: SIGTERM, SIGINT, SIGHUP and SIGQUIT stop the run; SIGUSR1 shows its ranks."""

import signal
from types import FrameType

SHOW_SIGNAL = signal.SIGUSR1
HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, SHOW_SIGNAL)
SIGNAL_TEXTS = {
    signal.SIGINT: "Ctrl-C (SIGINT)",
    signal.SIGHUP: "SIGHUP: the command or the terminal that started it is gone",
}


class Signals:
    """Records signals instead of dying from them.

    `stop_requested`: stop with a checkpoint. `kill_requested`: stop at once. `show_requested`: log what the ranks are
    doing; the code that does so resets it.

    Repeated SIGTERMs count as one: schedulers send it to every process of a job, and some of these forward it. A second
    SIGINT, or a SIGQUIT, requests a kill.
    """

    def __init__(self) -> None:
        self.stop_requested, self.kill_requested, self.show_requested = False, False, False
        self._last, self._presses = 0, 0

    def listen(self) -> None:
        """Handle the signals from now on, and those that were blocked until now. Call it from the main thread."""
        for number in HANDLED_SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under `nohup`
                signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED_SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == SHOW_SIGNAL:
            self.show_requested = True
            return
        self._presses += number == signal.SIGINT
        self.kill_requested |= number == signal.SIGQUIT or self._presses > 1
        self.stop_requested, self._last = True, number

    @property
    def exit_code(self) -> int:
        """The exit code that a shell expects of a command that a signal ended."""
        return 128 + self._last

    @property
    def name(self) -> str:
        """The last signal that requested a stop; empty if none did."""
        if not self._last:
            return ""
        return SIGNAL_TEXTS.get(signal.Signals(self._last), signal.Signals(self._last).name)
