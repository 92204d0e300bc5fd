"""Talks to a fork server, the process that forks the ranks of a node, over a socket."""

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimaran.core.regular_files import append_regular_file
from trimaran.launch.supervise.fork_server_process import ForkServerProcess, fork_server_environment
from trimaran.runs import RunDirectory
from trimaran.runs.held_directory import descriptor_of

MAX_DESCRIPTORS = 200  # in one message; the kernel's limit is 253


@dataclass(slots=True)
class ForkServerClient:
    """A running fork server that belongs to a run. A child of this process dies with the thread that started it."""

    process: ForkServerProcess
    _run: RunDirectory
    _received: bytes = b""  # without the lines that were returned
    warm: bool = False  # torch is imported: ranks start at once

    @classmethod
    def bind(cls, process: ForkServerProcess, run: RunDirectory, fds: Sequence[int]) -> "ForkServerClient":
        """Tell a fork server which run it serves, and pass it `fds`. Returns at once, while it imports torch."""
        client, descriptor = cls(process, run), descriptor_of(run)
        passed = [*fds, *([] if descriptor is None else [descriptor])]
        message: dict[str, Any] = {"run": str(run.location.absolute()), "is_open": descriptor is not None}
        if process.is_warm:
            ours = {"environment": fork_server_environment(os.environ), "folder": os.getcwd()}
            message |= {"process": ours}
        with client._blocking() as control:
            for first in range(0, len(passed), MAX_DESCRIPTORS):
                socket.send_fds(control, [b"{}\n"], passed[first : first + MAX_DESCRIPTORS])
            control.sendall(json.dumps({"bind": message}).encode() + b"\n")
        return client

    @property
    def alive(self) -> bool:
        return self.process.alive

    def fork(self, ranks: Sequence[tuple[int, Mapping[str, str], Mapping[str, Sequence[int]]]]) -> None:
        """Fork ranks, each with its environment, and with variables whose values are descriptors.

        Descriptors are given by their place in the `fds` of `bind`, as the fork server has other numbers for them.
        """
        command = [
            {"rank": rank, "environment": dict(environment), "descriptors": dict(descriptors)}
            for rank, environment, descriptors in ranks
        ]
        with self._blocking() as control:
            control.sendall(json.dumps({"start": command}).encode() + b"\n")

    def measure(self, kind: str, *, devices: int, seconds: float, environment: Mapping[str, str]) -> None:
        """Measure how fast the devices compute; the event `speed` has the answer."""
        how = {"kind": kind, "devices": devices, "seconds": seconds, "environment": dict(environment)}
        with self._blocking() as control:
            control.sendall(json.dumps({"measure": how}).encode() + b"\n")

    @contextmanager
    def _blocking(self) -> Iterator[socket.socket]:
        """Yield the socket to send on. `alive` says if the fork server is dead."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.process.control.setblocking(True)
            yield self.process.control
        self.process.control.setblocking(False)

    def receive(self, *, wait: float = 0.0) -> list[dict[str, Any]]:
        """Return the fork server's events since the last call; wait at most `wait` seconds for one."""
        control, running = self.process.control, self.alive
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.poll(1000 * wait)
        while True:
            try:
                data = control.recv(1 << 16)
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
        if (self.warm or not running) and (printed := self.process.take_output()):
            with contextlib.suppress(OSError), append_regular_file(self._run.agent_log) as log:
                log.write(printed)  # while it imported torch; from now on it writes to the log itself
        return events

    def end(self) -> None:
        """Kill the fork server; its ranks die with it."""
        self.process.kill()
