"""Starts the user's warm fork server, which has torch imported, and has it fork fork servers.

Only the standard library is imported, as a supervisor connects before it imports anything else.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from trimaran.launch.supervise.fork_server_process import ForkServerProcess, fork_server_environment, start_fork_server
from trimaran.runs.warm_protocol import LOG, SOCKET, fingerprint, runtime_folder

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
    """Return a fork of the user's warm fork server, which is started if there is none; or else start a fork server.

    The fork has torch imported, serves one run, and ends when its socket is closed.
    """
    process, note = _fork_warm(environment)
    process = process or start_fork_server(environment)
    process.note = note
    return process


def _fork_warm(environment: Mapping[str, str]) -> tuple[ForkServerProcess | None, str]:
    """Return a fork of the warm fork server or None, and what to say about it."""
    connection = connect_warm(environment)
    if connection is None and start_warm(environment):
        deadline = time.monotonic() + ANSWER_SECONDS
        while (connection := connect_warm(environment)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
    if connection is None:
        return None, "there is no warm fork server, and none could be started"
    answer = _ask(connection, {"fork": fingerprint(fork_server_environment(environment))})
    if answer is None or "pid" not in answer:
        connection.close()
        return None, f"the warm fork server is not used: {(answer or {}).get('refused', 'it does not answer')}"
    try:
        descriptor = os.pidfd_open(answer["pid"])
    except OSError:
        connection.close()
        return None, "the warm fork server is not used: its fork has ended"
    process = ForkServerProcess(pid=answer["pid"], control=connection, pid_descriptor=descriptor)
    return process, f"using the warm fork server (process {answer['server']})"


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
