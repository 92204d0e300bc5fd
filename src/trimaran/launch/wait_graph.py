"""Which rank waits for which: a graph from the numbers of the operations that ranks have begun. Pure functions.

All ranks of a group begin the same operations in the same order. So a rank inside of operation n waits for every
member that has begun fewer than n, and a rank that has begun to receive n messages waits for a peer that has begun to
send fewer. Whoever is waited for, and waits for nobody, is to blame.
"""

from collections.abc import Mapping

from trimaran.launch.rank_report import Operation, RankReport

# Ranks may bring inputs of different sizes to the others, such as a scatter, whose root alone has inputs.
EVEN = frozenset({"all_reduce", "all_gather", "_allgather_base", "all_gather_into_tensor", "broadcast", "reduce",
                  "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor", "barrier"})  # fmt: skip
Edges = dict[int, dict[int, str]]


def waits(reports: Mapping[int, RankReport]) -> Edges:
    """Return, for each rank that waits, the ranks that it waits for and in what."""
    edges: Edges = {}
    for rank, report in reports.items():
        reasons = _of_groups(report, reports) | _of_messages(report, reports)
        if reasons:
            edges[rank] = reasons
    return edges


def sinks(edges: Edges) -> list[frozenset[int]]:
    """Return the ends of the graph: ranks, or circles of ranks, that wait for nobody outside."""
    ranks = {*edges, *(peer for peers in edges.values() for peer in peers)}
    reach = {rank: _reachable(rank, edges) for rank in ranks}
    circles = {rank: frozenset({rank} | {other for other in reach[rank] if rank in reach[other]}) for rank in ranks}
    return sorted({circles[rank] for rank in ranks if reach[rank] <= circles[rank]}, key=sorted)


def find_mismatch(reports: Mapping[int, RankReport]) -> dict[int, Operation] | None:
    """Return the first operation of a group that its ranks began with different calls, as each of them called it.

    Only what hangs counts: what is over on all ranks did no harm.
    """
    calls: dict[tuple[str, int], dict[int, Operation]] = {}
    for rank, report in reports.items():
        for operation in report.operations:
            calls.setdefault((operation.group, operation.number), {})[rank] = operation
    stuck = [each for _, each in sorted(calls.items(), key=lambda item: min(op.time for op in item[1].values()))]
    for each in stuck:
        if len({_kind(operation) for operation in each.values()}) > 1 and not all(op.done for op in each.values()):
            return each
    return None


def _kind(operation: Operation) -> tuple[object, ...]:
    return (operation.op, operation.sizes, operation.dtypes) if operation.op in EVEN else (operation.op,)


def _of_groups(report: RankReport, reports: Mapping[int, RankReport]) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for operation in report.operations:
        if operation.done:
            continue
        for member in report.groups.get(operation.group, ()):
            peer = reports.get(member)
            if peer is not None and peer.arrived.get(operation.group, 0) < operation.number:
                began = peer.arrived.get(operation.group, 0)
                text = f"operation {operation.number} of group {operation.group}, {operation}; it has begun {began}"
                reasons.setdefault(member, text)
    return reasons


def _of_messages(report: RankReport, reports: Mapping[int, RankReport]) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for peer, count in report.received.items():
        other = reports.get(peer)
        if other is not None and other.sent.get(report.rank, 0) < count:
            sent = other.sent.get(report.rank, 0)
            reasons[peer] = f"message {count} from it; it has begun to send {sent}"
    return reasons


def _reachable(rank: int, edges: Edges) -> set[int]:
    seen: set[int] = set()
    open_ranks = list(edges.get(rank, ()))
    while open_ranks:
        peer = open_ranks.pop()
        if peer not in seen:
            seen.add(peer)
            open_ranks.extend(edges.get(peer, ()))
    return seen
