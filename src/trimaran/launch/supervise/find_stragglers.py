"""Finds stragglers: ranks that hold up others with the same work, by when each rank arrived at each operation.

An operation of a group is complete when the last member has arrived. The time from there, or from a rank's own last
operation, to its next arrival is the rank's busy time; the rest is waiting. A rank that waits far less than all ranks
with the same work holds them up. Only ranks of one machine are compared, because they share a clock. Pure functions.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trimaran.launch.supervise.rank_report import RankReport

MIN_WAIT_FRACTION = 0.2  # of the time: each of the other ranks waits at least this long for a straggler
MAX_STRAGGLER_WAIT = 0.25  # the straggler waits at most this fraction of what the others wait
MIN_ARRIVALS = 12  # of each rank in the window
Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds up the others. `slowdown`: steps take this many times as long because of it. `waiting`: the
    fraction of the time that the ranks with the same work wait."""

    rank: int
    slowdown: float
    waiting: float

    @property
    def facts(self) -> list[str]:
        return [f"the ranks with the same work wait {self.waiting:.0%} of the time, and this rank does not wait"]


@dataclass(frozen=True, slots=True)
class OperationArrival:
    """When a rank arrived at an operation, which one (`key`), its kind and the group's members."""

    time: float
    key: Kind
    kind: Kind
    members: tuple[int, ...]


def find_stragglers(reports: Mapping[int, RankReport], *, since: float = 0.0) -> list[Straggler]:
    """Return the ranks that held up the others after `since`, in seconds since the epoch.

    A report contains the last few hundred operations of its rank; earlier ones are not seen.
    """
    hosts: dict[str, list[RankReport]] = defaultdict(list)
    for each in reports.values():
        if each.answered:
            hosts[each.moment.host].append(each)
    return [straggler for group in hosts.values() if len(group) > 1 for straggler in _find(group, since)]


def is_starved(straggler: Straggler, before: Mapping[int, RankReport], after: Mapping[int, RankReport]) -> bool:
    """Return whether a rank was slow between two reports only because it got less of busy cores than the others.

    Then the machine has too few cores, and the next time another rank may be slow.
    """
    fractions = {
        rank: (each.moment.starved - before[rank].moment.starved)
        / max(1e-9, each.moment.time - before[rank].moment.time)
        for rank, each in after.items()
        if each.moment.host == after[straggler.rank].moment.host and rank in before
    }
    others = [fraction for rank, fraction in fractions.items() if rank != straggler.rank]
    return straggler.waiting - (fractions[straggler.rank] - min(others)) < MIN_WAIT_FRACTION


def busy_seconds(arrivals: Mapping[int, Sequence[OperationArrival]], begin: float, end: float) -> dict[int, float]:
    """Return the busy time of each rank between two moments."""
    completed = _completions(arrivals)
    overlapping = _overlapping(arrivals, completed)
    return {rank: sum(_busy(each, completed, overlapping, begin, end)) for rank, each in arrivals.items()}


def _find(group: Sequence[RankReport], since: float) -> list[Straggler]:
    arrivals = {each.rank: _arrivals(each) for each in group}
    if not all(arrivals.values()):
        return []
    begin = max(since, *(each[0].time for each in arrivals.values()))
    end = min(each[-1].time for each in arrivals.values())
    times = [[each.time for each in of_rank if begin <= each.time <= end] for of_rank in arrivals.values()]
    if any(len(each) < MIN_ARRIVALS for each in times):
        return []
    middle = max(each[len(each) // 2] for each in times)  # an arrival, so that no single pause is in both halves
    window, *halves = (_waits(arrivals, *span) for span in ((begin, end), (begin, middle), (middle, end)))
    stragglers: list[Straggler] = []
    for role in _roles(group):
        for rank in role:
            others = [other for other in role if other != rank]
            # A straggler is slow in both halves, if less clearly; a single pause does not make one.
            in_both = all(_holds_up(rank, others, half, slack=2.0) for half in halves) if others else False
            if in_both and _holds_up(rank, others, window):
                waiting = min(window[other] for other in others)
                stragglers.append(Straggler(rank=rank, slowdown=1 / (1 - waiting), waiting=waiting))
    return stragglers


def _holds_up(rank: int, others: Sequence[int], waits: Mapping[int, float], *, slack: float = 1.0) -> bool:
    least = min(waits[other] for other in others)
    return least * slack >= MIN_WAIT_FRACTION and waits[rank] <= MAX_STRAGGLER_WAIT * slack * least


def _waits(arrivals: Mapping[int, Sequence[OperationArrival]], begin: float, end: float) -> dict[int, float]:
    """Return the fraction of the time that each rank waited for others."""
    return {rank: 1 - busy / (end - begin) for rank, busy in busy_seconds(arrivals, begin, end).items()}


def _arrivals(report: RankReport) -> list[OperationArrival]:
    """Return a rank's arrivals in order. Message n from one rank to another is an operation of these two."""
    rank = report.rank
    arrivals = [
        OperationArrival(
            each.time, (each.group, each.number), (each.group, each.op, each.sizes), report.groups[each.group]
        )
        for each in report.operations
        if each.group in report.groups
    ]
    for each in report.messages:
        ends = (rank, each["peer"]) if each["op"] == "send" else (each["peer"], rank)
        arrivals.append(OperationArrival(each["time"], (*ends, each["number"]), (*ends, each["op"]), ends))
    return sorted(arrivals, key=lambda each: each.time)


def _completions(arrivals: Mapping[int, Sequence[OperationArrival]]) -> dict[Kind, float]:
    """Return when the last member arrived at each operation. Operations without all members' arrivals are left out."""
    seen: dict[Kind, list[float]] = defaultdict(list)
    members: dict[Kind, tuple[int, ...]] = {}
    for each in (arrival for of_rank in arrivals.values() for arrival in of_rank):
        seen[each.key].append(each.time)
        members[each.key] = each.members
    here = arrivals.keys()
    return {key: max(times) for key, times in seen.items() if len(times) == len(here & set(members[key]))}


def _overlapping(
    arrivals: Mapping[int, Sequence[OperationArrival]], completed: Mapping[Kind, float]
) -> set[tuple[Kind, Kind]]:
    """Return pairs of kinds (first, next) where a rank began the next without waiting for the first."""
    pairs: set[tuple[Kind, Kind]] = set()
    for of_rank in arrivals.values():
        unfinished: list[OperationArrival] = []
        for each in of_rank:
            unfinished = [first for first in unfinished if completed[first.key] > each.time]
            pairs |= {(first.kind, each.kind) for first in unfinished}
            if each.key in completed:
                unfinished.append(each)
    return pairs


def _busy(
    of_rank: Sequence[OperationArrival],
    completed: Mapping[Kind, float],
    overlapping: set[tuple[Kind, Kind]],
    begin: float,
    end: float,
) -> Iterator[float]:
    """Yield, for each arrival, the rank's time since everything that it waited for was complete."""
    recent: dict[Kind, float] = {}  # when the last operation of each kind was complete
    last = of_rank[0]
    for each in of_rank[1:]:
        if last.key in completed:
            recent[last.kind] = completed[last.key]
        waited = (time for kind, time in recent.items() if time <= each.time and (kind, each.kind) not in overlapping)
        start = max(last.time, max(waited, default=last.time), begin)
        yield max(0.0, min(each.time, end) - start)
        last = each


def _roles(group: Sequence[RankReport]) -> list[list[int]]:
    """Return groups of ranks with the same work: same kinds of operations, group sizes and message directions."""
    roles: dict[frozenset[Kind], list[int]] = defaultdict(list)
    for each in group:
        calls: set[Kind] = {(op.op, len(each.groups.get(op.group, ()))) for op in each.operations}
        calls |= {(message["op"], message["peer"] > each.rank) for message in each.messages}
        roles[frozenset(calls)].append(each.rank)
    return list(roles.values())
