"""Opens regular files only, and replaces them atomically. Files that others can put in place are opened here.

`open` waits for a writer if the path is a FIFO, reads without end from `/dev/zero`, and follows links out of a run.
Here an open never waits, and anything but a regular file is a `SpecialFileError`.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimaran.core.errors import UserError

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


class SpecialFileError(UserError, OSError):
    """A path is not a regular file. An OSError, too, so that callers report it as a file that cannot be read."""

    def __init__(self, path: str | Path, what: str) -> None:
        UserError.__init__(self, "A021.not-regular-file", where=str(path), kind=what)
        self.errno, self.strerror, self.filename = errno.EINVAL, f"it is {what}, not a regular file", str(path)

    def __reduce__(self) -> Any:
        return type(self), (self.where, self.what.removeprefix("this is ").removesuffix(", not a regular file"))


def open_regular_fd(
    path: str | Path, flags: int = os.O_RDONLY, *, follow_links: bool = False, mode: int = 0o666
) -> int:
    """Return a descriptor of the regular file at `path`. Raises SpecialFileError for anything else; never waits.

    `follow_links` says whether the last part of the path may be a link: yes for what a person names, no for the files
    of a run or a checkpoint, which are never links. The type is checked before the open, which can have effects on a
    device, and after it, as the path may have been replaced in between.
    """
    flags |= os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
    try:
        _refuse_special(path, os.stat(path, follow_symlinks=follow_links).st_mode)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise SpecialFileError(path, KINDS[stat.S_IFLNK]) from None
        raise
    try:
        _refuse_special(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_regular_file(path: str | Path, *, follow_links: bool = False) -> io.BufferedReader:
    """Return the regular file at `path`, open for reading bytes; see `open_regular_fd`."""
    return open(open_regular_fd(path, follow_links=follow_links), "rb")


def append_regular_file(path: str | Path) -> io.BufferedWriter:
    """Return the regular file at `path`, open for appending bytes; it is created if it does not exist."""
    return open(open_regular_fd(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o644), "ab")


def read_regular_bytes(path: str | Path, *, follow_links: bool = False, limit_bytes: int | None = None) -> bytes:
    """Return the contents of the regular file at `path`: all of it, or at most `limit_bytes`."""
    with open_regular_file(path, follow_links=follow_links) as file:
        data: bytes | None = file.read(-1 if limit_bytes is None else limit_bytes)
    if data is None:  # a file such as /proc/kmsg, whose read would have waited
        raise SpecialFileError(path, "a file of the kernel that has nothing to read")
    return data


def read_regular_text(path: str | Path, *, follow_links: bool = False, errors: str = "strict") -> str:
    """Return the UTF-8 text of the regular file at `path`."""
    text = read_regular_bytes(path, follow_links=follow_links).decode("utf-8", errors=errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as `Path.read_text` does


def check_regular_file(path: str | Path, *, follow_links: bool = False) -> None:
    """Raise as `open_regular_fd` does. For libraries that open a path themselves."""
    os.close(open_regular_fd(path, follow_links=follow_links))


@contextmanager
def replace_file(path: Path, *, sync: bool = False, mode: int | None = None) -> Iterator[io.BufferedWriter]:
    """Yield a new file that takes the place of `path` when the block ends; after an exception it is removed.

    Readers see the old file or the new one, complete. Several processes may replace the same file at the same time.
    `sync` makes the contents durable first. `mode` holds whatever the umask.
    """
    draft = path.with_name(f".{path.name}.{os.urandom(6).hex()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def write_atomically(
    path: Path, data: str | bytes | memoryview, *, sync: bool = False, mode: int | None = None
) -> None:
    """Write UTF-8 text or bytes to `path`; see `replace_file`."""
    with replace_file(path, sync=sync, mode=mode) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def _refuse_special(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise SpecialFileError(path, KINDS.get(stat.S_IFMT(mode), "a special file"))


def user_cache(environ: Mapping[str, str]) -> Path | None:
    """Return our folder in the user's cache; None if the user has no home directory, as in some containers."""
    try:
        return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimaran"
    except RuntimeError:  # HOME is not set, and the user is not in the password database
        return None


def needed_user_cache(environ: Mapping[str, str]) -> Path:
    """Return our folder in the user's cache; raise UserError if there is none."""
    if (folder := user_cache(environ)) is not None:
        return folder
    raise UserError("A023.user-no-home-directory", where="the environment variable HOME")


def expand_user(path: str) -> Path:
    """Return the path with a leading `~` expanded, as shells do: a `~name` without such a user stays as it is."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
