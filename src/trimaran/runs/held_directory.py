"""A run directory held open by its descriptor: files are opened below it, wherever it is moved.

A thread compares the directory with what is at its path, by device and inode, and so notices when it was moved,
replaced or deleted.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from trimaran.core import UserError
from trimaran.runs.run_directory import DESCRIPTORS, MARKER, RunDirectory, show_paths

NEEDED_FILES = (MARKER, "plan.json", "recipe.yaml")  # a run without any of these was deleted
CHECK_SECONDS = 0.5
CONFIRM_SECONDS = 1.5  # a directory that is back in its place sooner was not moved

Place = Literal["here", "moved", "deleted"]


class LostDirectoryError(UserError):
    """The run directory was deleted while the run was running: nothing can be saved."""


class HeldDirectory:
    """A run directory, its path when it was opened, and its descriptor. The thread of `watch` keeps `place` current."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.run = RunDirectory(Path(f"{DESCRIPTORS}{self.fd}"))
        self.named = self.location or path.absolute()  # without symbolic links, which may change without harm
        self._has_files = self._any_needed_exists()
        self.place: Place = "here"
        self._gone_since: float | None = None
        self._stop_watching = threading.Event()

    def watch(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Check the directory in a thread (a network disk may hang); call `on_change` once it is moved or deleted."""
        threading.Thread(target=self._watch, args=(on_change,), name="run-directory", daemon=True).start()

    def stop_watching(self) -> None:
        """End the thread of `watch` soon: this process may live on, and fork others."""
        self._stop_watching.set()

    def poll(self, now: float) -> Place:
        """Update `place` and return it: another place counts once `CONFIRM_SECONDS` have passed. `now`: any clock."""
        found = self.check()
        if found == "here":
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = now
        if self._gone_since is not None and now >= self._gone_since + CONFIRM_SECONDS:
            self.place = found
        return self.place

    def check(self) -> Place:
        """Return where the directory is now. If the system cannot tell, it is still here."""
        try:
            if not os.fstat(self.fd).st_nlink or (self._has_files and not self._any_needed_exists()):
                return "deleted"
            if os.path.samestat(os.stat(self.named), os.fstat(self.fd)):
                return "here"
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            # Another machine has deleted a directory of a network disk if its handle is stale and its path is free.
            return "deleted" if error.errno == errno.ESTALE and not self.named.exists() else "here"
        return "deleted" if str(self.run.location).endswith(" (deleted)") and self.location is None else "moved"

    @property
    def location(self) -> Path | None:
        """The path of the directory now; None if it has none that this process can reach."""
        found = self.run.location
        with contextlib.suppress(OSError):
            return found if os.path.samestat(os.stat(found), os.fstat(self.fd)) else None
        return None

    def explain(self, place: Place) -> str:
        """Return a sentence about what happened to the directory, without a full stop."""
        if place == "deleted":
            return "the run directory was deleted while the run was running"
        where = self.location
        other = ", and there is another one at its path" if self.named.exists() else ""
        return f"the run directory was moved{f' to {where}' if where else ''} while the run was running{other}"

    def lost_error(self) -> LostDirectoryError:
        """Return the error of a run whose directory was deleted."""
        fix = "start the run again; if the folder was moved to another disk, resume the copy: trimaran resume DIR"
        return LostDirectoryError("D007", self.explain("deleted"), where=str(self.named), fix=fix)

    def _any_needed_exists(self) -> bool:
        for name in NEEDED_FILES:
            with contextlib.suppress(FileNotFoundError):
                os.stat(name, dir_fd=self.fd)
                return True
        return False

    def _watch(self, on_change: Callable[[], None]) -> None:
        while self.place == "here" and not self._stop_watching.wait(CHECK_SECONDS):
            if self.poll(time.monotonic()) != "here":
                on_change()


@contextlib.contextmanager
def report_lost_directory(held: HeldDirectory) -> Iterator[None]:
    """Raise `LostDirectoryError` for any error that comes from the directory's deletion; show paths in others."""
    try:
        yield
    except (UserError, OSError) as error:
        if held.check() == "deleted":
            raise held.lost_error() from error
        if isinstance(error, UserError) and not isinstance(error, LostDirectoryError):
            shown = {key: show_paths(text, held.run.path) for key, text in error.as_dict().items()}
            raise UserError(**shown) from error
        raise


def descriptor_of(run: RunDirectory) -> int | None:
    """Return the descriptor that the files of `run` are opened below; None if they are opened by path."""
    text = str(run.path)
    return int(text.removeprefix(DESCRIPTORS)) if text.startswith(DESCRIPTORS) else None


def lock_directory(run: RunDirectory) -> int | None:
    """Lock the directory; return the descriptor that holds the lock until it is closed, None without locks.

    Raises BlockingIOError if another process of this machine holds it. On network disks the lease alone decides.
    """
    fd = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        os.close(fd)
        return None
    return fd
