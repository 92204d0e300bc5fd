"""Decides who takes part in each synchronisation of elastic replicas, and whether it counts.

The supervisor knows which replicas are alive. So it decides, and the ranks do what it writes: all of them take up the
result of an exchange, or none does.
"""

from collections.abc import Mapping

from trimaran.runs.replica_records import LAST_ROUND, Round, RoundResult, Statement, lost_key, result_key, round_key

Written = dict[str, bytes | None]
"""What to write to the store, in order; None deletes a key."""
KEPT_ROUNDS = 8  # in the store: a rank may be slow to read
MAX_FAILED_ROUNDS = 5  # in a row, although no replica was lost


class ReplicaRounds:
    """The rounds of one attempt. Methods return what to write to the store, in order.

    `members` are the replicas that train, with their starts; None before the first round. `is_stuck`: exchanges fail,
    although nobody is lost.
    """

    def __init__(self, num_replicas: int, ranks_per_replica: int) -> None:
        self.num_replicas, self._ranks_per_replica = num_replicas, ranks_per_replica
        self.starts = dict.fromkeys(range(num_replicas), 0)
        self.lost: set[int] = set()  # replicas that are not running; they may be started again
        self.members: dict[int, int] | None = None
        self.number = -1  # of the last round
        self.step = 0  # of the last round that counts
        self._open: Round | None = None
        self._num_failed = 0
        self.left: set[int] = set()  # replicas that were asked to leave, and take part no more
        self._contributors: dict[int, int] = {}  # of the last round that counts, with their starts

    @property
    def is_stuck(self) -> bool:
        return self._num_failed >= MAX_FAILED_ROUNDS

    @property
    def living_members(self) -> list[int]:
        return sorted(each for each in self.members or () if self._is_living_member(each))

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
        if self.members is None:
            return self._form(statements)
        return self._settle(self._open, statements) if self._open else self._open_round(statements)

    def _form(self, statements: Mapping[int, Statement]) -> Written:
        """Decide the first round, in which nothing is exchanged: all replicas continue from the newest state."""
        said = {each: self._said(each, statements, "join") for each in range(self.num_replicas)}
        if not all(said.values()):
            return {}
        newest = max(each[0].step for each in said.values())
        source = min(each for each, ranks in said.items() if ranks[0].step == newest)
        behind = tuple(each for each, ranks in said.items() if ranks[0].step < newest)
        first = Round(number=0, step=newest, contributors=(), joiners=behind, source=source, starts=dict(self.starts))
        self.number, self.step, self.members = 0, newest, dict(self.starts)
        result = RoundResult(ok=True, members=tuple(sorted(self.members)))
        return {round_key(0): first.encode(), result_key(0): result.encode(), LAST_ROUND: b"0"}

    def _open_round(self, statements: Mapping[int, Statement]) -> Written:
        """Open a round once all living members have arrived. Who is ready to join by then takes part."""
        assert self.members is not None
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
        is_complete = all(map(self._is_living_member, opened.contributors))
        if is_complete and not all(votes.values()) and not self._has_refused(opened, statements):
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

    def _has_refused(self, opened: Round, statements: Mapping[int, Statement]) -> bool:
        """Return whether a rank has voted that it did not get the values; the others need not wait for each other."""
        ranks = (rank for each in opened.contributors for rank in self.ranks_of(each))
        said = [statements[rank] for rank in ranks if rank in statements]
        return any(each.kind == "vote" and each.round == opened.number and not each.ok for each in said)

    def _is_living_member(self, replica: int) -> bool:
        return self.members is not None and replica in self.members and self._is_running(replica, self.members[replica])

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
