"""Runs the doctor's preflight check of this machine in a process, while the fork server imports torch.

A check that fails to run, or takes too long, only logs a warning; the run starts.
"""

import json
import logging
import subprocess
import sys

from trimaran.core import UserError
from trimaran.runs import RunDirectory

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 30.0  # half a second is usual, nearly all of it for imports


class PreflightProcess:
    """A preflight check, started by the constructor. `where` is the name of this machine in messages."""

    def __init__(self, run: RunDirectory, *, kind: str, nodes: int = 1, where: str = "this machine") -> None:
        command = [sys.executable, "-m", "trimaran.doctor.node_check", str(run.location.absolute())]
        command += [f"--kind={kind}", f"--nodes={nodes}", f"--where={where}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )

    def wait_for_error(self) -> UserError | None:
        """Wait for the check, and return why the run cannot work on this machine; None if it can."""
        try:
            output, _ = self._process.communicate(timeout=TIMEOUT_SECONDS)
            error = json.loads(output) if self._process.returncode == 0 else None
        except (subprocess.TimeoutExpired, ValueError):
            error = None
        if error is None:
            self.cancel()
            log.warning("the check of this machine failed; the run starts anyway, see `trimaran doctor`")
        return UserError(**error) if error else None

    def cancel(self) -> None:
        """Kill the check."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
