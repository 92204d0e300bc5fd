"""Runs `python -m trimaran.machine.probe`, which imports torch, and exchanges JSON lines with it."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Self

import psutil

from trimaran.core import Seconds

START_SECONDS = Seconds(120.0)  # timeout to import torch from a cold network disk


class ProbeError(Exception):
    """The probe process died, timed out, or answered with an error."""


class ProbeProcess:
    """A probe process that lives as long as the `with` block, with its own `environment`.

    If it dies, the error is the last line of its standard error.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self._left = b""

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "trimaran.machine.probe"]
        self._stderr = TemporaryFile()  # an unread pipe would fill up and block the process
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, env=self._environment
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
            if pipe:
                with contextlib.suppress(BrokenPipeError):  # a request that a dead process never read
                    pipe.close()

    def request(self, do: str, *, within: float, **order: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises `ProbeError` after `within` seconds, or if the answer is an error."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ProbeError(self._last_stderr_line()) from None
        answer = json.loads(self._line(time.monotonic() + within))
        if error := answer.get("error"):
            raise ProbeError(error)
        return answer

    def _line(self, end: float) -> bytes:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._left:
            ready, _, _ = select.select([pipe], [], [], max(0.0, end - time.monotonic()))
            chunk = os.read(pipe, 1 << 16) if ready else b""
            if not chunk:
                raise ProbeError(self._last_stderr_line() if ready else "the probe did not answer in time")
            self._left += chunk
        line, _, self._left = self._left.partition(b"\n")
        return line

    def _last_stderr_line(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the probe exited with code {self._process.returncode}"
