"""Runs a run on this machine: the command of its supervisor, the environment of its ranks, and how it is stopped."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from trimaran.core import Plan, UserError
from trimaran.core.regular_files import append_regular_file
from trimaran.hardware.host_limits import openmp_threads
from trimaran.launch.collect_reports import STOPPED_STATES, process_state
from trimaran.launch.early_supervisor import WARM, stop_with_parent, take_early
from trimaran.run import RunDirectory
from trimaran.run.gloo_listeners import LAZY_CONNECTIONS

END_SECONDS = 3.0  # for a supervisor to end after SIGQUIT
MAX_ERROR_BYTES = 1 << 16
OPENMP = "OMP_NUM_THREADS"
# With more ranks, gloo connects two of them when they first communicate. All at once, N ranks ask the store 2 N^2
# times: 13 s for 256 ranks, hours for 8,192.
MAX_RANKS_ALL_CONNECTED = 128
# The variables that torch reads its allocator settings from. The second and third are older names of the first.
EXPANDABLE_SEGMENTS = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def local_command(run: RunDirectory) -> list[str]:
    """Return the command of the supervisor, which runs `run` on this machine."""
    path = run.path.absolute()  # an absolute path is never parsed as an option
    return [sys.executable, "-m", "trimaran.launch", str(path)]


def allocator_settings(plan: Plan) -> dict[str, str]:
    """Return the settings of the CUDA allocator for `plan`; empty if the defaults are fine."""
    from trimaran.planner.memory_ladder import uses_expandable_segments  # noqa: PLC0415  not for CPUs

    return {ALLOCATOR_VARIABLES[0]: EXPANDABLE_SEGMENTS} if uses_expandable_segments(plan) else {}


# Of `faults.debug`: all ranks compare every collective before it runs, libraries log what they do, the host waits for
# every kernel, and errors of C++ code have their stack.
DEBUG_VARIABLES = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "NCCL_DEBUG": "INFO",
    "CUDA_LAUNCH_BLOCKING": "1",
}


def worker_environment(
    outer: Mapping[str, str], plan: Plan, *, on_cpu: bool, deterministic: bool, debug: bool = False
) -> dict[str, str]:
    """Return the variables of the ranks of `plan` on top of `outer`. Variables that the user has set in `outer` win,
    except that a run on CPUs hides all GPUs."""
    cores = len(os.sched_getaffinity(0))
    ours = {
        OPENMP: str(max(1, cores // plan.mesh.world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "KINETO_LOG_LEVEL": "6",  # otherwise the profiler logs its starts and stops to the rank's log
    }
    if plan.mesh.world_size > MAX_RANKS_ALL_CONNECTED:
        ours[LAZY_CONNECTIONS] = "1"
    if debug:
        ours |= DEBUG_VARIABLES
    if deterministic:
        ours["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if on_cpu:
        ours |= plan.engine_traits.variables_on_cpu
    elif not any(name in outer for name in ALLOCATOR_VARIABLES):
        ours |= allocator_settings(plan)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    kept = without_unusable(outer)
    return {name: value for name, value in ours.items() if name not in kept} | hidden


def without_unusable(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables without an OMP_NUM_THREADS that OpenMP cannot read: H007 reports it, `--no-check` skips."""
    is_usable = openmp_threads(environment.get(OPENMP)) is not None
    return {name: value for name, value in environment.items() if name != OPENMP or is_usable}


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
    with append_regular_file(run.agent_log) as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=[errors],
            start_new_session=True,
            preexec_fn=stop_with_parent,
        )
    return LocalRun(run, command, process, errors)
