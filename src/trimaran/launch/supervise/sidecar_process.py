"""Starts and restarts a node's sidecar, the process that samples the machine and feeds sinks.

Nothing here raises or waits while ranks are running: a run works without its sidecar.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping

from trimaran.core import UserError
from trimaran.core.regular_files import append_regular_file
from trimaran.runs import RunDirectory
from trimaran.runs.held_directory import descriptor_of
from trimaran.runs.sinks.open_sinks import has_sinks

log = logging.getLogger(__name__)

FIRST_RESTART_SECONDS, MAX_RESTART_SECONDS = 10.0, 600.0  # from one start to the next; doubled after each death
END_SECONDS = 5.0  # for the sidecar to write its last lines and close its sinks
# Of MLflow's client, which reads them when it is imported. By default it tells its makers which functions are used, and
# repeats a failed request for minutes; the sidecar repeats it, too.
CLIENT_VARIABLES = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


class SidecarProcess:
    """Keeps one sidecar alive from `start` to `end`.

    Use it in a thread that lives as long as the run: the sidecar dies with the thread that started it. The sidecar
    samples ranks that descend from the process `above`, by default from this one.
    """

    def __init__(
        self,
        run: RunDirectory,
        environment: Mapping[str, str],
        *,
        above: int | None = None,
        heartbeats: int | None = None,
        first_restart_seconds: float = FIRST_RESTART_SECONDS,
        end_seconds: float = END_SECONDS,
    ) -> None:
        """`heartbeats` is the descriptor of the heartbeat board, which the sidecar only reads."""
        self._first_delay, self._end_seconds = first_restart_seconds, end_seconds
        self._run, self._environment, self._above, self._heartbeats = run, environment, above, heartbeats
        self._process: subprocess.Popen[bytes] | None = None
        self._node, self._due, self._delay = -1, 0.0, first_restart_seconds

    def start(self, node: int) -> None:
        """Start a sidecar for this machine as node `node`, unless one is already running."""
        if node != self._node:
            self.end()
            self._node, self._delay = node, self._first_delay
            self._begin()

    def restart_if_dead(self) -> None:
        """Start another sidecar if it has died. One that exited with 0 had nothing to do."""
        if self._process is None or self._process.poll() is None or self._process.returncode == 0:
            return
        if time.monotonic() >= self._due:
            log.warning("the sidecar exited with code %d; starting another one", self._process.returncode)
            self._begin()

    def end(self) -> None:
        """Stop the sidecar; it has a few seconds to write its last lines."""
        process, self._process, self._node = self._process, None, -1
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._end_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _begin(self) -> None:
        self._due, self._delay = time.monotonic() + self._delay, min(2 * self._delay, MAX_RESTART_SECONDS)
        try:
            telemetry = self._run.read_recipe().telemetry
        except UserError as error:
            log.warning("the sidecar cannot be started: %s", error)
            return
        name = f"sidecar-{self._node}.log" if self._node else "sidecar.log"
        path, descriptor = self._run.location.absolute(), descriptor_of(self._run)
        command = [sys.executable, "-m", "trimaran.runs.sinks.sidecar", str(path), str(self._node)]
        command += [f"--supervisor={os.getpid()}", f"--sample-seconds={telemetry.sample_seconds}"]
        if self._node == 0 and has_sinks(telemetry):
            command.append("--sinks")
        if descriptor is not None:
            command.append(f"--descriptor={descriptor}")
        if self._above is not None:
            command.append(f"--above={self._above}")
        if self._heartbeats is not None:
            command.append(f"--heartbeats={self._heartbeats}")
        if (visible := self._environment.get("CUDA_VISIBLE_DEVICES")) is not None:
            command.append(f"--visible={visible}")
        try:
            with append_regular_file(self._run.agent_log.parent / name) as out:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=CLIENT_VARIABLES | dict(self._environment),
                    pass_fds=[each for each in (descriptor, self._heartbeats) if each is not None],
                    start_new_session=True,
                )
        except OSError as error:
            log.warning("the sidecar cannot be started: %s", error)
