"""Runs a run on this machine: the command of its supervisor, the environment of its ranks, and how it is stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from trimaran.core import UserError, append_regular_file
from trimaran.launch.supervise.early_supervisor import WARM, stop_with_parent, take_early
from trimaran.launch.supervise.rank_report import STOPPED_STATES, process_state
from trimaran.runs import RunDirectory

END_SECONDS = 3.0  # for a supervisor to end after SIGQUIT
MAX_ERROR_BYTES = 1 << 16


def local_command(run: RunDirectory) -> list[str]:
    """Return the command of the supervisor, which runs `run` on this machine."""
    return [sys.executable, "-m", "trimaran.launch", str(run.path.absolute())]  # never parsed as an option


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A running supervisor on this machine, controlled with signals. `errors` is a file in memory that it writes to."""

    run: RunDirectory
    command: list[str]
    process: subprocess.Popen[bytes]
    errors: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the run continues."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def read_error(self) -> UserError | None:
        """Return the error that the supervisor, which has ended, reported about itself; None if there is none."""
        text = b"" if self.errors is None else os.pread(self.errors, MAX_ERROR_BYTES, 0)
        return UserError(**json.loads(text)) if text else None

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the supervisor; then the ranks are not watched."""
        return process_state(self.process.pid) in STOPPED_STATES

    def request_stop(self, by: int = signal.SIGTERM) -> None:
        """Ask the run to stop at the next step that all ranks agree on, with a complete checkpoint.

        `by` is the signal that requested the stop, SIGTERM or SIGINT; the supervisor records it.
        """
        self.process.send_signal(by)

    def end(self, *, seconds: float = END_SECONDS) -> None:
        """End every process of the run at once. The supervisor has `seconds` to record that this was requested."""
        self.process.send_signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill every process of the run, and return when the supervisor is gone."""
        try:
            descendants = [*psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            descendants = []
        self.process.kill()
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


def start_logged(command: Sequence[str], log_file: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which appends what it prints to `log_file`."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with append_regular_file(log_file) as out:
        return subprocess.Popen(command, stdout=out, start_new_session=True, **streams, **options)


def start_local(run: RunDirectory, *, warm: bool = False) -> LocalRun:
    """Start the supervisor of `run` and return at once. Its output and that of the ranks goes to `logs/` in the run.

    They get their own session, so that Ctrl-C reaches only this process, which decides what to do. A supervisor that
    this process has started early, see `early_supervisor`, is used. `warm`: use the user's warm fork server.
    """
    if (early := take_early()) is not None:
        arguments = [str(run.path.absolute()), "--no-check", f"--error-descriptor={early.errors}"]
        early.run(arguments)
        return LocalRun(run, [*early.command, *arguments], early.process, early.errors)
    errors = os.memfd_create("trimaran-errors")
    command = [*local_command(run), "--no-check", f"--error-descriptor={errors}"]  # the caller has checked the machine
    command += [WARM] if warm else []
    process = start_logged(command, run.agent_log, pass_fds=[errors], preexec_fn=stop_with_parent)
    return LocalRun(run, command, process, errors)
