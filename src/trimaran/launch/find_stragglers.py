"""Ranks that are slower than their like, by when each of them came to each operation. Pure functions.

An operation of a group is over when the last member has come to it. What a rank took from there, or from its own last
operation, to the next one is its own time; the rest it waited for others. A rank whose own time is far above that of
all ranks that do the same work holds them up. Only ranks of one machine are compared: their clock is the same.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trimaran.launch.rank_report import RankReport

LEAST_WAIT = 0.2  # of the time: what each of the others waits because of a straggler
MOST_WAIT = 0.25  # of that: what the straggler itself waits
FEWEST = 12  # arrivals of a rank in the window
Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds the others up: `slowdown` is how many times as long everything takes because of it, `waiting`
    the share of the time that those who do the same work wait."""

    rank: int
    slowdown: float
    waiting: float

    @property
    def facts(self) -> list[str]:
        return [f"the ranks that do the same work wait {self.waiting:.0%} of the time, and it waits for nobody"]


@dataclass(frozen=True, slots=True)
class OperationArrival:
    """When a rank came to an operation, which it was, of what kind, and who takes part."""

    time: float
    key: Kind
    kind: Kind
    members: tuple[int, ...]


def find_stragglers(reports: Mapping[int, RankReport], *, since: float = 0.0) -> list[Straggler]:
    """Return the ranks that hold the others up, judged by what they did since a moment, in seconds since the epoch.

    A few hundred operations of each rank are known; what was before is not seen.
    """
    hosts: dict[str, list[RankReport]] = defaultdict(list)
    for each in reports.values():
        if each.answered:
            hosts[each.moment.host].append(each)
    return [found for group in hosts.values() if len(group) > 1 for found in _find(group, since)]


def is_starved(found: Straggler, before: Mapping[int, RankReport], after: Mapping[int, RankReport]) -> bool:
    """Whether a rank was slow between two rank reports only because it got less of busy cores than its like did.

    Then the machine is short of cores, and the next time another rank is unlucky.
    """
    shares = {
        rank: (each.moment.starved - before[rank].moment.starved)
        / max(1e-9, each.moment.time - before[rank].moment.time)
        for rank, each in after.items()
        if each.moment.host == after[found.rank].moment.host and rank in before
    }
    others = [share for rank, share in shares.items() if rank != found.rank]
    return found.waiting - (shares[found.rank] - min(others)) < LEAST_WAIT


def own_seconds(arrivals: Mapping[int, Sequence[OperationArrival]], begin: float, end: float) -> dict[int, float]:
    """Return what each rank needed for itself between two moments."""
    over = _completions(arrivals)
    unwaited = _unwaited(arrivals, over)
    return {rank: sum(_own(each, over, unwaited, begin, end)) for rank, each in arrivals.items()}


def _find(group: Sequence[RankReport], since: float) -> list[Straggler]:
    arrivals = {each.rank: _arrivals(each) for each in group}
    if not all(arrivals.values()):
        return []
    begin = max(since, *(each[0].time for each in arrivals.values()))
    end = min(each[-1].time for each in arrivals.values())
    times = [[each.time for each in of_rank if begin <= each.time <= end] for of_rank in arrivals.values()]
    if any(len(each) < FEWEST for each in times):
        return []
    middle = max(each[len(each) // 2] for each in times)  # an arrival, so that no single pause lies in both halves
    whole, *halves = (_waits(arrivals, *span) for span in ((begin, end), (begin, middle), (middle, end)))
    found: list[Straggler] = []
    for role in _roles(group):
        for rank in role:
            others = [other for other in role if other != rank]
            # Less clearly, but in both halves too: a pause is no slowness.
            if others and _holds_up(rank, others, whole) and all(_holds_up(rank, others, half, 2.0) for half in halves):
                waiting = min(whole[other] for other in others)
                found.append(Straggler(rank=rank, slowdown=1 / (1 - waiting), waiting=waiting))
    return found


def _holds_up(rank: int, others: Sequence[int], waits: Mapping[int, float], slack: float = 1.0) -> bool:
    least = min(waits[other] for other in others)
    return least * slack >= LEAST_WAIT and waits[rank] <= MOST_WAIT * slack * least


def _waits(arrivals: Mapping[int, Sequence[OperationArrival]], begin: float, end: float) -> dict[int, float]:
    """Return which share of the time each rank waited for others."""
    return {rank: 1 - own / (end - begin) for rank, own in own_seconds(arrivals, begin, end).items()}


def _arrivals(report: RankReport) -> list[OperationArrival]:
    """Return what a rank came to, in order. Message n from one rank to another is an operation of the two."""
    rank = report.rank
    found = [
        OperationArrival(
            each.time, (each.group, each.number), (each.group, each.op, each.sizes), report.groups[each.group]
        )
        for each in report.operations
        if each.group in report.groups
    ]
    for each in report.messages:
        ends = (rank, each["peer"]) if each["op"] == "send" else (each["peer"], rank)
        found.append(OperationArrival(each["time"], (*ends, each["number"]), (*ends, each["op"]), ends))
    return sorted(found, key=lambda each: each.time)


def _completions(arrivals: Mapping[int, Sequence[OperationArrival]]) -> dict[Kind, float]:
    """Return when each operation's last member came to it; operations that some of them are not known to be at, not."""
    seen: dict[Kind, list[float]] = defaultdict(list)
    members: dict[Kind, tuple[int, ...]] = {}
    for each in (arrival for of_rank in arrivals.values() for arrival in of_rank):
        seen[each.key].append(each.time)
        members[each.key] = each.members
    here = arrivals.keys()
    return {key: max(times) for key, times in seen.items() if len(times) == len(here & set(members[key]))}


def _unwaited(arrivals: Mapping[int, Sequence[OperationArrival]], over: Mapping[Kind, float]) -> set[tuple[Kind, Kind]]:
    """Return pairs of kinds (first, next) where a rank came to the next before the first was over: it does not wait."""
    pairs: set[tuple[Kind, Kind]] = set()
    for of_rank in arrivals.values():
        unfinished: list[OperationArrival] = []
        for each in of_rank:
            unfinished = [first for first in unfinished if over[first.key] > each.time]
            pairs |= {(first.kind, each.kind) for first in unfinished}
            if each.key in over:
                unfinished.append(each)
    return pairs


def _own(
    of_rank: Sequence[OperationArrival],
    over: Mapping[Kind, float],
    unwaited: set[tuple[Kind, Kind]],
    begin: float,
    end: float,
) -> Iterator[float]:
    """Yield, for each arrival in time, what the rank took to get there after all that it waited for was over."""
    recent: dict[Kind, float] = {}  # when the last operation of each kind was over
    last = of_rank[0]
    for each in of_rank[1:]:
        if last.key in over:
            recent[last.kind] = over[last.key]
        waited = (time for kind, time in recent.items() if time <= each.time and (kind, each.kind) not in unwaited)
        start = max(last.time, max(waited, default=last.time), begin)
        yield max(0.0, min(each.time, end) - start)
        last = each


def _roles(group: Sequence[RankReport]) -> list[list[int]]:
    """Return the ranks that do the same work: the same kinds of operations, with as many others, to the same sides."""
    roles: dict[frozenset[Kind], list[int]] = defaultdict(list)
    for each in group:
        calls: set[Kind] = {(op.op, len(each.groups.get(op.group, ()))) for op in each.operations}
        calls |= {(message["op"], message["peer"] > each.rank) for message in each.messages}
        roles[frozenset(calls)].append(each.rank)
    return list(roles.values())
