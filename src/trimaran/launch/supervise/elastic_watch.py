"""Watches an attempt of elastic replicas: the others go on when one is lost, and it is started again beside them.

The supervisor knows which replicas are alive. So it decides who takes part in each synchronisation and whether it
counts, and the ranks do what it writes: all of them take up the result of an exchange, or none does.
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_USER, Cause, Incident
from trimaran.launch.supervise.attempt_watch import LAST_EVENT_SECONDS, SHORT_SECTIONS, AttemptWatch
from trimaran.launch.supervise.attribution import read_exit
from trimaran.launch.supervise.investigate import headline
from trimaran.launch.supervise.node import AttemptSpec, Node, NodeGroup
from trimaran.runs import AttemptOutcome, Heartbeat, IncidentLog, RunDirectory
from trimaran.runs.replica_records import (
    LAST_ROUND,
    STATEMENTS,
    Round,
    RoundResult,
    Statement,
    lost_key,
    result_key,
    round_key,
)

log = logging.getLogger(__name__)

Written = dict[str, bytes | None]
"""What to write to the store, in order; None deletes a key."""
KEPT_ROUNDS = 8  # in the store: a rank may be slow to read
MAX_FAILED_ROUNDS = 5  # in a row, although no replica was lost


class ReplicaRounds:
    """The rounds of one attempt. Methods return what to write to the store, in order."""

    def __init__(self, num_replicas: int, ranks_per_replica: int) -> None:
        self.num_replicas, self._ranks_per_replica = num_replicas, ranks_per_replica
        self.starts = dict.fromkeys(range(num_replicas), 0)
        self.lost: set[int] = set()  # replicas that are not running; they may be started again
        self.members: dict[int, int] | None = None  # that train, with their starts; None before the first round
        self.number = -1  # of the last round
        self.step = 0  # of the last round that counts
        self._open: Round | None = None
        self._num_failed = 0
        self.left: set[int] = set()  # replicas that were asked to leave, and take part no more
        self._contributors: dict[int, int] = {}  # of the last round that counts, with their starts

    @property
    def is_stuck(self) -> bool:
        """Whether exchanges fail, although nobody is lost."""
        return self._num_failed >= MAX_FAILED_ROUNDS

    @property
    def living_members(self) -> list[int]:
        return sorted(each for each, start in (self.members or {}).items() if self._is_running(each, start))

    def has_contributed(self, replica: int) -> bool:
        """Return whether a replica, as it was last started, contributed to the last round that counts."""
        return self._contributors.get(replica) == self.starts[replica] and replica not in self.lost

    def ranks_of(self, replica: int) -> range:
        return range(replica * self._ranks_per_replica, (replica + 1) * self._ranks_per_replica)

    def replica_of(self, rank: int) -> int:
        return rank // self._ranks_per_replica

    def lose(self, replica: int) -> Written:
        """Note that a replica is not running any more."""
        self.lost.add(replica)
        self._num_failed = 0
        return {lost_key(replica, self.starts[replica]): b"1"}

    def start_again(self, replica: int) -> int:
        """Note that a lost replica is started again; return the number of this start."""
        assert replica in self.lost
        self.lost.discard(replica)
        self.left.discard(replica)
        self.starts[replica] += 1
        return self.starts[replica]

    def poll(self, statements: Mapping[int, Statement]) -> Written:
        """Decide what can be decided now, from the last statement of each rank."""
        written: Written = {}
        while new := self._decide(statements):
            written |= new
        return written

    def _decide(self, statements: Mapping[int, Statement]) -> Written:
        if self.members is None:  # the first round, in which nothing is exchanged: all continue from the newest state
            said = {each: self._said(each, statements, "join") for each in range(self.num_replicas)}
            if not all(said.values()):
                return {}
            newest = max(each[0].step for each in said.values())
            source = min(each for each, ranks in said.items() if ranks[0].step == newest)
            behind = tuple(each for each, ranks in said.items() if ranks[0].step < newest)
            first = Round(
                number=0, step=newest, contributors=(), joiners=behind, source=source, starts=dict(self.starts)
            )
            self.number, self.step, self.members = 0, newest, dict(self.starts)
            result = RoundResult(ok=True, members=tuple(sorted(self.members)))
            return {round_key(0): first.encode(), result_key(0): result.encode(), LAST_ROUND: b"0"}
        if self._open:
            return self._settle(self._open, statements)
        # Open a round once all living members have arrived. Who is ready to join by then takes part.
        living = self.living_members
        arrived = {each: self._said(each, statements, "arrive", self.number) for each in living}
        if not living or not all(arrived.values()):
            return {}
        steps = {rank.step for ranks in arrived.values() for rank in ranks}
        assert len(steps) == 1, f"replicas arrived after different numbers of steps: {sorted(steps)}"
        others = [each for each in range(self.num_replicas) if each not in self.lost and each not in living]
        joiners = tuple(each for each in others if self._said(each, statements, "join"))
        leaving = tuple(each for each, ranks in arrived.items() if any(rank.leave for rank in ranks))
        # If nobody would stay, the run stops, with a checkpoint.
        stop = any(rank.stop for ranks in arrived.values() for rank in ranks) or len(leaving) == len(living)
        self.number += 1
        self._open = Round(
            number=self.number,
            step=steps.pop(),
            contributors=tuple(living),
            joiners=joiners,
            source=living[0],
            starts={each: self.starts[each] for each in (*living, *joiners)},
            stop=stop,
            leaving=() if stop else leaving,
            save=any(rank.save for rank in arrived[living[0]]),
            lines={each: ranks[0].lines for each, ranks in arrived.items()},
        )
        old = self.number - KEPT_ROUNDS
        written: Written = {round_key(self.number): self._open.encode(), LAST_ROUND: str(self.number).encode()}
        return written | {round_key(old): None, result_key(old): None}

    def _settle(self, opened: Round, statements: Mapping[int, Statement]) -> Written:
        """Decide whether a round counts, once all have voted or one of them is lost."""
        votes = {each: self._said(each, statements, "vote", opened.number) for each in opened.contributors}
        is_complete = {*opened.contributors} <= {*self.living_members}
        # If one rank has voted that it did not get the values, the others need not wait for each other.
        ranks = (rank for each in opened.contributors for rank in self.ranks_of(each))
        said = [statements[rank] for rank in ranks if rank in statements]
        is_refused = any(each.kind == "vote" and each.round == opened.number and not each.ok for each in said)
        if is_complete and not all(votes.values()) and not is_refused:
            return {}
        ok = is_complete and all(rank.ok for ranks in votes.values() for rank in ranks) and all(votes.values())
        self._open = None
        if ok:
            joined = [each for each in opened.joiners if self._is_running(each, opened.starts[each])]
            staying = [each for each in opened.contributors if each not in opened.leaving]
            self.members = {each: opened.starts[each] for each in (*staying, *joined)}
            self.left |= {*opened.leaving}
            self.step, self._num_failed = opened.step, 0
            self._contributors = {each: opened.starts[each] for each in opened.contributors}
        elif is_complete:
            self._num_failed += 1
        members = tuple(sorted(self.members or ())) if ok else tuple(self.living_members)
        return {result_key(opened.number): RoundResult(ok=ok, members=members).encode()}

    def _is_running(self, replica: int, start: int) -> bool:
        return replica not in self.lost and self.starts[replica] == start

    def _said(
        self, replica: int, statements: Mapping[int, Statement], kind: str, number: int | None = None
    ) -> list[Statement]:
        """Return the statements of all ranks of a replica if they are of this kind, and about this round; else none."""
        said = [statements[rank] for rank in self.ranks_of(replica) if rank in statements]
        current = [each for each in said if each.kind == kind and each.start == self.starts[replica]]
        current = [each for each in current if number is None or each.round == number]
        return current if len(current) == self._ranks_per_replica else []


MAX_LOSSES = 3  # of a replica before it contributes again; then it is not started any more
LEAVE_SECONDS = 10.0  # for the ranks of a replica that leaves to end, after its last synchronisation
PAUSE_SECONDS = 1.0  # before a second start without having contributed; doubled each time


@dataclass(slots=True)
class LostReplica:
    """A replica that is not running, or has not contributed since."""

    incident: Incident
    since: float
    count: int  # losses since it last contributed
    due: float
    is_back: bool = False  # it takes part again


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFault:
    """Why a replica is lost. `ranks` are those at fault."""

    cause: Cause
    what: str
    ranks: tuple[int, ...]


class ElasticWatch(AttemptWatch):
    """See `AttemptWatch`. A fault of a replica is no trouble of the attempt, as long as another replica trains.

    Until the first round all replicas must start. A configuration error is always trouble. `restart`: a replica that is
    lost is started again.
    """

    def __init__(
        self,
        run: RunDirectory,
        nodes: Sequence[Node],
        spec: AttemptSpec,
        *,
        num_replicas: int,
        restart: bool,
        incidents: IncidentLog,
        group: NodeGroup,
    ) -> None:
        self._restart, self._incidents, self._group = restart, incidents, group
        self.rounds = ReplicaRounds(num_replicas, spec.world_size // num_replicas)
        self._unwritten: Written = {}
        self._statements: dict[str, tuple[bytes, Statement]] = {}
        self._gone: dict[int, LostReplica] = {}
        self._left_at: dict[int, float] = {}  # when replicas that were asked to leave had their last synchronisation
        self._asked_to_leave: list[Node] = []
        self._let_go: list[Node] = []  # of these, those without ranks
        # When each was started again, and how many errors were known then.
        self._started = dict.fromkeys(range(num_replicas), (0.0, 0))
        super().__init__(run, nodes, spec)
        self.lead_ranks = tuple(self.rounds.ranks_of(each)[0] for each in range(num_replicas))
        firsts = [0]
        for node in nodes:
            firsts.append(min(spec.world_size, firsts[-1] + node.num_ranks))
        self._ranges = [range(firsts[number], firsts[number + 1]) for number in range(len(nodes))]

    def _finished_step(self, heartbeats: Mapping[int, Heartbeat]) -> int:
        if self.rounds.members is None:
            return super()._finished_step(heartbeats)
        ranks = [rank for each in self.rounds.living_members for rank in self.rounds.ranks_of(each)]
        return min((heartbeats[rank].step for rank in ranks if rank in heartbeats), default=0)

    def _outcome(self, heartbeats: Mapping[int, Heartbeat]) -> AttemptOutcome | None:
        if self.rounds.members is None:
            self._decide_rounds()
            return super()._outcome(heartbeats)
        self.ended = {
            rank: each
            for rank, each in self.ended.items()
            if each.time >= self._started[self.rounds.replica_of(rank)][0]
        }
        living = self.rounds.living_members
        # What another replica cannot do better: a user's mistake, or the last checkpoint, which the disk did not take.
        final = [
            rank
            for rank, each in self.ended.items()
            if each.code == EXIT_USER or (each.code == EXIT_AGAIN and (rank, "error") in self._written)
        ]
        if any(self.rounds.replica_of(rank) in living for rank in final):
            return "trouble"
        faults = self._faults(heartbeats)
        if {*faults} >= {*living}:
            return "trouble"  # nobody is left to go on; the usual investigation sees all faults
        for replica, fault in faults.items():
            self._lose(replica, fault, heartbeats)
        self.lost = []
        self._note_left()
        # Put nodes that have joined in the place of those that are gone.
        gone = [number for number, node in enumerate(self.nodes) if _is_gone(node)]
        joined = self._group.joined(self.nodes) if gone else []
        for number in gone:
            fitting = [node for node in joined if node.num_ranks >= len(self._ranges[number])]
            if fitting:
                self.nodes = [*self.nodes[:number], fitting[0], *self.nodes[number + 1 :]]
                joined.remove(fitting[0])
                for rank in self._ranges[number]:
                    if lost := self._gone.get(self.rounds.replica_of(rank)):
                        lost.due = min(lost.due, time.monotonic())
                log.info("%s takes the place of a node that was lost", fitting[0].name)
        # Start lost replicas again whose nodes are there.
        now = time.monotonic()
        for replica in sorted(self.rounds.lost):
            loss, parts = self._gone[replica], self._parts(replica)
            may_start = self._restart and loss.count <= MAX_LOSSES and now >= loss.due and not self.is_saved
            if not may_start or any(_is_gone(node) or node in self._asked_to_leave for node, _ in parts):
                continue
            number = self.rounds.start_again(replica)
            self._started[replica] = now, len(self.of_kind("error"))
            for node, ranks in parts:
                here = self._ranges[self.nodes.index(node)]
                spec = replace(self.spec, first_rank=here.start, num_ranks=len(here), replica_start=number)
                node.start_ranks(spec, ranks)
            log.info("replica %d is started again", replica)
        self._decide_rounds()
        # Write the cost of a loss once the replica takes part again.
        for replica, loss in [*self._gone.items()]:
            if replica in self.rounds.living_members and not loss.is_back:
                loss.is_back = True
                cost = {"seconds_to_recover": round(time.monotonic() - loss.since, 3), "lost_steps": 0.0}
                evidence = loss.incident.evidence | {"joined_at_step": self.rounds.step}
                self._incidents.amend(loss.incident, cost=loss.incident.cost | cost, evidence=evidence)
            if self.rounds.has_contributed(replica):
                del self._gone[replica]
        if self.rounds.is_stuck:
            return "trouble"
        # The attempt is over if all replicas that trained have ended well; others are not waited for.
        ranks = [rank for each in self.rounds.living_members for rank in self.rounds.ranks_of(each)]
        ended = [self.ended[rank] for rank in ranks if rank in self.ended]
        if len(ended) < len(ranks) or not all(map(self._has_last_event, ended)):
            return None
        return "done" if {each.code for each in ended} == {EXIT_DONE} else "stopped"

    def let_leave(self, names: Sequence[str]) -> list[str]:
        """Ask the replicas on these nodes to leave at their next synchronisation; the others go on.

        Returns the nodes for which that is not possible, because nobody would be left: then all have to stop.
        """
        nodes = [(node, here) for node, here in zip(self.nodes, self._ranges, strict=True) if node.name in names]
        leaving = {self.rounds.replica_of(rank) for _, here in nodes for rank in here}
        if nodes and leaving >= {*self.rounds.living_members}:
            return [*names]
        for node, _ in nodes:
            if node not in self._asked_to_leave:
                self._asked_to_leave.append(node)
                node.request_leave()
        return []

    def _note_left(self) -> None:
        """File an incident for a replica that has left, and let nodes go whose replicas have all left."""
        now = time.monotonic()
        for replica in sorted(self.rounds.left - self.rounds.lost):
            ranks, since = self.rounds.ranks_of(replica), self._left_at.setdefault(replica, now)
            if now < since + LEAVE_SECONDS and not all(rank in self.ended for rank in ranks):
                continue
            self._unwritten |= self.rounds.lose(replica)
            self._kill(replica)  # nothing is left of it, as a rule
            what = f"replica {replica} was asked to stop and has left; the others continue"
            evidence = {"replica": replica, "last_synchronisation": self.rounds.step}
            known = {"attempt": self.spec.attempt, "step": self.highest_step, "cost": {"lost_steps": 0.0}}
            incident = self._incidents.notice("preempted", what, action="continued", evidence=evidence, **known)
            log.warning("%s", headline(incident))
            # It is started again only on another node.
            self._gone[replica] = LostReplica(incident, now, 0, due=math.inf)
            del self._left_at[replica]
        for node, here in zip(self.nodes, self._ranges, strict=True):
            is_idle = all(self.rounds.replica_of(rank) in self.rounds.lost for rank in here)
            if is_idle and node in self._asked_to_leave and node not in self._let_go:
                self._let_go.append(node)
                node.kill()  # its supervisor, which was asked to stop, ends when it has no ranks

    def _faults(self, heartbeats: Mapping[int, Heartbeat]) -> dict[int, ReplicaFault]:
        """Return the faults of replicas that are running: lost nodes, hung ranks and unexpected exits."""
        found: dict[int, ReplicaFault] = {}
        for event in self.lost:
            for rank in event.ranks:
                fault = ReplicaFault(cause="host", what=f"{event.node} was lost: {event.what}", ranks=event.ranks)
                found.setdefault(self.rounds.replica_of(rank), fault)
        self.silent = {
            rank: each
            for rank, each in self.silent.items()
            if rank in heartbeats and heartbeats[rank].entered <= each.heartbeat.entered
        }
        for rank, each in self.silent.items():
            replica = self.rounds.replica_of(rank)
            # It does not hang while it waits for a rank of its replica that is busy.
            waits = any(
                heartbeats[other].section not in SHORT_SECTIONS and heartbeats[other].step <= each.heartbeat.step
                for other in self.rounds.ranks_of(replica)
                if other in heartbeats and other not in self.silent and other not in self.ended
            )
            if each.stopped or not waits:
                what = f"rank {rank} hung for {each.seconds:.0f} s"
                found.setdefault(replica, ReplicaFault(cause="hang", what=what, ranks=(rank,)))
        for ended in self.unexpected_exits(grace_seconds=LAST_EVENT_SECONDS):
            num_earlier = self._started[self.rounds.replica_of(ended.rank)][1]
            errors = [each for each in self.of_kind("error")[num_earlier:] if each["rank"] == ended.rank]
            why = read_exit(ended.code, errors[-1]["data"] if errors else None, "", oom_killed=self.oom_killed)
            fault = ReplicaFault(cause=why.cause, what=f"rank {ended.rank} {why.what}", ranks=(ended.rank,))
            if why.primary or self.rounds.replica_of(ended.rank) not in found:
                found[self.rounds.replica_of(ended.rank)] = fault
        return {each: fault for each, fault in found.items() if each not in self.rounds.lost | self.rounds.left}

    def _lose(self, replica: int, fault: ReplicaFault, heartbeats: Mapping[int, Heartbeat]) -> None:
        """End what is left of a replica, tell the others, and file an incident."""
        ranks, before = self.rounds.ranks_of(replica), self._gone.get(replica)
        self._unwritten |= self.rounds.lose(replica)
        self._decide_rounds()  # those who exchange with it wait for this
        self._kill(replica)
        reached = max((heartbeats[rank].step for rank in ranks if rank in heartbeats), default=0)
        count = before.count + 1 if before else 1
        what = f"replica {replica} was lost: {fault.what}; the others continue"
        evidence = {"replica": replica, "step_of_replica": reached, "last_synchronisation": self.rounds.step}
        if not self._restart or count > MAX_LOSSES:
            evidence |= {"why": f"it is not started again: it was lost {count} times without contributing"}
        known = {"attempt": self.spec.attempt, "step": self.highest_step, "suspects": fault.ranks}
        incident = self._incidents.notice(fault.cause, what, action="continued", evidence=evidence, **known)
        log.warning("%s", headline(incident))
        now = time.monotonic()
        pause = PAUSE_SECONDS * 2 ** (count - 2) if count > 1 else 0.0
        self._gone[replica] = LostReplica(incident, now, count, due=now + pause)

    def _kill(self, replica: int) -> None:
        for node, here in self._parts(replica):
            if not _is_gone(node):
                node.kill_ranks(here)
        for rank in self.rounds.ranks_of(replica):
            self.ended.pop(rank, None)
            self.silent.pop(rank, None)

    def _parts(self, replica: int) -> list[tuple[Node, list[int]]]:
        ranks = {*self.rounds.ranks_of(replica)}
        parts = zip(self.nodes, self._ranges, strict=True)
        return [(node, sorted(ranks & {*here})) for node, here in parts if ranks & {*here}]

    def _decide_rounds(self) -> None:
        written, self._unwritten = self._unwritten, {}
        exchange = partial(self._group.channel.exchange_keys, self.spec.attempt, STATEMENTS)
        found = exchange(written)
        for key, value in found.items():
            if key not in self._statements or self._statements[key][0] != value:
                self._statements[key] = value, Statement.decode(value)
        said = {int(key.removeprefix(STATEMENTS)): each for key, (_, each) in self._statements.items()}
        if decided := self.rounds.poll(said):
            exchange(decided)


def _is_gone(node: Node) -> bool:
    """Return whether a node no longer answers; that of the coordinator itself always does."""
    return bool(getattr(node, "lost", ""))
