"""Puts a FIFO, device, link, folder or socket in place of a file, and fails a test that waits for one."""

import os
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

KINDS = {"fifo": "FIFO", "device": "character device", "link": "symbolic link", "folder": "folder", "socket": "socket"}
ENDLESS_DEVICE = os.makedev(1, 5)  # /dev/zero


def put(kind: str, path: Path) -> None:
    """Replace `path` by a special file of `kind`. The link leads to what was there before."""
    elsewhere = path.with_name(f"{path.name}.elsewhere")
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "link":
        if path.exists():
            path.rename(elsewhere)
        else:
            elsewhere.touch()
        path.symlink_to(elsewhere)
        return
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, ENDLESS_DEVICE)
        except PermissionError:
            pytest.skip("only root may make a device")
    elif kind == "folder":
        path.mkdir()
    else:
        with socket.socket(socket.AF_UNIX) as server:
            here = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # a socket's path has at most 107 bytes
            server.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)


@contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread if the block waits longer than `seconds`."""

    def fail(number: int, frame: Any) -> None:
        raise TimeoutError(f"still waiting after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
