"""Runs a child process that reads JSON objects, one a line, and answers with JSON lines. Its crash is an answer too."""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

import psutil

READ_BYTES = 1 << 16


class ChildProcess:
    """A process, killed with all that it started at the end of the `with` block; `descriptors` stay open in it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
        keeps_stderr: bool = True,  # without it, standard error is the caller's
    ) -> None:
        # Not a pipe: unread, it would fill up and block the process.
        self._stderr = TemporaryFile() if keeps_stderr else None  # noqa: SIM115 - closed by `kill`
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
                                         env=environment, pass_fds=descriptors)  # fmt: skip
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. Raises BrokenPipeError if the process has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def receive(self, *, seconds: float | None = None) -> dict[str, Any]:
        """Return the next answer. Raises TimeoutError after `seconds`, and EOFError if the process sends no more."""
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), None if seconds is None else time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([pipe], [], [], left)[0]:
                raise TimeoutError(f"it was silent for {seconds:g} s")
            data = os.read(pipe, READ_BYTES)
            if not data:
                raise EOFError(f"it ended with code {self.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def wait(self) -> int:
        """Return the exit code of the process, whose answers have ended."""
        return self._process.wait()

    def last_stderr_line(self) -> str:
        """Wait for the end of the process, and return the last line of its standard error; empty if there is none."""
        assert self._stderr is not None
        self._process.wait()
        self._stderr.seek(0)
        lines = [line.strip() for line in self._stderr.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def kill(self) -> None:
        kill_tree(self._process)
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that a dead process never read
                    pipe.close()


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those that it started, such as loaders, unless it has ended."""
    if process.poll() is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.kill()
    process.wait()
