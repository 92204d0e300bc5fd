"""Starts a fork server, the process that forks the ranks of a node, and talks to it over a socket."""

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

from trimaran.core.regular_files import append_regular_file
from trimaran.run import RunDirectory
from trimaran.run.compile_cache import compile_cache
from trimaran.run.held_directory import descriptor_of

# Variables that torch reads when it is imported: its flight recorder, and to count GPUs without initialising CUDA.
FORK_SERVER_ENVIRONMENT = {
    "TORCH_FR_BUFFER_SIZE": "2000",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(slots=True)
class ForkServerClient:
    """A running fork server. It dies with the thread that started it."""

    process: subprocess.Popen[bytes]
    _socket: socket.socket
    _received: bytes = b""  # without the lines that were returned
    warm: bool = False  # torch is imported: ranks start at once

    @classmethod
    def start(cls, run: RunDirectory, environment: Mapping[str, str], fds: Sequence[int]) -> "ForkServerClient":
        """Start a fork server that passes `fds` to its ranks. Returns at once, while it imports torch."""
        ours, theirs = socket.socketpair()
        held = [] if (descriptor := descriptor_of(run)) is None else [descriptor]
        command = [
            sys.executable,
            "-m",
            "trimaran.train.process.fork_server",
            str(run.location.absolute()),
            str(theirs.fileno()),
            str(os.getpid()),
            *map(str, held),
        ]
        with theirs, append_regular_file(run.agent_log) as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=compile_cache(environment) | dict(environment) | FORK_SERVER_ENVIRONMENT,
                pass_fds=[theirs.fileno(), *held, *fds],
                start_new_session=True,
            )
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, ranks: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        """Fork ranks, each with its environment."""
        command = {"start": [{"rank": rank, "environment": dict(environment)} for rank, environment in ranks]}
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `alive` says that the fork server is dead
            self._socket.setblocking(True)
            self._socket.sendall(json.dumps(command).encode() + b"\n")
        self._socket.setblocking(False)

    def receive(self, *, wait: float = 0.0) -> list[dict[str, Any]]:
        """Return the fork server's events since the last call; wait at most `wait` seconds for one."""
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
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        events = [json.loads(line) for line in lines]
        self.warm |= any(each["event"] == "warm" for each in events)
        return events

    def end(self) -> None:
        """Kill the fork server; its ranks die with it."""
        self.process.kill()
        self.process.wait()
        self._socket.close()
