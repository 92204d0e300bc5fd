"""The ranks of this machine: forked by a fork server, seen by their heartbeats, killed as a group."""

import contextlib
import logging
import os
import platform
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimaran.core import FaultsSection
from trimaran.launch.collect_reports import (
    ENDED,
    STOPPED,
    ProcessObservation,
    collect_reports,
    process_group,
    process_state,
    queued_seconds,
)
from trimaran.launch.deadline import Deadlines
from trimaran.launch.fork_server_client import ForkServerClient
from trimaran.launch.node import Ended, Lost, News, Orders, Silent
from trimaran.launch.sidecar_process import SidecarProcess
from trimaran.run import Heartbeat, HeartbeatBoard, RunDirectory

log = logging.getLogger(__name__)

KILL_SECONDS = 30.0
NAP_SECONDS = 1.0  # a watcher that was away for longer saw nothing, and blames nobody for it


@dataclass(slots=True)
class LocalRank:
    """A rank of this node: `place` is its row on the board, `pid` its process and its process group."""

    rank: int
    place: int
    pid: int = 0
    code: int | None = None


class LocalNode:
    """A machine's worth of ranks. Make it in a thread that lives as long as the run: the fork server dies with that thread.

    Board and rank memories (the memory that outlives a rank, see `checkpoint/memory_copies.py`) are made for `num_ranks` and stay
    for the life of this object, over all attempts and fork servers.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        num_ranks: int,
        environment: Mapping[str, str],
        faults: FaultsSection,
        name: str = "",
    ) -> None:
        self.name, self.num_ranks = name or platform.node(), num_ranks
        self._run, self._environment, self._faults = run, environment, faults
        self._board = HeartbeatBoard.make(num_ranks)
        self._rank_memories = [os.memfd_create(f"trimaran-berth-{place}") for place in range(num_ranks)]
        self._deadlines = Deadlines(faults)
        self._ranks: dict[int, LocalRank] = {}
        self._silent: set[tuple[int, bool]] = set()  # ranks that were told of, and whether they were stopped
        self._looked = time.monotonic()
        self._fork_server = self._new_fork_server()
        self._sidecar = SidecarProcess(run, environment)

    def _new_fork_server(self) -> ForkServerClient:
        return ForkServerClient.start(self._run, self._environment, [self._board.fd, *self._rank_memories])

    @property
    def warm(self) -> bool:
        """Whether ranks would start at once. For the time before there are any."""
        [*self._hear()]
        return self._fork_server.warm or not self._fork_server.alive

    def start(self, orders: Orders) -> None:
        if not self._fork_server.alive:
            self._fork_server = self._new_fork_server()
        self._board.clear()
        self._deadlines.start()
        self._silent.clear()
        self._looked = time.monotonic()
        places = range(orders.num_ranks)
        self._ranks = {each.rank: each for each in (LocalRank(orders.first_rank + place, place) for place in places)}
        self._fork_server.fork([(each.rank, self._environment_of(each, orders)) for each in self._ranks.values()])
        self._sidecar.start(orders.node)

    def _environment_of(self, rank: LocalRank, orders: Orders) -> dict[str, str]:
        return {
            "RANK": str(rank.rank),
            "LOCAL_RANK": str(rank.place),
            "WORLD_SIZE": str(orders.world_size),
            "LOCAL_WORLD_SIZE": str(orders.num_ranks),
            "TRIMARAN_ATTEMPT": str(orders.attempt),
            "TRIMARAN_STORE": orders.store,
            "TRIMARAN_TOKEN": orders.token,
            "TRIMARAN_PULSE": str(self._board.fd),
            "TRIMARAN_BERTHS": ",".join(map(str, self._rank_memories)),
            **orders.environment,
        }

    def news(self) -> list[News]:
        found = [*self._hear()]
        self._sidecar.look()
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - before > NAP_SECONDS:
            self._deadlines.excuse(now)
        heartbeats = self.heartbeats()
        queued = {rank: queued_seconds(self._ranks[rank].pid) for rank in self._alive()}
        late = self._deadlines.late({rank: heartbeats[rank] for rank in self._alive()}, now, queued)
        stopped = self._stopped(heartbeats, now)
        silent = {(rank, rank in stopped): seconds for rank, seconds in (late | stopped).items()}
        for rank, is_stopped in silent.keys() - self._silent:
            deadline = self._faults.hang_seconds if is_stopped else self._deadlines.of(heartbeats[rank].section)
            seconds = silent[rank, is_stopped]
            found.append(
                Silent(rank=rank, heartbeat=heartbeats[rank], seconds=seconds, deadline=deadline, stopped=is_stopped)
            )
        self._silent = set(silent)
        return found

    def _stopped(self, heartbeats: Mapping[int, Heartbeat], now: float) -> dict[int, float]:
        """Return the seconds for which ranks have been stopped by a signal: that is a hang whatever they were doing."""
        quiet = {rank: now - heartbeats[rank].alive for rank in self._alive()}
        limit = self._faults.hang_seconds
        return {
            rank: seconds
            for rank, seconds in quiet.items()
            if seconds > limit and process_state(self._ranks[rank].pid) in STOPPED
        }

    def _hear(self, *, wait: float = 0.0) -> Iterator[News]:
        """Yield the ends of ranks that the fork server tells of; its own end is the end of all of them."""
        running = self._fork_server.alive  # asked first: what it told before its end is still heard
        for told in self._fork_server.hear(wait=wait):
            rank = self._ranks.get(told.get("rank", -1))
            if told["told"] == "started" and rank is not None:
                rank.pid = told["pid"]
            elif told["told"] == "ended" and rank is not None and rank.pid == told["pid"]:
                rank.code = told["code"]
                yield Ended(rank=rank.rank, code=told["code"], time=told["time"])
        if not running and self._alive():
            code = self._fork_server.process.returncode
            gone = tuple(self._alive())
            for rank in self._alive().values():
                rank.code = -signal.SIGKILL
            yield Lost(node=self.name, what=f"the process that forks the ranks ended with code {code}", ranks=gone)

    def _alive(self) -> dict[int, LocalRank]:
        return {number: rank for number, rank in self._ranks.items() if rank.code is None}

    def heartbeats(self) -> dict[int, Heartbeat]:
        return {number: self._board.read(rank.place) for number, rank in self._ranks.items()}

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """File what the ranks say. Ranks that ended while this waited are told by the next `news`."""
        alive = [ProcessObservation(rank.rank, rank.place, rank.pid) for rank in self._alive().values() if rank.pid]
        collect_reports(self._run, self._board, alive, folder, seconds=seconds, gently=gently)
        self._looked = time.monotonic()

    def ask_to_stop(self) -> None:
        with contextlib.suppress(OSError):  # a full disk: the signal alone has to do
            self._run.stop_request.touch()
        for rank in self._alive().values():
            if rank.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGTERM)

    def kill(self) -> None:
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            for rank in self._ranks.values():
                if rank.pid:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(rank.pid, signal.SIGKILL)  # with the loader processes of ranks that are gone
            [*self._hear(wait=0.02)]
            if not self._alive() and not any(_exists(rank.pid) for rank in self._ranks.values()):
                break
        else:
            log.error("processes of %s cannot be killed: %s", self.name, [rank.pid for rank in self._ranks.values()])
        self._ranks = {}

    def close(self) -> None:
        """End everything here; the memory of the ranks is given back."""
        self.kill()
        self._sidecar.end()
        self._fork_server.end()
        for fd in self._rank_memories:
            os.close(fd)


def _exists(group: int) -> bool:
    """Whether a process of this group is left, other than ended ones: in some containers nobody buries those."""
    if not group:
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return any(process_group(pid) == group and process_state(pid) not in ENDED for pid in pids)
