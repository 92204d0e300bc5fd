"""Which rank waits for which: a graph from the numbers of the operations that ranks have begun. Pure functions.

All ranks of a group begin the same operations in the same order. So a rank inside operation n waits for every member
that has begun fewer than n, and a rank that has begun to receive n messages waits for a peer that has begun to send
fewer. A rank that others wait for, and that waits for no other, is at fault.
"""

from collections.abc import Mapping

from trimaran.launch.supervise.rank_report import Operation, RankReport

# Operations whose inputs have the same size on all ranks. In others, such as scatter, only the root has inputs.
SAME_SIZE_OPERATIONS = frozenset({"all_reduce", "all_gather", "_allgather_base", "all_gather_into_tensor", "broadcast",
                                  "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor",
                                  "barrier"})  # fmt: skip
Edges = dict[int, dict[int, str]]


def find_waits(reports: Mapping[int, RankReport]) -> Edges:
    """Return, for each rank that waits, the ranks it waits for and the operation it waits in."""
    edges: Edges = {}
    for rank, report in reports.items():
        reasons = _waits_in_groups(report, reports) | _waits_for_messages(report, reports)
        if reasons:
            edges[rank] = reasons
    return edges


def terminal_components(edges: Edges) -> list[frozenset[int]]:
    """Return the strongly connected components that have no edge out: single ranks, or cycles of ranks."""
    ranks = {*edges, *(peer for peers in edges.values() for peer in peers)}
    reach = {rank: _reachable(rank, edges) for rank in ranks}
    component = {rank: frozenset({rank} | {other for other in reach[rank] if rank in reach[other]}) for rank in ranks}
    return sorted({component[rank] for rank in ranks if reach[rank] <= component[rank]}, key=sorted)


def find_mismatch(reports: Mapping[int, RankReport]) -> dict[int, Operation] | None:
    """Return the first operation of a group for which its ranks made different calls, by rank; None if there is none.

    An operation that is done on all ranks does not count.
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
    has_sizes = operation.op in SAME_SIZE_OPERATIONS
    return (operation.op, operation.sizes, operation.dtypes) if has_sizes else (operation.op,)


def _waits_in_groups(report: RankReport, reports: Mapping[int, RankReport]) -> dict[int, str]:
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


def _waits_for_messages(report: RankReport, reports: Mapping[int, RankReport]) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for peer, count in report.received.items():
        other = reports.get(peer)
        if other is not None and other.sent.get(report.rank, 0) < count:
            sent = other.sent.get(report.rank, 0)
            reasons[peer] = f"message {count} from it; it has begun to send {sent}"
    return reasons


def _reachable(rank: int, edges: Edges) -> set[int]:
    seen: set[int] = set()
    pending = list(edges.get(rank, ()))
    while pending:
        peer = pending.pop()
        if peer not in seen:
            seen.add(peer)
            pending.extend(edges.get(peer, ()))
    return seen
