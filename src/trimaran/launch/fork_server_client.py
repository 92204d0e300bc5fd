"""The supervisor's end of the line to a fork server, the process that forks the ranks of a node."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimaran.run import RunDirectory
from trimaran.run.compile_cache import compile_cache

# What must be there before torch is imported: its flight recorder, and a way to count GPUs that does not start CUDA.
FORK_SERVER = {"TORCH_FR_BUFFER_SIZE": "2000", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}


@dataclass(slots=True)
class ForkServerClient:
    """A fork server that was started, and what is told over the line. It dies with the thread that made it."""

    process: subprocess.Popen[bytes]
    _socket: socket.socket
    _heard: bytes = b""
    warm: bool = False  # torch is imported: ranks start at once

    @classmethod
    def start(cls, run: RunDirectory, environment: Mapping[str, str], fds: Sequence[int]) -> "ForkServerClient":
        """Start a fork server that hands `fds` down to its ranks. Returns at once; torch is imported meanwhile."""
        ours, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "trimaran.train.process.fork_server",
            str(run.path.absolute()),
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        with theirs, run.agent_log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=compile_cache(environment) | dict(environment) | FORK_SERVER,
                pass_fds=[theirs.fileno(), *fds],
                start_new_session=True,
            )
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, ranks: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        """Have ranks forked, each with its environment."""
        order = {"start": [{"rank": rank, "environment": dict(environment)} for rank, environment in ranks]}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead fork server is noticed by `alive`
            self._socket.setblocking(True)
            self._socket.sendall(json.dumps(order).encode() + b"\n")
        self._socket.setblocking(False)

    def hear(self, *, wait: float = 0.0) -> list[dict[str, Any]]:
        """Return what was told since the last look; waits at most `wait` seconds for something."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll(1000 * wait)
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                break
            self._heard += data
        *lines, self._heard = self._heard.split(b"\n")
        told = [json.loads(line) for line in lines]
        self.warm |= any(each["told"] == "warm" for each in told)
        return told

    def end(self) -> None:
        """End the fork server, and with it what it has forked."""
        self.process.kill()
        self.process.wait()
        self._socket.close()
