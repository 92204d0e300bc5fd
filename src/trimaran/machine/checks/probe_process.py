"""Runs `python -m trimaran.machine.probe`, which imports torch, and exchanges JSON lines with it."""

import sys
from collections.abc import Mapping
from typing import Any

from trimaran.core import Seconds
from trimaran.core.child_process import ChildProcess

START_SECONDS = Seconds(120.0)  # timeout to import torch from a cold network disk


class ProbeError(Exception):
    """The probe process died, timed out, or answered with an error."""


class ProbeProcess(ChildProcess):
    """A probe process with its own `environment`. If it dies, the error is the last line of its standard error."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__([sys.executable, "-m", "trimaran.machine.probe"], environment=environment)

    def request(self, do: str, *, within: float, **order: Any) -> dict[str, Any]:
        """Return the answer to a request. Raises `ProbeError` after `within` seconds, or if the answer is an error."""
        try:
            self.send({"do": do, **order})
            answer = self.receive(seconds=within)
        except TimeoutError:
            raise ProbeError("the probe did not answer in time") from None
        except (BrokenPipeError, EOFError):
            raise ProbeError(self.last_stderr_line() or f"the probe exited with code {self.wait()}") from None
        if error := answer.get("error"):
            raise ProbeError(error)
        return answer
