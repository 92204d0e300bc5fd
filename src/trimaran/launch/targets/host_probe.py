"""Runs on a host of the ssh target before a launch: answers questions about it, one JSON object on each line.

`ssh_check` sends the text of this file over the connection, so it needs no Trimaran on the host, and only the standard
library of Python 3.8 or later. It ends when the connection does, and leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

MARK = "trimaran-probe:"  # begins every answer; a login script may print other lines
CHUNK_BYTES = 1 << 20
CONNECT_SECONDS = 3.0


def version_of(package: str) -> str:
    """Return the installed version of a package; "" if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def source_digest(package: str) -> str:
    """Return a digest of the package's Python files, which are not imported; "" if there is none."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return ""
    digest, root = hashlib.sha256(), next(iter(spec.submodule_search_locations))
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, "rb") as file:
                    digest.update(os.path.relpath(path, root).encode() + b"\0" + file.read() + b"\0")
    return digest.hexdigest()[:16]


def existing(path: str) -> str:
    """Return the folder itself, or the closest of its parents that exists."""
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def facts(folder: str = "") -> dict[str, Any]:
    """Return versions, and the disk that holds `folder`."""
    answer: dict[str, Any] = {
        "hostname": platform.node(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": version_of("torch"),
        "trimaran": version_of("trimaran"),
        "source": source_digest("trimaran"),
        "server": os.environ.get("SSH_CONNECTION", "").split(" ")[2:3],
    }
    if folder:
        found = existing(folder)
        status = os.statvfs(found)
        answer.update(folder=found, free_bytes=status.f_bavail * status.f_frsize, exists=os.path.exists(folder))
    return answer


def clock() -> dict[str, Any]:
    return {"time": time.time()}


def write(path: str, text: str) -> dict[str, Any]:
    """Create a file."""
    with open(path, "x") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return {}


def read(path: str) -> dict[str, Any]:
    """Return a file's text; null if this host does not see it."""
    os.listdir(os.path.dirname(path))  # a network disk may remember that a name was not there
    try:
        with open(path) as file:
            return {"text": file.read()}
    except OSError:
        return {"text": None}


def remove(path: str) -> dict[str, Any]:
    os.unlink(path)
    return {}


def route(hosts: Sequence[str]) -> dict[str, Any]:
    """Return which of the hosts are known here, and our own address on the route to each."""
    own, unknown = {}, []
    for host in hosts:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, 9, 0, socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own[host] = probe.getsockname()[0]
        except OSError as error:
            unknown.append(f"{host}: {error.strerror or error}")
    return {"own": own, "unknown": unknown}


def receive(connection: socket.socket) -> None:
    with connection:
        while connection.recv(CHUNK_BYTES):
            pass
        connection.sendall(b"!")


def accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=receive, args=(connection,), daemon=True).start()


def listen(address: str, port: int = 0) -> dict[str, Any]:
    """Listen at an address of this host until the end; return the port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(1024)
    threading.Thread(target=accept, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def send(address: str, port: int, num_bytes: int, seconds: float) -> dict[str, Any]:
    """Send up to `num_bytes`, for `seconds` at most, to a host that listens; return how fast they arrived."""
    block, sent = bytes(CHUNK_BYTES), 0
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as connection:
        connection.settimeout(seconds + 10.0)
        start = time.perf_counter()
        while sent < num_bytes and time.perf_counter() - start < seconds:
            connection.sendall(block)
            sent += len(block)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return {"bytes": sent, "seconds": time.perf_counter() - start}


def connect(targets: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Try to connect to each (address, port); return an error for each, "" if there was none."""
    answers = [""] * len(targets)

    def attempt(index: int, address: str, port: int) -> None:
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            answers[index] = str(error.strerror or error)

    threads = [threading.Thread(target=attempt, args=(index, each[0], each[1])) for index, each in enumerate(targets)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"errors": answers}


ACTIONS = {each.__name__: each for each in (facts, clock, write, read, remove, route, listen, send, connect)}


def serve() -> None:
    """Answer questions until the connection ends."""
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = ACTIONS[question.pop("do")](**question)
        except Exception as error:
            answer = {"error": str(getattr(error, "strerror", None) or error)}
        sys.stdout.write(MARK + json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__probe__":
    serve()
