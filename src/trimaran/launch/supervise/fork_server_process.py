"""The process of a fork server: started here, or forked by the user's warm fork server. Only the standard library.

A supervisor starts it before it imports anything else, see `early_supervisor`.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

FORK_SERVER = "trimaran.train.process.fork_server"


@dataclass(slots=True)
class ForkServerProcess:
    """A fork server that may still import torch, and the socket to it.

    `output` is a file in memory with what it prints until it knows the log of its run. A fork of the warm fork server
    has neither `child`, as it is not a child of this process, nor `output`.
    """

    pid: int
    control: socket.socket
    child: subprocess.Popen[bytes] | None = None
    output: int | None = None
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

    @property
    def exit_text(self) -> str:
        """How it ended, as far as this process can know."""
        return "ended" if self.child is None else f"exited with code {self.child.returncode}"

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
    """Return the environment of a fork server, with variables that torch reads when it is imported.

    Those are for its flight recorder, its profiler, and to count GPUs without initialising CUDA.
    """
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
