"""Real, tiny file systems, for tests of disks that are full or read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    """Mount a tmpfs at `path` with these options, such as size=1m. Skips the test without the privilege to mount."""
    path.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def remount(path: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", path], check=True)


def fill(file: Path) -> None:
    """Write a file until its disk is full to the last byte."""
    with file.open("wb", buffering=0) as filler:
        for size in (1 << 16, 1):
            while True:
                try:
                    filler.write(bytes(size))
                except OSError:
                    break
