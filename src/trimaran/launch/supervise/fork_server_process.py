"""The process of a fork server: started here, or forked by the user's warm fork server, which has torch imported.

Only the standard library is imported: a supervisor starts it before it imports anything else, see `early_supervisor`.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimaran.runs.warm_protocol import LOG, SOCKET, fingerprint, runtime_folder

FORK_SERVER = "trimaran.train.process.fork_server"


@dataclass(slots=True)
class ForkServerProcess:
    """A fork server that may still import torch, and the socket to it."""

    pid: int
    control: socket.socket
    # not of a fork of the warm fork server, which is no child of this process
    child: subprocess.Popen[bytes] | None = None
    output: int | None = None  # a file in memory with what it prints until it knows the log of its run; a fork has none
    pid_descriptor: int | None = None
    note: str = ""  # for the person who asked for a warm one

    @property
    def is_warm(self) -> bool:
        """Whether it was forked by the warm fork server, so that torch was imported before."""
        return self.child is None

    @property
    def alive(self) -> bool:
        if self.child is not None:
            return self.child.poll() is None
        assert self.pid_descriptor is not None
        poll = select.poll()
        poll.register(self.pid_descriptor, select.POLLIN)
        return not poll.poll(0)  # readable once the process has ended

    def kill(self) -> None:
        """Kill it and wait for its end; its ranks die with it."""
        if self.child is not None:
            self.child.kill()
            self.child.wait()
        else:
            assert self.pid_descriptor is not None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.pid_descriptor, signal.SIGKILL)
            select.select([self.pid_descriptor], [], [], None)
            os.close(self.pid_descriptor)
        self.control.close()
        if self.output is not None:
            os.close(self.output)

    def take_output(self) -> bytes:
        """Return what it has printed so far, once."""
        if self.output is None:
            return b""
        os.lseek(self.output, 0, os.SEEK_SET)
        text = b"".join(iter(lambda: os.read(self.output or 0, 1 << 16), b""))
        os.close(self.output)
        self.output = None
        return text


def fork_server_environment(outer: Mapping[str, str]) -> dict[str, str]:
    """Return the environment: for torch's flight recorder and profiler, and to count GPUs without initialising CUDA."""
    ours = {"TORCH_FR_BUFFER_SIZE": "2000", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}
    return {"KINETO_LOG_LEVEL": "6", **outer, **ours}


def start_fork_server(environment: Mapping[str, str]) -> ForkServerProcess:
    """Start a fork server and return at once, while it imports torch. It dies with the thread that calls this."""
    ours, theirs = socket.socketpair()
    output = os.memfd_create("trimaran-fork-server")
    with theirs:
        child = subprocess.Popen(
            [sys.executable, "-m", FORK_SERVER, str(theirs.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=fork_server_environment(environment),
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ForkServerProcess(pid=child.pid, control=ours, child=child, output=output)


SHARE_GPUS = "TRIMARAN_SHARE_GPUS"  # set to 1: ranks use GPU number LOCAL_RANK modulo the number of GPUs


def shared_gpu_environment(outer: Mapping[str, str], rank: int) -> dict[str, str]:
    """Return the variables of `rank` that let NCCL connect ranks of one GPU; empty unless `outer` has SHARE_GPUS=1."""
    # NCCL refuses two ranks with the same device on one host. So each rank gets the name of another host, and NCCL uses
    # its socket transport. This is slow, and neither shared memory, peer access nor RDMA is used.
    if outer.get(SHARE_GPUS) != "1":
        return {}
    return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


WARM_FORK_SERVER = "trimaran.train.process.warm_fork_server"
IDLE_MINUTES = 30
ANSWER_SECONDS = 30.0  # for a warm fork server that is still importing torch


def connect_warm(environment: Mapping[str, str]) -> socket.socket | None:
    """Return a connection to the user's warm fork server; None if there is none."""
    if (folder := runtime_folder(environment)) is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(folder / SOCKET))
    except OSError:
        connection.close()
        return None
    return connection


def ask_warm(environment: Mapping[str, str], request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the answer of the user's warm fork server to `request`; None if there is none."""
    if (connection := connect_warm(environment)) is None:
        return None
    with connection:
        return _ask(connection, request)


def start_warm(environment: Mapping[str, str], *, idle_minutes: float = IDLE_MINUTES) -> bool:
    """Start the user's warm fork server if there is none. Returns False where it cannot have a private folder.

    It belongs to no process of this run, and ends by itself after `idle_minutes` without use.
    """
    if (folder := runtime_folder(environment)) is None:
        return False
    with open(os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as log:
        subprocess.run(
            [sys.executable, "-m", WARM_FORK_SERVER, str(folder), str(60 * idle_minutes)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=fork_server_environment(environment),
            check=False,  # another process may start one at the same time: one of them gets the lock
        )
    return True


def fork_warm_or_start(environment: Mapping[str, str]) -> ForkServerProcess:
    """Return a fork of the user's warm fork server, which is started if there is none; or else start a fork server."""
    # The fork has torch imported, serves one run, and ends when its socket is closed.
    connection, note = connect_warm(environment), "there is no warm fork server, and none could be started"
    if connection is None and start_warm(environment):
        deadline = time.monotonic() + ANSWER_SECONDS
        while (connection := connect_warm(environment)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
    if connection is not None:
        answer = _ask(connection, {"fork": fingerprint(fork_server_environment(environment))}) or {}
        note = f"the warm fork server is not used: {answer.get('refused', 'it does not answer')}"
        if "pid" in answer:
            try:
                descriptor = os.pidfd_open(answer["pid"])
            except OSError:
                note = "the warm fork server is not used: its fork has ended"
            else:
                note = f"using the warm fork server (process {answer['server']})"
                return ForkServerProcess(answer["pid"], connection, pid_descriptor=descriptor, note=note)
        connection.close()
    process = start_fork_server(environment)
    process.note = note
    return process


def _ask(connection: socket.socket, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Send a line and return the answer, which is one line; None if none comes."""
    with contextlib.suppress(OSError, ValueError):
        connection.sendall(json.dumps(request).encode() + b"\n")
        received = b""
        while not received.endswith(b"\n"):
            if not select.select([connection], [], [], ANSWER_SECONDS)[0] or not (data := connection.recv(1)):
                return None
            received += data  # byte by byte: what follows the line belongs to whoever reads next
        return json.loads(received)
    return None
