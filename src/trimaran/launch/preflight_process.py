"""The supervisor's end of the doctor's quick look at this machine, a process beside the fork server that imports torch.

A look that cannot be taken, or takes too long, stands in nobody's way: it is told in the log.
"""

import json
import logging
import subprocess
import sys

from trimaran.core import UserError
from trimaran.run import RunDirectory

log = logging.getLogger(__name__)

LOOK_SECONDS = 30.0  # half a second is usual, nearly all of it imports


class PreflightProcess:
    """A look that is being taken from the making of this object on. `where` is what this machine is called."""

    def __init__(self, run: RunDirectory, *, kind: str, nodes: int = 1, where: str = "this machine") -> None:
        command = [sys.executable, "-m", "trimaran.doctor.node_check", str(run.path.absolute())]
        command += [f"--kind={kind}", f"--nodes={nodes}", f"--where={where}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def refusal(self) -> UserError | None:
        """Return what stands in the way of the run here; None where nothing does. Waits for the end of the look."""
        try:
            told, _ = self._process.communicate(timeout=LOOK_SECONDS)
            found = json.loads(told) if self._process.returncode == 0 else None
        except (subprocess.TimeoutExpired, ValueError):
            found = None
        if found is None:
            self.end()
            log.warning("this machine could not be looked at, the run starts all the same; see `trimaran doctor`")
        return UserError(**found) if found else None

    def end(self) -> None:
        """End a look that nobody waits for."""
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
