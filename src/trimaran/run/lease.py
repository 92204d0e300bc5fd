"""Who runs a run: at most one supervisor at a time, each with a higher term than the one before.

A term is a file that nobody can make twice. Its holder bumps a counter once a second. Clocks of different machines are
never compared: another machine's holder is dead when its counter stood still for a while by our own monotonic clock.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Self

from trimaran.core import UserError
from trimaran.run.run_directory import RunDirectory, writing
from trimaran.run.wire import fingerprint

BEAT_SECONDS = 1.0
LOOK_SECONDS = 0.25
DEAD_SECONDS = 10.0  # without a beat
FENCED_SECONDS = 8.0  # without a beat of our own: others may soon take us for dead
RELEASED = "released"
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}  # of file systems without hard links


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who took a term. `machine` tells whether its `pid` means anything here; `created` is for people to read.

    `started` is when the process began, in the kernel's ticks since boot: a pid alone is used again.
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
    """The right to run a run. Its counter moves from its making until `release`."""

    def __init__(self, run: RunDirectory, holder: Holder, *, shared: bool) -> None:
        self.run, self.holder, self.shared = run, holder, shared
        self._beaten = time.monotonic()
        self._newest = holder.term
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @property
    def term(self) -> int:
        return self.holder.term

    def holds(self) -> bool:
        """Whether nobody else has taken over, or may be about to. Known to a quarter of a second, without a wait.

        Who shares the run with other machines and cannot reach its directory any more soon looks dead to them.
        """
        late = self.shared and time.monotonic() - self._beaten > FENCED_SECONDS
        return not self._over.is_set() and not late and self._newest <= self.term

    def release(self) -> None:
        """Give it up, so that the next one need not wait to see that we are gone."""
        if not self._over.is_set():
            self._over.set()
            self._thread.join(timeout=BEAT_SECONDS)
            with contextlib.suppress(OSError):
                _write_beat(self.run, self.term, RELEASED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _beat(self) -> None:
        count, due = 0, time.monotonic()
        while True:
            now = time.monotonic()
            with contextlib.suppress(OSError):  # `holds` sees how long it has been
                if now >= due:
                    count, due = count + 1, now + BEAT_SECONDS
                    _write_beat(self.run, self.term, str(count))
                    self._beaten = now
                self._newest = max(self._newest, newest_term(self.run))
            if self._over.wait(LOOK_SECONDS):
                return


class LeaseWatch:
    """Tells, by looking again and again, whether the holder of a run's newest term lives."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self._seen: tuple[int, str] | None = None
        self._since = 0.0
        self._holder: Holder | None = None
        self.certain = False  # that the holder last returned lives, not just that it has not been seen to be dead

    def look(self) -> Holder | int:
        """Return the living holder, or the number of the term that is free.

        A holder on this machine is known at once; one elsewhere is dead after its counter stood still for 10 s.
        """
        try:
            holder = self._holder = read_holder(self.run)
        except OSError:
            if self._holder is None:
                raise
            return self._holder  # the directory is out of reach, which says nothing about the holder
        if holder is None:
            return 1
        beat = _read_beat(self.run, holder.term)
        if beat == RELEASED:
            return holder.term + 1
        if holder.machine == this_machine():
            self.certain = True
            return holder if _started(holder.pid) == holder.started else holder.term + 1
        if (holder.term, beat) != self._seen:
            self.certain = self._seen is not None and self._seen[0] == holder.term
            self._seen, self._since = (holder.term, beat), time.monotonic()
        return holder if time.monotonic() - self._since < DEAD_SECONDS else holder.term + 1

    @property
    def still_seconds(self) -> float:
        """For how long the counter has not moved while we looked."""
        return time.monotonic() - self._since if self._seen else 0.0


def take(run: RunDirectory, *, address: str = "", shared: bool = False) -> Lease:
    """Return the lease of `run`, or say who has it. `address` is where others find the holder's channel.

    With a dead holder on another machine this takes 10 s. `shared` is for runs of several machines, see `Lease.holds`.
    """
    watch = LeaseWatch(run)
    while True:
        found = watch.look()
        if isinstance(found, int):
            with writing(run):
                lease = claim(run, found, address=address, shared=shared)
            if lease is not None:
                return lease
        elif watch.certain:
            raise refusal(run, found)
        else:
            time.sleep(LOOK_SECONDS)


def claim(run: RunDirectory, term: int, *, address: str = "", shared: bool = False) -> Lease | None:
    """Return the lease of `term`, which `LeaseWatch.look` found free, or None when somebody was quicker."""
    holder = Holder(
        term=term,
        host=platform.node(),
        pid=os.getpid(),
        started=_started(os.getpid()),
        machine=this_machine(),
        run=fingerprint(token_of(run)),
        address=address,
        created=time.time(),
    )
    made = _make_once(_term_file(run, term), json.dumps(asdict(holder)) + "\n")
    return Lease(run, holder, shared=shared) if made else None


def refusal(run: RunDirectory, holder: Holder) -> UserError:
    """Return the error for whoever wants a run that somebody else runs."""
    return UserError("S020", f"this run is at work: run {holder.run}, {holder}", where=str(run.path),
                     fix="wait for its end, stop it with Ctrl-C or SIGTERM there, or start another run: "
                     "--run-dir DIR")  # fmt: skip


def newest_term(run: RunDirectory) -> int:
    """Return the highest term that anybody took, 0 for none. Whoever has a lower one must not write any more.

    The folder is listed each time: on network file systems that asks the server, a look for one name may not.
    """
    names = os.listdir(run.lease) if run.lease.is_dir() else []
    terms = [name.removeprefix("term-").removesuffix(".json") for name in names if name.startswith("term-")]
    return max((int(term) for term in terms if term.isdigit()), default=0)


def read_holder(run: RunDirectory) -> Holder | None:
    """Return who took the newest term, or None when nobody ever has."""
    term = newest_term(run)
    if not term:
        return None
    nobody = Holder(term=term, host="?", pid=0, started=0, machine="?", run="?", address="", created=time.time())
    try:
        tree = json.loads(_term_file(run, term).read_text(encoding="utf-8"))
        return Holder(**{each.name: tree[each.name] for each in fields(Holder)})
    except (OSError, ValueError, KeyError, TypeError):
        return nobody  # half-written or damaged: its counter alone tells whether it lives


def token_of(run: RunDirectory) -> str:
    """Return the run's token, which opens its channel; made by whoever asks first, and readable by its owner alone."""
    run.lease.mkdir(mode=0o700, exist_ok=True)
    _refuse_foreign(run.lease, is_folder=True)
    path = run.lease / "token"
    if not path.exists():
        _make_once(path, secrets.token_urlsafe(32) + "\n")
    _refuse_foreign(path, is_folder=False)
    return path.read_text(encoding="ascii").strip()


def this_machine() -> str:
    """Return what two processes have in common when they can see each other by pid: the boot and the pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _term_file(run: RunDirectory, term: int) -> Path:
    return run.lease / f"term-{term:06d}.json"


def _beat_file(run: RunDirectory, term: int) -> Path:
    return run.lease / f"beat-{term:06d}"


def _write_beat(run: RunDirectory, term: int, text: str) -> None:
    """Write in place and always as many bytes: a disk that is full by now does not make us look dead."""
    beat = os.open(_beat_file(run, term), os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        os.write(beat, text.ljust(20).encode("ascii"))
    finally:
        os.close(beat)


def _read_beat(run: RunDirectory, term: int) -> str:
    try:
        return _beat_file(run, term).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _started(pid: int) -> int:
    """Return when a process of this machine began, in ticks since boot; -1 when it is gone."""
    try:
        state, *rest = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        )
    except (OSError, ValueError):
        return -1
    return -1 if state in "ZX" else int(rest[18])


def _make_once(path: Path, text: str) -> bool:
    """Make a file with its whole content, readable by its owner; return False when there is one already."""
    draft = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _write_new(draft, text)
        try:
            os.link(draft, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            _write_new(path, text)
    except FileExistsError:
        return False
    finally:
        draft.unlink(missing_ok=True)
    return True


def _write_new(path: Path, text: str) -> None:
    with open(
        os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w", encoding="utf-8"
    ) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _refuse_foreign(path: Path, *, is_folder: bool) -> None:
    """Raise unless `path` is ours alone: whoever can read the token can steer the run."""
    found = path.lstat()
    right_kind = stat.S_ISDIR(found.st_mode) if is_folder else stat.S_ISREG(found.st_mode)
    if not right_kind or found.st_uid != os.getuid() or found.st_mode & 0o077:
        mode = "700" if is_folder else "600"
        raise UserError("S021", "others may read or change who runs this run", where=str(path),
                        fix=f"make it yours alone: chmod {mode} {path}, or delete it while nothing runs")  # fmt: skip
