"""Finds the processes of a live run on this machine: its supervisor, its fork server, its ranks and their loaders."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from trimaran.core import UserError
from trimaran.runs import RunDirectory, read_json_lines
from trimaran.runs.lease import LeaseWatch
from trimaran.runs.run_records import read_attempts

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
            raise UserError("A001", f"rank {rank} does not exist: the run has {last + 1} ranks",
                            where=str(self.run.path), fix=f"name one of 0 to {last}")  # fmt: skip
        raise other_machine(self.run, f"rank {rank} is on {self.hosts[rank]}", self.hosts[rank])

    def loaders(self, rank: int) -> list[psutil.Process]:
        """Return the loader processes of `rank`, oldest first."""
        found = [each for each in self.rank(rank).children() if each.status() != psutil.STATUS_ZOMBIE]
        return sorted(found, key=lambda each: (each.create_time(), each.pid))


def find_processes(run: RunDirectory) -> RunProcesses | None:
    """Return the processes of `run` on this machine; None while its ranks are starting.

    Raises if the run is not running, or has no rank here.
    """
    attempts = read_attempts(run)
    if not attempts.attempts or attempts.over is not None:
        return _none_if_held(run)
    attempt = attempts.attempts[-1]
    starts = {rank: _start_of(run, rank, attempt.number) for rank in range(attempt.world_size)}
    if None in starts.values():
        return _none_if_held(run)
    hosts = {rank: str(start.get("host", "?")) for rank, start in starts.items() if start is not None}
    ranks = {rank: each for rank, start in starts.items() if start and (each := _process_of(rank, start))}
    if not ranks:
        if platform.node() in hosts.values():
            return _none_if_held(run)
        names = ", ".join(sorted(set(hosts.values())))
        raise other_machine(run, f"no rank of this run is on this machine ({platform.node()}), but on {names}",
                            sorted(hosts.values())[0])  # fmt: skip
    try:
        supervisor, fork_server = _parents(run, next(iter(ranks.values())), attempt.pid)
    except psutil.NoSuchProcess:
        return _none_if_held(run)
    return RunProcesses(
        run=run, attempt=attempt.number, supervisor=supervisor, fork_server=fork_server, ranks=ranks, hosts=hosts
    )


def _parents(run: RunDirectory, rank: psutil.Process, supervisor: int) -> tuple[psutil.Process, psutil.Process]:
    """Return the supervisor and the fork server of a rank; raise if it has none, or belongs to another user.

    `supervisor` is the process that started the attempt. On several nodes it may be on another one; each node then has
    a supervisor of its own, the parent of its fork server.
    """
    if os.geteuid() not in (0, rank.uids().real):
        raise UserError("S033", f"the processes of this run belong to {rank.username()}", where=str(run.path),
                        fix="run the drill as the user who started the run")  # fmt: skip
    fork_server = rank.parent()
    if fork_server is None or not any(word.endswith(FORK_SERVERS) for word in fork_server.cmdline()):
        raise UserError("S033", "the ranks of this run have no supervisor: they were started by torchrun",
                        where=str(run.path), fix="start the run with `trimaran train`")  # fmt: skip
    parent = fork_server.parent()
    if parent is not None and any(word.endswith(SUPERVISOR) for word in parent.cmdline()):
        return parent, fork_server
    return psutil.Process(supervisor), fork_server  # of a warm fork server


def not_running(run: RunDirectory) -> UserError:
    fix = "start it, or let the drill start a run of its own: `trimaran drill RECIPE.yaml --kill 1`"
    return UserError("S030", "this run is not running", where=str(run.path), fix=fix)


def other_machine(run: RunDirectory, what: str, host: str) -> UserError:
    fix = f"run the drill there: `ssh {host} trimaran drill {run.path.absolute()} ...`"
    return UserError("S031", what, where=str(run.path), fix=fix)


def _none_if_held(run: RunDirectory) -> None:
    """Return None if a supervisor is alive, and so starts the ranks; raise if there is none."""
    if isinstance(LeaseWatch(run).poll(), int):
        raise not_running(run)


def _start_of(run: RunDirectory, rank: int, attempt: int) -> dict[str, object] | None:
    """Return the data of the `start` event of a rank in an attempt; None if it has not started."""
    found = [
        each
        for each in read_json_lines(run.events(rank))
        if each.get("kind") == "start" and each.get("attempt", 0) == attempt
    ]
    return found[-1].get("data", {}) if found else None


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
