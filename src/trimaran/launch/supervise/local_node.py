"""The ranks of this machine: forked by a fork server, watched by their heartbeats, killed with their process groups.

Also how long a rank may stay in one section or step before it counts as hung, learnt from earlier durations, and the
node group of a run on this machine only.
"""

import contextlib
import json
import logging
import os
import platform
import select
import signal
import socket
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import FaultsSection, Plan, append_regular_file
from trimaran.launch.supervise.channel import Channel
from trimaran.launch.supervise.fork_server_process import (
    ForkServerProcess,
    fork_server_environment,
    shared_gpu_environment,
    start_fork_server,
)
from trimaran.launch.supervise.node import AttemptSpec, Node, NodeEvent, NodeGroup, NodeLost, RankEnded, RankSilent
from trimaran.launch.supervise.rank_report import (
    ENDED_STATES,
    STOPPED_STATES,
    LocalRank,
    collect_reports,
    process_state,
    queued_seconds,
)
from trimaran.launch.supervise.side_processes import SidecarProcess
from trimaran.runs import Heartbeat, HeartbeatBoard, Lease, RunDirectory, Section, descriptor_of, run_token

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 200  # in one message; the kernel's limit is 253


@dataclass(slots=True)
class ForkServerClient:
    """A running fork server that belongs to a run. A child of this process dies with the thread that started it."""

    process: ForkServerProcess
    _run: RunDirectory
    _received: bytes = b""  # without the lines that were returned
    warm: bool = False  # torch is imported: ranks start at once

    @classmethod
    def bind(cls, process: ForkServerProcess, run: RunDirectory, fds: Sequence[int]) -> "ForkServerClient":
        """Tell a fork server which run it serves, and pass it `fds`. Returns at once, while it imports torch."""
        client, descriptor = cls(process, run), descriptor_of(run)
        passed = [*fds, *([] if descriptor is None else [descriptor])]
        message: dict[str, Any] = {"run": str(run.location.absolute()), "is_open": descriptor is not None}
        if process.is_warm:
            ours = {"environment": fork_server_environment(os.environ), "folder": os.getcwd()}
            message |= {"process": ours}
        client.send({"bind": message}, passed)
        return client

    @property
    def alive(self) -> bool:
        return self.process.alive

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a line, and descriptors before it. `alive` says if the fork server is dead."""
        control = self.process.control
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            control.setblocking(True)
            for first in range(0, len(fds), MAX_DESCRIPTORS):
                socket.send_fds(control, [b"{}\n"], fds[first : first + MAX_DESCRIPTORS])
            control.sendall(json.dumps(message).encode() + b"\n")
        control.setblocking(False)

    def receive(self, *, wait: float = 0.0) -> list[dict[str, Any]]:
        """Return the fork server's events since the last call; wait at most `wait` seconds for one."""
        control, running = self.process.control, self.alive
        poll = select.poll()
        poll.register(control, select.POLLIN)
        poll.poll(1000 * wait)
        while True:
            try:
                data = control.recv(1 << 16)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            if not data:
                break
            self._received += data
        *lines, self._received = self._received.split(b"\n")
        events = [json.loads(line) for line in lines]
        self.warm |= any(each["event"] == "warm" for each in events)
        if (self.warm or not running) and (printed := self.process.take_output()):
            with contextlib.suppress(OSError), append_regular_file(self._run.agent_log) as log:
                log.write(printed)  # while it imported torch; from now on it writes to the log itself
        return events


KILL_SECONDS = 30.0
PAUSE_SECONDS = 1.0  # if the supervisor itself did not run for longer, silence until then does not count

NUM_RECENT_STEPS = 20
STEP_FACTOR = 5.0
SECTION_FACTOR = 10.0
MIN_SECTION_SECONDS = 30.0
MAX_PAUSES = 3  # of the supervisor during one silence; then the silence counts in full
LEARNT_SECTIONS: tuple[Section, ...] = ("first", "copy", "evaluation", "sampling")


class Deadlines:
    """Reads the heartbeats of a node's ranks, and finds those past their deadline.

    A step may take five times the median of the last 20 steps, but at least `hang_seconds`. A unit of
    `LEARNT_SECTIONS` may take `start_seconds` the first time, and later ten times the longest so far, but at least
    30 s. A unit of any other section may always take `start_seconds`: it reads, writes, compiles or waits for data, and
    how long that took before says nothing about the next time. Seconds in which a rank was ready to run and had no core
    do not count, neither for it nor for the ranks that may wait for it.
    """

    def __init__(self, faults: FaultsSection) -> None:
        self._faults = faults
        self._steps: deque[float] = deque(maxlen=NUM_RECENT_STEPS)
        self._longest: dict[Section, float] = {}
        self._before: dict[int, Heartbeat] = {}
        self._step_began: dict[int, Heartbeat] = {}  # the first heartbeat of each rank's current step
        self._step_learnt: dict[int, int] = {}  # the last step of each rank whose duration is known
        self._queued: dict[int, float] = {}
        self._core_wait = 0.0  # seconds of waiting for a core, of the rank that waited longest in each interval
        self._core_wait_at: dict[int, float] = {}  # the same when a rank last made progress
        self.expected_seconds = 0.0  # of a step, before one was measured; 0: not known
        self._is_changed = False  # the plan may have changed since the last steps
        self._pauses: deque[float] = deque(maxlen=MAX_PAUSES)  # when the supervisor resumed polling after a pause

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """Forget these ranks, which are started again, or all of them. The durations learnt so far are kept."""
        gone = {*(self._before.keys() | self._queued.keys() if ranks is None else ranks)}
        for known in (self._before, self._step_began, self._step_learnt, self._queued, self._core_wait_at):
            for rank in gone & known.keys():
                del known[rank]

    def of(self, section: Section) -> float:
        """Return the seconds that one unit of `section` may take."""
        if section == "step":
            usual = statistics.median(self._steps) if self._steps else self.expected_seconds
            return max(self._faults.hang_seconds, STEP_FACTOR * usual)
        if section not in self._longest:
            return self._faults.start_seconds
        return min(self._faults.start_seconds, max(MIN_SECTION_SECONDS, SECTION_FACTOR * self._longest[section]))

    def note_pause(self, now: float) -> None:
        """Count silence only from `now` on: the supervisor did not run until now, and maybe neither did the ranks."""
        self._pauses.append(now)

    def counted_silence(self, since: float, now: float) -> float:
        """Return the seconds from `since` to `now` that count. After `MAX_PAUSES` pauses all of them count."""
        is_excused = self._pauses and not (len(self._pauses) == MAX_PAUSES and self._pauses[0] > since)
        return now - (max(since, self._pauses[-1]) if is_excused else since)

    def overdue(
        self, heartbeats: Mapping[int, Heartbeat], now: float, queued: Mapping[int, float] | None = None
    ) -> dict[int, float]:
        """Return the seconds of silence of each rank that is past its deadline, and learn from the others.

        `queued` are the seconds that each rank has waited for a core since it was started.
        """
        queued, silent = queued or {}, {}
        # The value of a rank that has just ended drops to 0; the difference must not become negative.
        self._core_wait += max([0.0, *(each - self._queued.get(rank, each) for rank, each in queued.items())])
        self._queued.update(queued)
        for rank, heartbeat in heartbeats.items():
            before = self._before.get(rank)
            if before is None or heartbeat.entered > before.entered:
                self._learn(rank, before, heartbeat)
                self._core_wait_at[rank] = self._core_wait
            self._before[rank] = heartbeat
            seconds = self.counted_silence(heartbeat.entered, now) - (self._core_wait - self._core_wait_at[rank])
            if seconds > self.of(heartbeat.section):
                silent[rank] = seconds
        return silent

    def _learn(self, rank: int, before: Heartbeat | None, after: Heartbeat) -> None:
        """Learn from a rank's progress since its heartbeat `before`; None if this is its first."""
        if after.section == "restore" and self._steps:
            self._is_changed = True
            self._longest.pop("first", None)  # the first step of another plan may compile
        if before is not None and before.section == "first" and self._is_changed:
            self._is_changed = False
            self._steps.clear()  # steps of the new plan may take longer by any factor
            self._steps.append(after.entered - before.entered)
        if before is not None and before.section in LEARNT_SECTIONS:
            seconds = after.entered - before.entered
            self._longest[before.section] = max(seconds, self._longest.get(before.section, 0.0))
        # Learn the duration of a step when the next one begins, or the wait for its data.
        # What happens inside a step, such as a copy of the state or an evaluation, is part of its duration.
        began = self._step_began.get(rank)
        if began is not None and after.section in ("step", "data") and after.step > began.step:
            # Several steps may have passed since the last poll.
            self._steps.append((after.entered - began.entered) / (after.step - began.step))
            self._step_learnt[rank] = self._step_began.pop(rank).step
            began = None
        is_new = after.step != self._step_learnt.get(rank) and (began is None or began.step != after.step)
        if after.section == "step" and is_new:
            self._step_began[rank] = after


class LocalNode:
    """The ranks of this machine. Make it in a thread that lives as long as the run: the fork server dies with it.

    `fork_server` is one that was started before and serves no run yet; without it, one is started.
    The heartbeat board and the rank memories (shared memory that outlives a rank, see `checkpoint/memory_copies.py`)
    are made for `num_ranks` ranks and live as long as this object, over all attempts and fork servers.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        num_ranks: int,
        environment: Mapping[str, str],
        faults: FaultsSection,
        name: str = "",
        fork_server: ForkServerProcess | None = None,
    ) -> None:
        self.name, self.num_ranks = name or platform.node(), num_ranks
        self._run, self._environment, self._faults = run, environment, faults
        self._board = HeartbeatBoard.make(num_ranks)
        self._rank_memories = [os.memfd_create(f"trimaran-rank-{local_rank}") for local_rank in range(num_ranks)]
        self._deadlines = Deadlines(faults)
        self._ranks: dict[int, LocalRank] = {}
        self._silent: set[tuple[int, bool]] = set()  # ranks that were reported, and whether they were stopped
        self._unreported: list[NodeEvent] = []  # of other ranks, while some were killed
        self._speed: float | None = None  # measured, and not taken yet
        self._polled = time.monotonic()
        self._use(fork_server or start_fork_server(environment))

    def _use(self, process: ForkServerProcess) -> None:
        """Bind a fork server, and make its sidecar. The ranks of a warm one do not descend from this process."""
        self._fork_server = ForkServerClient.bind(process, self._run, [self._board.fd, *self._rank_memories])
        above = process.pid if process.is_warm else None
        self._sidecar = SidecarProcess(self._run, self._environment, above=above, heartbeats=self._board.fd)

    @property
    def warm(self) -> bool:
        """Whether ranks would start at once. Only valid before the first start."""
        [*self._poll_fork_server()]
        return self._fork_server.warm or not self._fork_server.alive

    def start(self, spec: AttemptSpec) -> None:
        self._board.clear()
        self._board.first_rank = spec.first_rank
        self._deadlines.forget()
        plan = self._run.read_plan()
        # A step may take much longer than usual if its tensors are on disk.
        prediction = plan.prediction if plan.offloads_to_disk else None
        self._deadlines.expected_seconds = prediction.step_seconds if prediction else 0.0
        self._silent.clear()
        self._unreported.clear()
        self._polled = time.monotonic()
        self._ranks = {}
        self.start_ranks(spec, range(spec.first_rank, spec.first_rank + spec.num_ranks))
        self._sidecar.start(spec.node)

    def start_ranks(self, spec: AttemptSpec, ranks: Sequence[int]) -> None:
        if not self._fork_server.alive:
            self._fork_server.process.kill()
            self._sidecar.end()
            self._use(start_fork_server(self._environment))
        new = [LocalRank(rank, rank - spec.first_rank) for rank in ranks]
        self._board.clear([each.local_rank for each in new])
        self._deadlines.forget(ranks)
        self._ranks |= {each.rank: each for each in new}
        # Descriptors by their place in what the fork server got, as it has other numbers for them: the board is the
        # first, the rank memories are the others.
        descriptors = {"TRIMARAN_HEARTBEAT_FD": [0], "TRIMARAN_MEMORY_FDS": [*range(1, 1 + self.num_ranks)]}
        commands = []
        for each in new:
            environment = {  # on top of the fork server's, which has our own
                **self._changed_environment,
                "RANK": str(each.rank),
                "LOCAL_RANK": str(each.local_rank),
                "WORLD_SIZE": str(spec.world_size),
                "LOCAL_WORLD_SIZE": str(spec.num_ranks),
                "TRIMARAN_ATTEMPT": str(spec.attempt),
                "TRIMARAN_REPLICA_START": str(spec.replica_start),
                "TRIMARAN_STORE": spec.store,
                "TRIMARAN_TOKEN": spec.token,
                "TRIMARAN_FORK_SERVER": self._fork_server.process.note,
                **shared_gpu_environment(self._environment, each.rank),
                **spec.environment,
            }
            commands.append({"rank": each.rank, "environment": environment, "descriptors": descriptors})
        self._fork_server.send({"start": commands})

    def kill_ranks(self, ranks: Sequence[int]) -> None:
        found = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        self._unreported += self._kill(found)
        for each in found:
            self._ranks.pop(each.rank)
            self._silent -= {(each.rank, True), (each.rank, False)}

    @property
    def _changed_environment(self) -> dict[str, str]:
        return {name: value for name, value in self._environment.items() if os.environ.get(name) != value}

    def begin_speed(self, kind: str, *, seconds: float) -> None:
        """See `MeasurableNode`. Does nothing while ranks run."""
        if self._fork_server.alive and not self._alive():
            how = {"kind": kind, "devices": self.num_ranks, "seconds": seconds}
            self._fork_server.send({"measure": how | {"environment": self._changed_environment}})

    def take_speed(self) -> float | None:
        if not self._alive():
            self._unreported += self._poll_fork_server()
        speed, self._speed = self._speed, None
        return speed

    def poll(self) -> list[NodeEvent]:
        events = [*self._unreported, *self._poll_fork_server()]
        self._unreported.clear()
        self._sidecar.restart_if_dead()
        now, before, self._polled = time.monotonic(), self._polled, time.monotonic()
        if now - before > PAUSE_SECONDS:
            self._deadlines.note_pause(now)
        heartbeats = self.heartbeats()
        # A rank that is not forked yet waits for the fork server, which may wait for a core itself.
        server = self._fork_server.process.pid
        queued = {rank: queued_seconds(self._ranks[rank].pid or server) for rank in self._alive()}
        late = self._deadlines.overdue({rank: heartbeats[rank] for rank in self._alive()}, now, queued)
        # Ranks that a signal has stopped hang, in any section. A pause of the supervisor does not count: what stopped
        # it may have stopped the ranks, and may continue them later.
        quiet = {rank: self._deadlines.counted_silence(heartbeats[rank].alive, now) for rank in self._alive()}
        stopped = {
            rank: seconds
            for rank, seconds in quiet.items()
            if seconds > self._faults.hang_seconds and process_state(self._ranks[rank].pid) in STOPPED_STATES
        }
        silent = {(rank, rank in stopped): seconds for rank, seconds in (late | stopped).items()}
        for rank, is_stopped in silent.keys() - self._silent:
            deadline = self._faults.hang_seconds if is_stopped else self._deadlines.of(heartbeats[rank].section)
            seconds = silent[rank, is_stopped]
            events.append(
                RankSilent(
                    rank=rank, heartbeat=heartbeats[rank], seconds=seconds, deadline=deadline, stopped=is_stopped
                )
            )
        self._silent = set(silent)
        return events

    def _poll_fork_server(self, *, wait: float = 0.0) -> Iterator[NodeEvent]:
        """Yield the ends of ranks that the fork server reports. If it ended itself, all its ranks have ended."""
        running = self._fork_server.alive  # read before its events, so that those before its end are not missed
        for event in self._fork_server.receive(wait=wait):
            rank = self._ranks.get(event.get("rank", -1))
            if event["event"] == "speed":
                self._speed = event["speed"]
            if event["event"] == "started" and rank is not None:
                rank.pid = event["pid"]
            elif event["event"] == "ended" and rank is not None and rank.pid == event["pid"]:
                rank.code = event["code"]
                yield RankEnded(rank=rank.rank, code=event["code"], time=event["time"])
        if not running and self._alive():
            child = self._fork_server.process.child  # how another one ended is not known
            how = "ended" if child is None else f"exited with code {child.returncode}"
            gone = tuple(self._alive())
            for rank in self._alive().values():
                rank.code = -signal.SIGKILL
            yield NodeLost(node=self.name, what=f"the fork server {how}", ranks=gone)

    def _alive(self) -> dict[int, LocalRank]:
        return {number: rank for number, rank in self._ranks.items() if rank.code is None}

    def heartbeats(self) -> dict[int, Heartbeat]:
        return {number: self._board.read(rank.local_rank) for number, rank in self._ranks.items()}

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        """Have the ranks write their reports. Ranks that end meanwhile are returned by the next `poll`."""
        alive = [rank for rank in self._alive().values() if rank.pid]
        collect_reports(self._run, self._board, alive, folder, seconds=seconds, gently=gently)
        self._polled = time.monotonic()

    def request_stop(self) -> None:
        with contextlib.suppress(OSError):  # if the disk is full, the signal is enough
            self._run.stop_request.touch()
        self.request_leave()

    def request_leave(self) -> None:
        for rank in self._alive().values():
            if rank.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGTERM)

    def kill(self) -> None:
        self._kill([*self._ranks.values()])
        self._ranks = {}

    def _kill(self, ranks: Sequence[LocalRank]) -> list[NodeEvent]:
        """Kill these ranks, and return what happened to others meanwhile."""
        events, deadline = list[NodeEvent](), time.monotonic() + KILL_SECONDS
        killed = {rank.rank for rank in ranks}
        while time.monotonic() < deadline:
            for rank in ranks:
                if rank.pid:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(rank.pid, signal.SIGKILL)  # also the loader processes of ranks that are gone
            events += self._poll_fork_server(wait=0.02)
            if not any(rank.code is None or _exists(rank.pid) for rank in ranks):
                break
        else:
            log.error("processes of %s cannot be killed: %s", self.name, [rank.pid for rank in ranks])
        return [each for each in events if not isinstance(each, RankEnded) or each.rank not in killed]

    def close(self) -> None:
        self.kill()
        self._sidecar.end()
        self._fork_server.process.kill()
        for fd in self._rank_memories:
            os.close(fd)


def _exists(group: int) -> bool:
    """Return whether a process of this group is alive. In some containers dead processes are never reaped."""
    if not group:
        return False
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()]:
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) == group and process_state(pid) not in ENDED_STATES:
                return True
    return False


EnvironmentOf = Callable[[Plan], Mapping[str, str]]

LOOPBACK = "127.0.0.1"


class LocalNodeGroup(NodeGroup):
    """The group of one node, this machine. `lease` is that of the run; `close` ends the node."""

    def __init__(self, run: RunDirectory, lease: Lease, node: LocalNode, environment: EnvironmentOf) -> None:
        token = run_token(run)
        super().__init__(Channel(LOOPBACK, token), lease, token)
        self._node, self._environment = node, environment

    def wait_for_nodes(self) -> list[Node] | None:
        return [self._node]

    def environment(self, plan: Plan) -> Mapping[str, str]:
        return {**self._environment(plan), "TRIMARAN_TERM": str(self.lease.term)}

    def close(self) -> None:
        self._node.close()
        self.channel.close()
