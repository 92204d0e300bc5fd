"""Finds the processes of a live run on this machine: its supervisor, its fork server, its ranks and their loaders."""

import os
import platform
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from trimaran.core import UserError
from trimaran.run import JsonlFollower, RunDirectory
from trimaran.run.attempts import read_attempts
from trimaran.run.lease import LeaseWatch

FORK_SERVER = ".fork_server"  # the end of the module that the fork server runs; its first argument is the run


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
        supervisor, fork_server = _parents(run, next(iter(ranks.values())))
    except psutil.NoSuchProcess:
        return _none_if_held(run)
    return RunProcesses(
        run=run, attempt=attempt.number, supervisor=supervisor, fork_server=fork_server, ranks=ranks, hosts=hosts
    )


def _parents(run: RunDirectory, rank: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """Return the supervisor and the fork server of a rank; raise if it has none, or belongs to another user."""
    if os.geteuid() not in (0, rank.uids().real):
        raise UserError("S033", f"the processes of this run belong to {rank.username()}", where=str(run.path),
                        fix="run the drill as the user who started the run")  # fmt: skip
    fork_server = rank.parent()
    supervisor = fork_server.parent() if fork_server else None
    if fork_server is None or supervisor is None or not _serves(fork_server, run):
        raise UserError("S033", "the ranks of this run have no supervisor: they were started by torchrun",
                        where=str(run.path), fix="start the run with `trimaran train`")  # fmt: skip
    return supervisor, fork_server


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


def _serves(process: psutil.Process, run: RunDirectory) -> bool:
    """Return whether a process is a fork server of `run`."""
    paths = [Path(path) for module, path in pairwise(process.cmdline()) if module.endswith(FORK_SERVER)]
    return any(path.is_dir() and path.samefile(run.path) for path in paths)


def _start_of(run: RunDirectory, rank: int, attempt: int) -> dict[str, object] | None:
    """Return the data of the `start` event of a rank in an attempt; None if it has not started."""
    found = [
        each
        for each in JsonlFollower(run.events(rank)).new()
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
