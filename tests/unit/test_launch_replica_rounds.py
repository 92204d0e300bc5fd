"""Who takes part in each round of elastic replicas, and which rounds count."""

from typing import Any

import pytest

from trimaran.launch import KEPT_ROUNDS, MAX_FAILED_ROUNDS, ReplicaRounds
from trimaran.runs import Round, RoundResult, Statement, lost_key, result_key, round_key


class Replicas:
    """Replicas of two ranks each, that say what a test lets them say."""

    def __init__(self, num: int = 3, *, formed: bool = True) -> None:
        self.rounds = ReplicaRounds(num, 2)
        self.said: dict[int, Statement] = {}
        self.store: dict[str, bytes | None] = {}
        if formed:
            self.joining(*range(num))

    def write(self, written: dict[str, bytes | None]) -> None:
        self.store |= written

    def poll(self) -> None:
        self.write(self.rounds.poll(self.said))

    def say(self, replica: int, statement: Statement) -> None:
        for rank in self.rounds.ranks_of(replica):
            self.said[rank] = statement

    def joining(self, *replicas: int, step: int = 0) -> None:
        for each in replicas:
            self.say(each, Statement(kind="join", start=self.rounds.starts[each], step=step))
        self.poll()

    def arrive(self, *replicas: int, step: int, **fields: Any) -> None:
        for each in replicas:
            start = self.rounds.starts[each]
            self.say(each, Statement(kind="arrive", start=start, step=step, round=self.rounds.number, **fields))
        self.poll()

    def vote(self, *replicas: int, ok: bool = True) -> None:
        for each in replicas:
            start, number = self.rounds.starts[each], self.rounds.number
            self.say(each, Statement(kind="vote", start=start, round=number, ok=ok))
        self.poll()

    def lose(self, replica: int) -> None:
        self.write(self.rounds.lose(replica))
        self.poll()

    def opened(self) -> Round | None:
        value = self.store.get(round_key(self.rounds.number))
        return Round.decode(value) if value else None

    def result(self) -> RoundResult | None:
        value = self.store.get(result_key(self.rounds.number))
        return RoundResult.decode(value) if value else None


def test_all_replicas_start_from_the_newest_state() -> None:
    each = Replicas(formed=False)
    each.joining(0, 1, step=10)
    assert each.opened() is None
    each.joining(2, step=20)
    opened = each.opened()
    assert opened is not None
    assert (opened.step, opened.source, opened.joiners, opened.contributors) == (20, 2, (0, 1), ())
    assert each.result() == RoundResult(ok=True, members=(0, 1, 2))


def test_a_round_counts_when_all_ranks_have_all_values() -> None:
    each = Replicas()
    each.arrive(0, 1, step=5)
    assert each.rounds.number == 0
    each.arrive(2, step=5)
    opened = each.opened()
    assert opened is not None
    assert opened.contributors == (0, 1, 2)
    each.vote(0, 1)
    assert each.result() is None
    each.vote(2)
    assert each.result() == RoundResult(ok=True, members=(0, 1, 2))
    assert each.rounds.step == 5


def test_a_replica_lost_before_the_round_is_not_waited_for() -> None:
    each = Replicas()
    each.arrive(0, 2, step=5)
    each.lose(1)
    assert each.store[lost_key(1, 0)]
    opened = each.opened()
    assert opened is not None
    assert opened.contributors == (0, 2)


def test_a_replica_lost_during_the_exchange_makes_the_others_repeat_it() -> None:
    each = Replicas()
    each.arrive(0, 1, 2, step=5)
    each.vote(0, 1)  # they even have all values
    each.lose(2)
    assert each.result() == RoundResult(ok=False, members=(0, 1))
    assert each.rounds.step == 0
    each.arrive(0, step=5)
    assert each.rounds.number == 1
    each.arrive(1, step=5)
    opened = each.opened()
    assert opened is not None
    assert (opened.number, opened.contributors) == (2, (0, 1))
    each.vote(0, 1)
    assert each.result() == RoundResult(ok=True, members=(0, 1))


def test_a_replica_lost_after_its_vote_but_before_the_result_does_not_count() -> None:
    each = Replicas(2)
    each.arrive(0, 1, step=5)
    each.vote(1)
    each.lose(1)
    assert each.result() == RoundResult(ok=False, members=(0,))


def test_the_last_replica_goes_on_alone_and_others_join() -> None:
    each = Replicas()
    each.lose(0)
    each.lose(2)
    each.arrive(1, step=5)
    each.vote(1)
    assert each.result() == RoundResult(ok=True, members=(1,))
    assert each.rounds.start_again(0) == 1
    each.joining(0)
    each.arrive(1, step=10)
    opened = each.opened()
    assert opened is not None
    assert (opened.contributors, opened.joiners, opened.source) == ((1,), (0,), 1)
    each.vote(1)
    assert each.result() == RoundResult(ok=True, members=(0, 1))
    assert not each.rounds.has_contributed(0)
    each.arrive(1, step=15)
    assert each.rounds.number == 2
    each.arrive(0, step=15)
    each.vote(0, 1)
    assert each.rounds.has_contributed(0)


def test_who_is_lost_while_it_joins_is_no_member() -> None:
    each = Replicas()
    each.lose(2)
    each.rounds.start_again(2)
    each.joining(2)
    each.arrive(0, 1, step=5)
    each.lose(2)
    each.vote(0, 1)
    assert each.result() == RoundResult(ok=True, members=(0, 1))


def test_what_an_earlier_start_said_does_not_count() -> None:
    each = Replicas(2)
    each.arrive(0, 1, step=5)
    each.vote(0, 1)
    each.lose(1)
    each.rounds.start_again(1)  # its last words are a vote
    each.arrive(0, step=10)
    opened = each.opened()
    assert opened is not None
    assert (opened.contributors, opened.joiners) == ((0,), ())


def test_a_stop_of_any_and_a_save_of_the_first_are_for_all() -> None:
    each = Replicas()
    each.arrive(0, step=5)
    each.arrive(1, step=5, stop=True, save=True)
    each.arrive(2, step=5)
    opened = each.opened()
    assert opened is not None
    assert (opened.stop, opened.save) == (True, False)


def test_exchanges_that_fail_although_nobody_is_lost_are_not_repeated_forever() -> None:
    each = Replicas(2)
    for _ in range(MAX_FAILED_ROUNDS):
        assert not each.rounds.is_stuck
        each.arrive(0, 1, step=5)
        each.vote(0, ok=False)
        assert each.result() == RoundResult(ok=False, members=(0, 1))
    assert each.rounds.is_stuck


def test_replicas_after_different_steps_are_a_mistake_of_ours() -> None:
    each = Replicas(2)
    each.arrive(0, step=5)
    with pytest.raises(AssertionError, match="different numbers of steps"):
        each.arrive(1, step=10)


def test_old_rounds_leave_the_store() -> None:
    each = Replicas(2)
    for number in range(KEPT_ROUNDS + 3):
        each.arrive(0, 1, step=number)
        each.vote(0, 1)
    kept = [key for key, value in each.store.items() if value is not None and key.startswith("replicas/round/")]
    assert len(kept) == KEPT_ROUNDS


def test_a_replica_that_is_asked_to_leave_contributes_once_more_and_the_others_go_on() -> None:
    each = Replicas()
    each.arrive(0, 2, step=5, save=True)
    each.arrive(1, step=5, leave=True)
    opened = each.opened()
    assert opened is not None
    assert (opened.contributors, opened.leaving, opened.stop, opened.save) == ((0, 1, 2), (1,), False, True)
    each.vote(0, 1, 2)
    result = each.result()
    assert result is not None
    assert (result.ok, result.members) == (True, (0, 2))
    assert each.rounds.left == {1}
    each.arrive(0, 2, step=10)
    opened = each.opened()
    assert opened is not None
    assert opened.contributors == (0, 2)
    each.vote(0, 2)
    each.lose(1)  # its processes have ended
    each.rounds.start_again(1)
    assert each.rounds.left == set()
    each.joining(1)
    each.arrive(0, 2, step=15)
    opened = each.opened()
    assert opened is not None
    assert (opened.contributors, opened.joiners) == ((0, 2), (1,))


def test_if_all_are_asked_to_leave_the_run_stops() -> None:
    each = Replicas(2)
    each.arrive(0, 1, step=5, leave=True)
    opened = each.opened()
    assert opened is not None
    assert (opened.stop, opened.leaving) == (True, ())


def test_a_replica_that_is_lost_while_it_leaves_is_a_lost_one() -> None:
    each = Replicas()
    each.arrive(0, 2, step=5)
    each.arrive(1, step=5, leave=True)
    each.lose(1)  # before its vote
    result = each.result()
    assert result is not None
    assert not result.ok
    assert each.rounds.left == set()
    each.arrive(0, 2, step=5)
    opened = each.opened()
    assert opened is not None
    assert (opened.contributors, opened.leaving) == ((0, 2), ())
