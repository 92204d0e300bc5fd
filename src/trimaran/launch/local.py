"""Workers on this machine, started on torchelastic's agent."""

import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from trimaran.core import Plan
from trimaran.telemetry import RunDirectory

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
# The names that torch reads its allocator's settings from; the others are the first one's past.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def local_command(run: RunDirectory, *, world_size: int) -> list[str]:
    """Return the command that starts the ranks of `run` here.

    The rendezvous has an id of its own and a free port on loopback: with torchrun's defaults two jobs can become one.
    """
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={world_size}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        f"--rdzv-id=trimaran-{uuid.uuid4().hex[:12]}",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "-m",
        "trimaran.train",
        str(run.path),
    ]


def allocator_settings(plan: Plan) -> dict[str, str]:
    """Return the settings of the CUDA allocator that suit the plan; nothing for one that needs none.

    Whoever gathers weights, has several micro-batches in flight or computes layers again asks for blocks of many sizes
    at changing times. Segments that can grow leave no holes between them.
    """
    steady = plan.sharding == "none" and plan.mesh.pp == 1 and plan.recompute == "none" and plan.offload == "none"
    return {} if steady else {ALLOCATOR_SETTINGS[0]: "expandable_segments:True"}


def worker_environment(outer: Mapping[str, str], plan: Plan, *, on_cpu: bool, deterministic: bool) -> dict[str, str]:
    """Return the environment of the agent and its ranks; what a person set wins, but for GPUs the run does not want."""
    cores = len(os.sched_getaffinity(0))
    ours = {
        "OMP_NUM_THREADS": str(max(1, cores // plan.mesh.world_size)),
        "GLOO_SOCKET_IFNAME": "lo",
        # A restarted worker must not read the addresses of the attempt before it.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "PYTHONUNBUFFERED": "1",
    }
    if deterministic:
        ours["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if on_cpu:
        ours |= {"DS_ACCELERATOR": "cpu"} if plan.engine == "deepspeed" else {}
    elif not any(name in outer for name in ALLOCATOR_SETTINGS):
        ours |= allocator_settings(plan)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
    return ours | dict(outer) | hidden


@dataclass(frozen=True, slots=True)
class LocalRun:
    """A running set of local ranks; talks to them through the run directory and signals."""

    run: RunDirectory
    command: list[str]
    process: subprocess.Popen[bytes]

    def poll(self) -> int | None:
        """Return the exit code, or None while the ranks are at work."""
        return self.process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self.process.wait(timeout)

    def request_stop(self) -> None:
        """Ask the ranks to stop at the next step that they agree on."""
        self.run.stop_request.touch()

    def kill(self) -> None:
        """End every process of the run at once."""
        try:
            doomed = [*psutil.Process(self.process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            doomed = []
        self.process.kill()
        for process in doomed:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


def _end_with_parent() -> None:
    """Let the agent get a SIGTERM, which it passes on, when we die: ranks without a watcher would train on unseen."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def start_local(run: RunDirectory, *, world_size: int, on_cpu: bool, deterministic: bool = False) -> LocalRun:
    """Start the ranks of `run` and return at once. Their output goes to `logs/` in the run directory.

    Their environment is what the run's plan asks for. They get a session of their own, so that Ctrl-C reaches us alone
    and we decide what it means.
    """
    command = local_command(run, world_size=world_size)
    with run.agent_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            env=worker_environment(os.environ, run.read_plan(), on_cpu=on_cpu, deterministic=deterministic),
        )
    return LocalRun(run, command, process)
