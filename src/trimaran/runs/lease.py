"""The lease of a run: at most one supervisor holds it at a time, each with a higher term than the one before.

A term is a file that can be created only once. Its holder increments a counter once a second. Wall clocks of different
machines are never compared: a holder on another machine is dead if its counter has not changed for a while, measured
with our own monotonic clock.
"""

import contextlib
import errno
import json
import os
import platform
import secrets
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self

from trimaran.core import UserError, open_regular_fd, read_regular_text
from trimaran.runs.held_directory import lock_directory
from trimaran.runs.process_control import machine_id, start_ticks
from trimaran.runs.record_types import is_count, is_time
from trimaran.runs.run_directory import RunDirectory, newest_term, writing
from trimaran.runs.wire import fingerprint

RENEW_SECONDS = 1.0
POLL_SECONDS = 0.25
EXPIRY_SECONDS = 10.0  # a holder whose counter has not changed for so long is dead
FENCED_SECONDS = 8.0  # a holder that could not renew for so long stops: others may soon take over
LOCK_SECONDS = 5.0  # until the processes of a dead holder, which may share its lock, have ended too
RELEASED = "released"
NO_HARD_LINKS_ERRORS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseHolder:
    """The process that holds a term. Its `pid` is only valid on the same `machine`. `created` is only for display.

    `started` is when the process started, in the kernel's ticks since boot, because pids are reused.
    """

    term: int
    host: str
    pid: int
    started: int
    machine: str
    run: str
    address: str
    created: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.created))
        return f"process {self.pid} on {self.host} since {since}"


class Lease:
    """The right to supervise a run. A thread renews it until `release`.

    `lock` is the descriptor of the directory's lock, which keeps other processes of this machine out even if they
    cannot see the files of the lease.
    """

    def __init__(
        self,
        run: RunDirectory,
        holder: LeaseHolder,
        *,
        shared: bool,
        lock: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.holder, self.shared, self._lock, self._clock = run, holder, shared, lock, clock
        self._renewed = clock()
        self._newest = holder.term
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    @property
    def term(self) -> int:
        return self.holder.term

    def holds(self) -> bool:
        """Return whether no other process has taken over or may do so soon. Does not block; at most 0.25 s out of date.

        A holder that shares the run with other machines and cannot reach the run directory looks dead to them.
        """
        late = self.shared and self._clock() - self._renewed > FENCED_SECONDS
        return not self._over.is_set() and not late and self._newest <= self.term

    def release(self) -> None:
        """Release the lease, so that the next supervisor need not wait until it expires."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join(timeout=RENEW_SECONDS)
            with contextlib.suppress(OSError):
                _write_counter(self.run, self.term, RELEASED)
            if self._lock is not None:
                os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self) -> None:
        count, due = 0, self._clock()
        while True:
            now = self._clock()
            with contextlib.suppress(OSError):  # `holds` checks the time of the last success
                if now >= due:
                    count, due = count + 1, now + RENEW_SECONDS
                    _write_counter(self.run, self.term, str(count))
                    self._renewed = now
                self._newest = max(self._newest, newest_term(self.run))
            if self._over.wait(POLL_SECONDS):
                return


class LeaseWatch:
    """Polls the newest term of a run to tell whether its holder is alive."""

    def __init__(self, run: RunDirectory, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.run, self._clock = run, clock
        self._seen: tuple[int, str] | None = None
        self._since = 0.0
        self._holder: LeaseHolder | None = None
        self.certain = False  # the holder last returned is known to be alive, not only not yet known to be dead

    def poll(self) -> LeaseHolder | int:
        """Return the live holder, or the next free term. A holder elsewhere is dead if its counter stands for 10 s."""
        try:
            holder = self._holder = read_holder(self.run)
        except OSError:
            if self._holder is None:
                raise
            return self._holder  # the run directory is unreachable, which says nothing about the holder
        if holder is None:
            return 1
        counter = ""
        with contextlib.suppress(OSError, ValueError):
            counter = read_regular_text(self.run.lease / f"beat-{holder.term:06d}").strip()
        if counter == RELEASED:
            return holder.term + 1
        if holder.machine == machine_id():
            self.certain = True
            return holder if start_ticks(holder.pid) == holder.started else holder.term + 1
        if (holder.term, counter) != self._seen:
            self.certain = self._seen is not None and self._seen[0] == holder.term
            self._seen, self._since = (holder.term, counter), self._clock()
        return holder if self._clock() - self._since < EXPIRY_SECONDS else holder.term + 1


def is_running(run: RunDirectory) -> bool:
    """Return whether a process runs the run; the lease of another machine is watched for some seconds."""
    watch = LeaseWatch(run)
    while not isinstance(watch.poll(), int):
        if watch.certain:
            return True
        time.sleep(POLL_SECONDS)
    return False


def take_lease(
    run: RunDirectory, *, address: str = "", shared: bool = False, lock_seconds: float = LOCK_SECONDS
) -> Lease:
    """Return the lease of `run`. Raises if a live process holds it. `address` is that of the holder's channel.

    If the holder is on another machine and dead, this takes 10 s. `shared`: the run is on several machines, see
    `Lease.holds`. `lock_seconds`: how long to wait for the lock of the directory.
    """
    watch, until = LeaseWatch(run), time.monotonic() + lock_seconds
    while True:
        holder_or_term = watch.poll()
        if isinstance(holder_or_term, LeaseHolder):
            if watch.certain:
                raise held_lease_error(run, holder_or_term)
            time.sleep(POLL_SECONDS)
            until = time.monotonic() + lock_seconds
            continue
        with writing(run):
            try:
                lock = lock_directory(run)
            except BlockingIOError:
                if time.monotonic() > until:
                    # The lease names no live process: it was deleted.
                    raise UserError("S020.run-already-running-another-process", where=str(run.location)) from None
                time.sleep(POLL_SECONDS)
                continue
            lease = None
            try:
                lease = claim_term(run, holder_or_term, address=address, shared=shared, lock=lock)
            finally:
                if lease is None and lock is not None:
                    os.close(lock)
        if lease is not None:
            return lease


def claim_term(
    run: RunDirectory,
    term: int,
    *,
    address: str = "",
    shared: bool = False,
    lock: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Lease | None:
    """Return the lease of `term`, which `LeaseWatch.poll` found free; None if another process was faster."""
    holder = LeaseHolder(
        term=term,
        host=platform.node(),
        pid=os.getpid(),
        started=start_ticks(os.getpid()),
        machine=machine_id(),
        run=fingerprint(run_token(run)),
        address=address,
        created=time.time(),
    )
    is_ours = write_once(run.lease / f"term-{term:06d}.json", json.dumps(asdict(holder)) + "\n")
    return Lease(run, holder, shared=shared, lock=lock, clock=clock) if is_ours else None


def held_lease_error(run: RunDirectory, holder: LeaseHolder) -> UserError:
    """Return the error for a run that another process is running."""
    return UserError("S020.run-already-running", where=str(run.location), run=holder.run, holder=holder)


def read_holder(run: RunDirectory) -> LeaseHolder | None:
    """Return the holder of the newest term; None if no term was ever claimed."""
    term = newest_term(run)
    if not term:
        return None
    unknown = LeaseHolder(term=term, host="?", pid=0, started=0, machine="?", run="?", address="", created=time.time())
    try:
        tree = json.loads(read_regular_text(run.lease / f"term-{term:06d}.json"))
        found = {each.name: tree[each.name] for each in fields(LeaseHolder)} | {"term": term}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return unknown  # incomplete or damaged: only its counter tells whether it is alive
    has_texts = all(isinstance(found[name], str) for name in ("host", "machine", "run", "address"))
    has_numbers = is_count(found["pid"]) and is_count(found["started"]) and is_time(found["created"])
    return LeaseHolder(**found) if has_texts and has_numbers else unknown


def new_token() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_urlsafe(32)


def run_token(run: RunDirectory) -> str:
    """Return the secret token of the run's channel. The first call creates it, readable only by its owner."""
    run.lease.mkdir(mode=0o700, exist_ok=True)
    _refuse_shared_access(run.lease, is_folder=True)
    path = run.lease / "token"
    if not path.exists():
        write_once(path, new_token() + "\n")
    _refuse_shared_access(path, is_folder=False)
    return read_regular_text(path).strip()


def _write_counter(run: RunDirectory, term: int, text: str) -> None:
    """Write in place and always the same number of bytes, which also works on a full disk."""
    fd = open_regular_fd(run.lease / f"beat-{term:06d}", os.O_CREAT | os.O_WRONLY, mode=0o600)
    try:
        os.write(fd, text.ljust(20).encode("ascii"))
    finally:
        os.close(fd)


def write_once(path: Path, text: str) -> bool:
    """Create a file atomically with its content, readable only by its owner; return False if it exists already."""
    draft = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _write_new(draft, text)
        try:
            os.link(draft, path)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS_ERRORS:
                raise
            _write_new(path, text)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _write_new(path: Path, text: str) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _refuse_shared_access(path: Path, *, is_folder: bool) -> None:
    """Raise if other users can access `path`: a process that can read the token can control the run."""
    status = path.lstat()
    right_kind = stat.S_ISDIR(status.st_mode) if is_folder else stat.S_ISREG(status.st_mode)
    if not right_kind or status.st_uid != os.getuid() or status.st_mode & 0o077:
        mode = "700" if is_folder else "600"
        raise UserError("S021.other-users", where=str(path), mode=mode, path=path)
