"""What a process sets about itself: its parent's death signal, its name, orphans, limits; and how it is identified."""

import contextlib
import ctypes
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

# Option numbers of linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
MAX_OPEN_FILES, MAX_PROCESSES = 1 << 20, 1 << 22  # the kernel's own defaults for the highest limits


def die_with_parent(signal_number: int, *, parent: int | None = None) -> None:
    """Have the kernel send this process `signal_number` when the thread that started it ends.

    With `parent`, its process id, exit at once if the parent ended before this call.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name of this process as `ps` and /proc show it; the kernel keeps 15 bytes."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `waitpid` can reap them here."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def raise_soft_limits() -> None:
    """Raise the limits of open files and processes as far as allowed, also for processes that this one starts.

    Soft limits protect programs that cannot handle many descriptors; ours need one for each connection to a rank.
    """
    for kind, most in ((resource.RLIMIT_NOFILE, MAX_OPEN_FILES), (resource.RLIMIT_NPROC, MAX_PROCESSES)):
        soft, hard = resource.getrlimit(kind)
        allowed = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if soft != resource.RLIM_INFINITY and soft < allowed:
            with contextlib.suppress(ValueError, OSError):  # a sandbox may forbid it, and the limit may be enough
                resource.setrlimit(kind, (allowed, hard))


class OptionalFile(io.FileIO):
    """A file whose write errors are ignored, such as that of a pipe without a reader, a lost terminal, a full disk."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            written = super().write(data)
            if written is not None:  # None: a pipe that does not block is full
                return written
        return len(data)


def open_closed_output() -> None:
    """Open /dev/null as stdout or stderr if that was closed, so that no other file gets its descriptor."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process


def drop_unread_output() -> None:
    """Ignore write errors of stdout and stderr from now on, so that `trimaran train | head` trains to its end."""
    open_closed_output()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper:
            stream.flush()
            file = OptionalFile(stream.fileno(), "w", closefd=False)
            lines = stream.line_buffering or stream.write_through
            options: dict[str, Any] = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": lines}
            setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(file), **options))


@contextlib.contextmanager
def handled_signals(handler: Callable[[int, FrameType | None], Any], *numbers: int) -> Iterator[None]:
    """Have `handler` handle these signals within the block. `signal.default_int_handler` ends it like Ctrl-C."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def machine_id() -> str:
    """Return the boot id and the pid namespace: processes with the same id can find each other by pid."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot; -1 if it is gone. With the pid it identifies the process."""
    try:
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return -1
    return -1 if state in "ZX" else int(rest[18])
