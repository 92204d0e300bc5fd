"""Faults, their injection into a run until the end of a `with` block, and the processes of a live run here."""

import contextlib
import errno
import ipaddress
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from trimaran.checkpoint.step_dirs import newest_step, step_path
from trimaran.core import Bytes, Cause, UserError, show_bytes, write_atomically
from trimaran.runs import LeaseWatch, RunDirectory, read_attempts, read_json_lines
from trimaran.runs.run_requests import CHANGE_PHASES, ChangePhase, request_kill, write_change_request

FORK_SERVERS = (".fork_server", ".warm_fork_server")  # the ends of the modules that a fork server runs
SUPERVISOR = ".launch"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProcesses:
    """The processes of one attempt. `ranks` are those of this machine; `hosts` has the host of every rank."""

    run: RunDirectory
    attempt: int
    supervisor: psutil.Process
    fork_server: psutil.Process
    ranks: dict[int, psutil.Process]
    hosts: dict[int, str]

    def rank(self, rank: int) -> psutil.Process:
        """Return the process of `rank`; raise if the run has no such rank, or it is on another machine."""
        if rank in self.ranks:
            return self.ranks[rank]
        if rank not in self.hosts:
            last = max(self.hosts)
            raise UserError(
                "A001.rank-not-exist-run", where=str(self.run.path), rank=rank, num_ranks=last + 1, last=last
            )
        raise other_machine(self.run, f"rank {rank} is on {self.hosts[rank]}", self.hosts[rank])


def find_processes(run: RunDirectory) -> RunProcesses | None:
    """Return the processes of `run` here; None while ranks start. Raises if it has ended, or has no rank here."""
    attempts = read_attempts(run)
    if not attempts.attempts or attempts.over is not None:
        return _none_if_held(run)
    attempt = attempts.attempts[-1]
    starts = {
        rank: each.get("data", {})
        for rank in range(attempt.world_size)
        for each in read_json_lines(run.events(rank))
        if each.get("kind") == "start" and each.get("attempt", 0) == attempt.number
    }
    if len(starts) < attempt.world_size:
        return _none_if_held(run)
    hosts = {rank: str(start.get("host", "?")) for rank, start in starts.items()}
    ranks = {rank: each for rank, start in starts.items() if (each := _process_of(rank, start))}
    if not ranks:
        if platform.node() in hosts.values():
            return _none_if_held(run)
        names = ", ".join(sorted(set(hosts.values())))
        raise other_machine(run, f"no rank of this run is on this machine ({platform.node()}), but on {names}",
                            sorted(hosts.values())[0])  # fmt: skip
    try:
        own = next(iter(ranks.values()))
        if os.geteuid() not in (0, own.uids().real):
            raise UserError("S033.processes-run-belong", where=str(run.path), username=own.username())
        fork_server = own.parent()
        if fork_server is None or not any(word.endswith(FORK_SERVERS) for word in fork_server.cmdline()):
            raise UserError("S033.ranks-run", where=str(run.path))
        supervisor = fork_server.parent()
        # The process that started the attempt may be on another node, whose supervisor then is the parent.
        if supervisor is None or not any(word.endswith(SUPERVISOR) for word in supervisor.cmdline()):
            supervisor = psutil.Process(attempt.pid)  # of a warm fork server
    except psutil.NoSuchProcess:
        return _none_if_held(run)
    return RunProcesses(
        run=run, attempt=attempt.number, supervisor=supervisor, fork_server=fork_server, ranks=ranks, hosts=hosts
    )


def other_machine(run: RunDirectory, what: str, host: str) -> UserError:
    fix = f"run the drill there: `ssh {host} trimaran drill {run.path.absolute()} ...`"
    return UserError("S031", what, where=str(run.path), fix=fix)


def _none_if_held(run: RunDirectory) -> None:
    """Return None if a supervisor is alive, and so starts the ranks; raise if there is none."""
    if isinstance(LeaseWatch(run).poll(), int):
        raise UserError("S030.run-not-running", where=str(run.path))


def _process_of(rank: int, start: dict[str, object]) -> psutil.Process | None:
    """Return the live process of a rank; None if it is gone or on another machine."""
    pid = start.get("pid")
    if start.get("host") != platform.node() or not isinstance(pid, int):
        return None
    try:
        # The name that the fork server gives to a rank: a pid may belong to another process by now.
        if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() != f"trimaran-{rank}":
            return None
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except (OSError, psutil.NoSuchProcess):
        return None


FaultName = Literal[
    "kill",
    "kill-in-change",
    "stop",
    "slow",
    "kill-loader",
    "kill-fork-server",
    "fill-disk",
    "cut",
    "terminate",
    "kill-supervisor",
    "damage-checkpoint",
]
SLOW = re.compile(r"(\d{1,6})=(\d{1,2}(?:\.\d{1,3})?)x?")
MIN_FACTOR, MAX_FACTOR = 1.5, 20.0  # of a slow rank: below, it is not a straggler; above, it looks hung
DEFAULT_FACTOR = 3.0
SLOW_PERIOD_SECONDS = 0.08  # in each, a slow rank runs for a part; shorter than most steps
MAX_CUT_SECONDS = 600.0
BLOCK_BYTES = 4096
MAX_FILL_BYTES = Bytes(64 << 30)  # a file system with more free space is probably shared with others
FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Removes the routes when its standard input is closed, also by the death of this process, or after the time limit.
RESTORE = 'timeout "$1" cat >/dev/null; shift; for peer; do ip route del blackhole "$peer"; done'


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultKind:
    """A kind of fault."""

    name: FaultName
    what: str
    causes: tuple[Cause, ...] = ()  # that its incident may have; empty: it leaves no incident
    names_rank: bool = False  # the incident must name the rank
    lasts: bool = False  # undone once it is detected
    restarts: bool = False  # all ranks start again
    ends_run: bool = False  # the supervisor ends too, and the run has to be resumed
    destroys: bool = False  # injected only into runs that a drill has started


KINDS: dict[FaultName, FaultKind] = {
    kind.name: kind
    for kind in (
        FaultKind(name="kill", what="SIGKILL to a rank", causes=("crash",), names_rank=True, restarts=True),
        FaultKind(
            name="kill-in-change",
            what="SIGKILL to a rank while the plan changes",
            causes=("crash",),
            names_rank=True,
            restarts=True,
        ),
        FaultKind(name="stop", what="SIGSTOP to a rank", causes=("hang",), names_rank=True, restarts=True),
        FaultKind(name="slow", what="a rank runs slower", causes=("straggler",), names_rank=True, lasts=True),
        FaultKind(name="kill-loader", what="SIGKILL to a loader process of a rank"),
        FaultKind(name="kill-fork-server", what="SIGKILL to the fork server", causes=("host",), restarts=True),
        FaultKind(name="fill-disk", what="the disk of the run directory is full", causes=("storage",), lasts=True),
        FaultKind(
            name="cut", what="no network to the other nodes", causes=("network", "host"), lasts=True, restarts=True
        ),
        FaultKind(name="terminate", what="SIGTERM to the supervisor", causes=("preempted",), ends_run=True),
        FaultKind(name="kill-supervisor", what="SIGKILL to the supervisor", causes=("host",), ends_run=True),
        FaultKind(
            name="damage-checkpoint",
            what="a flipped bit in the newest checkpoint, SIGKILL to the supervisor",
            causes=("storage",),
            ends_run=True,
            destroys=True,
        ),
    )
}  # in the order in which they are injected: those that end the run come last


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillFault:
    """A fault of `rank`; `factor` is of a slow rank, `node` of a cut network, `phase` of a change of the plan."""

    kind: FaultKind
    rank: int | None = None
    factor: float = DEFAULT_FACTOR
    node: str = ""
    phase: ChangePhase = "hand-over"

    @property
    def title(self) -> str:
        """Return the fault as its option is typed, such as `slow 1=2x`."""
        target = self.node if self.kind.name == "cut" else "" if self.rank is None else str(self.rank)
        detail = {"slow": f"={self.factor:g}x", "kill-in-change": f"={self.phase}"}.get(self.kind.name, "")
        return f"{self.kind.name} {target}{detail}".strip()


def parse_slow(text: str) -> DrillFault:
    """Return the fault of `--slow 1=2x`: rank 1 runs at half its speed."""
    match = SLOW.fullmatch(text)
    if match is None or not MIN_FACTOR <= float(match[2]) <= MAX_FACTOR:
        raise UserError(
            "A001.not-rank-factorx", where="--slow", text=text, min_factor=MIN_FACTOR, max_factor=MAX_FACTOR
        )
    return DrillFault(kind=KINDS["slow"], rank=int(match[1]), factor=float(match[2]))


def parse_kill_in_change(text: str) -> DrillFault:
    """Return the fault of `--kill-in-change 1=hand-over`: rank 1 dies while it hands its state to another plan."""
    rank, _, name = text.partition("=")
    phase = next((each for each in CHANGE_PHASES if each == name), None)
    if phase is None or not re.fullmatch(r"[0-9]{1,6}", rank):
        raise UserError(
            "A001.not-rank-phase", where="--kill-in-change", text=text, change_phases=", ".join(CHANGE_PHASES)
        )
    return DrillFault(kind=KINDS["kill-in-change"], rank=int(rank), phase=phase)


@contextmanager
def inject(processes: RunProcesses, fault: DrillFault) -> Iterator[None]:
    """Inject `fault`. What it has changed and still exists is restored at the end."""
    with INJECTIONS[fault.kind.name](processes, fault):
        yield


@contextmanager
def stopped_process(process: psutil.Process) -> Iterator[None]:
    """Stop a process with SIGSTOP; continue it at the end if it still exists."""
    try:  # before the signal: Ctrl-C may follow it at once
        process.send_signal(signal.SIGSTOP)  # psutil refuses if the pid belongs to another process by now
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


@contextmanager
def slowed_process(process: psutil.Process, factor: float) -> Iterator[None]:
    """Let a process run for only 1/`factor` of the time, in short turns, until the end of the block."""
    over = threading.Event()

    def take_turns() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not over.is_set():
                with stopped_process(process):
                    over.wait(SLOW_PERIOD_SECONDS * (1 - 1 / factor))
                over.wait(SLOW_PERIOD_SECONDS / factor)

    thread = threading.Thread(target=take_turns, name="slow-rank", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def damage_checkpoint(run: RunDirectory) -> Path:
    """Flip one bit in the middle of the largest file of the newest checkpoint, and return that file."""
    step = newest_step(run.checkpoints)
    if step is None:
        raise UserError("S033.run-no-complete", where=str(run.checkpoints))
    folder = step_path(run.checkpoints, step)
    file = max(folder.glob("*.safetensors"), key=lambda path: (path.stat().st_size, path.name))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    write_atomically(file, bytes(data))  # another checkpoint may share the file through a hard link
    return file


@contextmanager
def _send(process: psutil.Process, number: signal.Signals) -> Iterator[None]:
    process.send_signal(number)
    yield


def oldest_loader(processes: RunProcesses, rank: int) -> psutil.Process:
    """Return the oldest loader process of `rank`; raise if it has none."""
    loaders = [each for each in processes.rank(rank).children() if each.status() != psutil.STATUS_ZOMBIE]
    if not loaders:
        raise UserError("S033.rank-no-loader", where="--kill-loader", rank=rank)
    return min(loaders, key=lambda each: (each.create_time(), each.pid))


@contextmanager
def _damage_and_kill(processes: RunProcesses, fault: DrillFault) -> Iterator[None]:
    """Damage the newest checkpoint once nothing can save another one, and end the run with its copies in memory."""
    with stopped_process(processes.supervisor):
        for process in processes.ranks.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        damage_checkpoint(processes.run)
        processes.supervisor.send_signal(signal.SIGKILL)
        yield


@contextmanager
def _kill_in_change(processes: RunProcesses, fault: DrillFault) -> Iterator[None]:
    """Have the rank die in a change of the plan that moves no values and changes no results."""
    run = processes.run
    request_kill(run, _rank(fault), fault.phase)
    try:
        reason = f"drill: {fault.title}"
        write_change_request(run, {"plan.cuda_graphs": not run.read_plan().cuda_graphs}, reason=reason)
        yield
    finally:
        run.kill_request.unlink(missing_ok=True)


def _rank(fault: DrillFault) -> int:
    assert fault.rank is not None, f"{fault.kind.name} needs a rank"
    return fault.rank


INJECTIONS: dict[FaultName, Callable[[RunProcesses, DrillFault], AbstractContextManager[object]]] = {
    "kill": lambda processes, fault: _send(processes.rank(_rank(fault)), signal.SIGKILL),
    "kill-in-change": _kill_in_change,
    "stop": lambda processes, fault: stopped_process(processes.rank(_rank(fault))),
    "slow": lambda processes, fault: slowed_process(processes.rank(_rank(fault)), fault.factor),
    "kill-loader": lambda processes, fault: _send(oldest_loader(processes, _rank(fault)), signal.SIGKILL),
    "kill-fork-server": lambda processes, _: _send(processes.fork_server, signal.SIGKILL),
    "fill-disk": lambda processes, _: filled_disk(processes.run.path),
    "cut": lambda processes, fault: cut_network(find_peers(processes, fault.node), seconds=MAX_CUT_SECONDS),
    "terminate": lambda processes, _: _send(processes.supervisor, signal.SIGTERM),
    "kill-supervisor": lambda processes, _: _send(processes.supervisor, signal.SIGKILL),
    "damage-checkpoint": _damage_and_kill,
}


def refuse_shared_disk(folder: Path, *, allow_root: bool, max_bytes: Bytes = MAX_FILL_BYTES) -> None:
    """Raise if the file system of `folder` must not be filled: it is that of the system, or very large."""
    status = os.statvfs(folder)
    free = Bytes(status.f_bavail * status.f_frsize)
    small = "put the run directory on a small file system of its own, such as a tmpfs: --run-dir DIR"
    if free > max_bytes:
        raise UserError(
            "S033.disk-free-drill", where=str(folder), free=show_bytes(free), max_bytes=show_bytes(max_bytes)
        )
    if folder.stat().st_dev == Path("/").stat().st_dev and not allow_root:
        raise UserError("S033.run-directory-disk", where=str(folder), small=small)


@contextmanager
def filled_disk(folder: Path) -> Iterator[Bytes]:
    """Fill the disk of `folder`, and yield the bytes. The file has no name: it ends with this process."""
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)
    try:
        status = os.fstatvfs(fd)
        size, part = 0, status.f_bfree * status.f_frsize
        while part >= BLOCK_BYTES:
            try:
                os.posix_fallocate(fd, size, part)
                size += part
            except OSError as error:
                if error.errno not in FULL_ERRORS:
                    raise
                part //= 2
        os.lseek(fd, size, os.SEEK_SET)
        with contextlib.suppress(OSError):
            while True:
                size += os.write(fd, bytes(BLOCK_BYTES))
        yield Bytes(size)
    finally:
        os.close(fd)


def find_peers(processes: RunProcesses, node: str) -> list[str]:
    """Return the addresses of connected nodes; raise unless `node` is this machine and can be cut off."""
    own = (each.address.partition("%")[0] for found in psutil.net_if_addrs().values() for each in found)
    here = {platform.node(), *own}
    if node not in here:
        try:
            is_address = bool(ipaddress.ip_address(node))
        except ValueError:
            is_address = False
        if node not in processes.hosts.values() and not is_address:
            known = ", ".join(sorted(set(processes.hosts.values())))
            raise UserError("A001.not-node-run", where="--cut", node=node, known=known)
        raise other_machine(processes.run, f"{node} is not this machine ({platform.node()})", node)
    peers = {
        connection.raddr.ip
        for process in (processes.supervisor, *processes.ranks.values())
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr
    }
    peers = {each for each in peers if not ipaddress.ip_address(each).is_loopback} - here
    if not peers:
        raise UserError("S033.run-no-connection", where="--cut")
    if os.geteuid() != 0 or not shutil.which("ip"):
        raise UserError("S033.network-can-cut", where="--cut")
    return sorted(peers)


@contextmanager
def cut_network(peers: Sequence[str], *, seconds: float) -> Iterator[None]:
    """Discard all packets to `peers`; restored at the end, after `seconds`, and if this process is killed."""
    networks = [f"{each}/{ipaddress.ip_address(each).max_prefixlen}" for each in peers]
    command = ["sh", "-c", RESTORE, "restore", f"{seconds:.0f}", *networks]
    restore = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for network in networks:
            added = subprocess.run(["ip", "route", "add", "blackhole", network], capture_output=True, check=False)
            if added.returncode:
                raise UserError(
                    "S033.network-cannot-cut", where="--cut", added_stderr=added.stderr.decode(errors="replace").strip()
                )
        yield
    finally:
        restore.communicate()
