"""Real, tiny file systems, for tests of disks that are full or read-only."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(place: Path, options: str) -> Iterator[Path]:
    """Mount a file system in memory at `place`, with mount's options, such as size=1m; skips where nobody may."""
    place.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", place]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system may be mounted here: {done.stderr.decode().strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)
