"""The processes beside the ranks of a node: its sidecar, the autopilot, and the check of the machine before a run.

A run works without them: where one cannot be started, or fails, that is logged.
"""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trimaran.core import UserError
from trimaran.launch.supervise.early_supervisor import stop_with_parent
from trimaran.launch.supervise.local import start_logged
from trimaran.machine import calibration_folder
from trimaran.runs import RunDirectory, descriptor_of, has_sinks

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


def end_process(process: subprocess.Popen[bytes], *, seconds: float) -> None:
    """Terminate a process, and kill it if it has not ended after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


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
        if process is not None:
            end_process(process, seconds=self._end_seconds)

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
        visible = self._environment.get("CUDA_VISIBLE_DEVICES")
        given = {"descriptor": descriptor, "above": self._above, "heartbeats": self._heartbeats, "visible": visible}
        command += [f"--{option}={value}" for option, value in given.items() if value is not None]
        try:
            self._process = start_logged(
                command,
                self._run.agent_log.parent / name,
                env=CLIENT_VARIABLES | dict(self._environment),
                pass_fds=[each for each in (descriptor, self._heartbeats) if each is not None],
            )
        except OSError as error:
            log.warning("the sidecar cannot be started: %s", error)


@contextmanager
def autopilot_process(run: RunDirectory, environment: Mapping[str, str]) -> Iterator[None]:
    """Run the autopilot of a run whose recipe says `autopilot: act`; a run works without it, so nothing is raised."""
    # There is no process for one that only advises: `trimaran doctor` advises the same.
    process = None
    if run.read_recipe().autopilot.mode == "act":
        command = [sys.executable, "-m", "trimaran.autopilot", str(run.location.absolute())]
        if (folder := calibration_folder(environment)) is not None:
            command.append(f"--calibrations={folder}")
        log_file = run.agent_log.parent / "autopilot.log"
        try:
            process = start_logged(command, log_file, env=dict(environment), preexec_fn=stop_with_parent)
        except OSError as error:
            log.warning("the autopilot cannot be started: %s", error)
    try:
        yield
    finally:
        if process is not None:
            end_process(process, seconds=END_SECONDS)


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
