"""A run on this machine: the command of its supervisor, the environment of its ranks, and how it is stopped."""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from trimaran.core import Plan
from trimaran.launch.collect_reports import STOPPED, process_state
from trimaran.launch.signals import HEARD
from trimaran.run import RunDirectory

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
END_SECONDS = 3.0  # that a supervisor has to end at once
# The names that torch reads its allocator's settings from; the others are the first one's past.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def local_command(run: RunDirectory) -> list[str]:
    """Return the command that runs `run` here: the supervisor, which starts the ranks."""
    return [sys.executable, "-m", "trimaran.launch", str(run.path.absolute())]  # a whole path is never taken for a flag


def allocator_settings(plan: Plan) -> dict[str, str]:
    """Return the settings of the CUDA allocator that suit the plan; nothing for one that needs none.

    Whoever gathers weights, has several micro-batches in flight or computes layers again asks for blocks of many sizes
    at changing times. Segments that can grow leave no holes between them.
    """
    steady = plan.sharding == "none" and plan.mesh.pp == 1 and plan.recompute == "none" and plan.offload == "none"
    return {} if steady else {ALLOCATOR_SETTINGS[0]: "expandable_segments:True"}


def worker_environment(outer: Mapping[str, str], plan: Plan, *, on_cpu: bool, deterministic: bool) -> dict[str, str]:
    """Return what ranks of `plan` find in their environment on top of `outer`; what a person set there wins, but for
    GPUs that the run does not want."""
    cores = len(os.sched_getaffinity(0))
    ours = {
        "OMP_NUM_THREADS": str(max(1, cores // plan.mesh.world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "KINETO_LOG_LEVEL": "6",  # else a profiler says in the log of the rank that it starts and stops
    }
    if deterministic:
        ours["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if on_cpu:
        ours |= {"DS_ACCELERATOR": "cpu"} if plan.engine == "deepspeed" else {}
    elif not any(name in outer for name in ALLOCATOR_SETTINGS):
        ours |= allocator_settings(plan)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    return {name: value for name, value in ours.items() if name not in outer} | hidden


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A supervisor at work on this machine; talks to it through signals, and to everybody else through files."""

    run: RunDirectory
    command: list[str]
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        """Return the exit code, or None while the run goes on."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal holds the supervisor: then nobody watches the ranks."""
        return process_state(self.process.pid) in STOPPED

    def request_stop(self, by: int = signal.SIGTERM) -> None:
        """Ask for an end at the next step that the ranks agree on, with a complete checkpoint.

        `by` is the signal that we were asked with, which the supervisor writes down: SIGTERM or SIGINT.
        """
        self.process.send_signal(by)

    def end(self) -> None:
        """End every process of the run at once. The supervisor gets a moment to write down that this was asked for."""
        self.process.send_signal(signal.SIGQUIT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill every process of the run, and return when the supervisor is gone."""
        try:
            doomed = [*psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            doomed = []
        self.process.kill()
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()


def _end_with_parent() -> None:
    """Let the supervisor get a SIGHUP, upon which it stops the run, when we die: nobody would look at it any more.

    What it is told before it can listen is kept for it. `nohup` is for us: it must hear of our end all the same.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGHUP)


def start_local(run: RunDirectory) -> LocalRun:
    """Start the supervisor of `run` and return at once. What it and the ranks say goes to `logs/` in the run directory.

    They get a session of their own, so that Ctrl-C reaches us alone and we decide what it means.
    """
    command = [*local_command(run), "--no-check"]  # who starts it has looked
    with run.agent_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    return LocalRun(run, command, process)
