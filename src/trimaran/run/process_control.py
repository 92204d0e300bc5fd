"""Linux `prctl` calls: end with the parent process, set the process name, adopt orphaned processes."""

import ctypes
import os

# Option numbers of linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signal_number: int, *, parent: int | None = None) -> None:
    """Have the kernel send this process `signal_number` when the thread that started it ends.

    With `parent`, its process id, exit at once if the parent ended before this call.
    """
    _prctl(PR_SET_PDEATHSIG, signal_number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name of this process as `ps` and /proc show it; the kernel keeps 15 bytes."""
    _prctl(PR_SET_NAME, name.encode())


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `waitpid` can reap them here."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, argument: int | bytes) -> None:
    ctypes.CDLL(None).prctl(option, argument)
