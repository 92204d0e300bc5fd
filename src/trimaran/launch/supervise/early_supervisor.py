"""The signals of a supervisor, and its start before the command knows the run: torch loads while the command plans.

The supervisor starts the fork server first of all, then imports its own modules, then waits for its arguments. Only the
standard library is imported here: the command calls `start_early` before it imports anything else.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import FrameType

from trimaran.runs import die_with_parent

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


OPTIONS_WITHOUT_RUN = ("--help", "--dry-run")
LATER = "--arguments-from="  # a descriptor that the supervisor reads its other arguments from, as a JSON list
WARM = "--warm"


class EarlySupervisor:
    """A supervisor that waits for its arguments. It ends if it gets none."""

    def __init__(self, *, warm: bool) -> None:
        self.errors = os.memfd_create("trimaran-errors")
        ours, theirs = os.pipe()
        self.command = [sys.executable, "-m", "trimaran.launch", f"{LATER}{ours}", *([WARM] if warm else [])]
        output = os.memfd_create("trimaran-supervisor")  # what it prints before it knows the run's log
        try:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[ours, self.errors],
                start_new_session=True,
                preexec_fn=stop_with_parent,
            )
        finally:
            os.close(ours)
            os.close(output)
        self._arguments = theirs

    def run(self, arguments: Sequence[str]) -> None:
        """Give the supervisor its arguments, upon which it runs the run."""
        with contextlib.suppress(BrokenPipeError), open(self._arguments, "w", encoding="utf-8") as pipe:
            json.dump(list(arguments), pipe)  # a supervisor that has ended is noticed by whoever waits for it

    def cancel(self) -> None:
        """End the supervisor, and with it its fork server. Nothing has been written to any run."""
        self.process.kill()
        self.process.wait()
        os.close(self._arguments)
        os.close(self.errors)


_EARLY: list[EarlySupervisor] = []  # that of this process, until a run takes it


def start_early(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start a supervisor unless the arguments of `trimaran train` or `resume` say that no run is started here."""
    is_torchrun = {"RANK", "WORLD_SIZE"} <= environment.keys()
    if is_torchrun or any(word in OPTIONS_WITHOUT_RUN for word in arguments):
        return
    with contextlib.suppress(OSError):  # a machine that cannot start processes is reported later, by the run itself
        _EARLY.append(EarlySupervisor(warm=WARM in arguments))


def take_early() -> EarlySupervisor | None:
    """Return the supervisor that was started early, once; None if there is none, or it has ended."""
    early = _EARLY.pop() if _EARLY else None
    if early is not None and early.process.poll() is not None:
        early.cancel()
        return None
    return early


def cancel_early() -> None:
    """End the supervisor that was started early, if no run has taken it: the command was refused."""
    if (early := take_early()) is not None:
        early.cancel()


def early_processes() -> list[int]:
    """Return the supervisor that was started early, if no run has taken it; its fork server may be importing torch."""
    return [early.process.pid for early in _EARLY]


def resume_early() -> None:
    """Continue the early supervisor and its children if they are stopped."""
    for pid in early_processes():
        found = [pid]
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            found += map(int, file.read().split())
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGCONT)


def stop_with_parent() -> None:
    """Have the supervisor get a SIGHUP, upon which it stops the run, when the process that starts it dies."""
    # Signals stay blocked until the supervisor handles them. SIGHUP gets its default handler: `nohup` is meant for the
    # command, and the supervisor must not inherit that it is ignored.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED_SIGNALS)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    die_with_parent(signal.SIGHUP)


def wait_for_arguments(words: Sequence[str]) -> list[str]:
    """Return the arguments of the supervisor: `words`, or those that the command sends. Exit if it sends none."""
    later = next((word for word in words if word.startswith(LATER)), None)
    if later is None:
        return list(words)
    with open(int(later.removeprefix(LATER)), encoding="utf-8") as pipe:
        text = pipe.read()
    if not text:
        os._exit(0)  # the fork server dies with this process
    return [*(word for word in words if word != later), *json.loads(text)]
