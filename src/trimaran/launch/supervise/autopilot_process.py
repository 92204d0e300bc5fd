"""Runs the autopilot beside a supervisor that no `trimaran train` has started, such as the one of several nodes."""

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trimaran.core.regular_files import append_regular_file
from trimaran.launch.supervise.early_supervisor import stop_with_parent
from trimaran.machine import calibration_folder
from trimaran.runs import RunDirectory

log = logging.getLogger(__name__)

END_SECONDS = 5.0


@contextmanager
def autopilot_process(run: RunDirectory, environment: Mapping[str, str]) -> Iterator[None]:
    """Run the autopilot of a run whose recipe says `autopilot: act`; a run works without it, so nothing is raised.

    There is no process for one that only advises: `trimaran doctor` advises the same.
    """
    process = _start(run, environment) if run.read_recipe().autopilot.mode == "act" else None
    try:
        yield
    finally:
        if process is not None:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(run: RunDirectory, environment: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    command = [sys.executable, "-m", "trimaran.autopilot", str(run.location.absolute())]
    if (folder := calibration_folder(environment)) is not None:
        command.append(f"--calibrations={folder}")
    try:
        with append_regular_file(run.agent_log.parent / "autopilot.log") as out:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=stop_with_parent,
            )
    except OSError as error:
        log.warning("the autopilot cannot be started: %s", error)
        return None
