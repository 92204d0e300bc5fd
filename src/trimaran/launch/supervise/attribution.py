"""Fault attribution: which ranks are at fault and which are only affected, with evidence. Pure functions.

First why each rank ended, from its exit code, its error event and the end of its log. Then which rank waits for which,
from the numbers of the operations that ranks have begun. All ranks of a group begin the same operations in the same
order. So a rank inside operation n waits for every member that has begun fewer than n, and a rank that has begun to
receive n messages waits for a peer that has begun to send fewer. A rank that others wait for, and that waits for no
other, is at fault.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_USER, Cause
from trimaran.launch.supervise.node import RankEnded
from trimaran.launch.supervise.rank_report import STOPPED_STATES, Operation, RankReport
from trimaran.runs import CONNECTION_LOST, GLOO_NOISE, HOST_RAN_OUT, OUT_OF_MEMORY, memory_holes

# What torch's watchdog logs before it aborts a rank whose NCCL peers are gone. NCCL reports a peer that was killed as a
# remote or a system error, depending on how its socket was closed.
NCCL_PEER_LOST = re.compile(
    r"ncclRemoteError|remote process exited|closed by remote peer|Watchdog caught collective operation timeout"
    r"|failed : (Connection reset by peer|Connection refused|Broken pipe)"
)

# The cause that a message at the end of a log stands for. The first match counts.
CAUSE_PATTERNS: dict[Cause, re.Pattern[str]] = {
    "oom": OUT_OF_MEMORY,
    "mismatch": re.compile(
        r"collective mismatch|mismatch between collectives|doesn't match expected size"
        r"|[Mm]essage truncated|mismatch in collective sizes"  # NCCL
    ),
    "storage": re.compile(r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error"),
}
CAUSE_OF_TYPE: dict[str, Cause] = {"OutOfMemoryError": "oom", "MemoryError": "oom", "LoaderFault": "data"}
CAUSES: tuple[Cause, ...] = get_args(Cause)
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """Why one rank ended."""

    cause: Cause
    what: str  # a sentence whose subject is the rank
    primary: bool = True  # it failed by itself, not because it lost the connection to others
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_exit(code: int, error: Mapping[str, Any] | None, log_tail: str, *, oom_killed: bool = False) -> RankFault:
    """Return why a rank ended, from its exit code, the data of its `error` event if any, and the end of its log."""
    if error is not None:
        if "code" in error and error.get("cause") == "storage":
            return RankFault(cause="storage", what=f"reported {error['code']}: {error['what']}", facts=dict(error))
        if "code" in error:
            what = f"reported a configuration error: {error['code']}: {error['what']}"
            return RankFault(cause="user", what=what, facts=dict(error))
        kind, message = str(error.get("type", "an error")), str(error.get("message", ""))
        reported: Cause | None = next((each for each in CAUSES if each == error.get("cause")), None)
        cause = reported or CAUSE_OF_TYPE.get(kind) or _cause_in_text(f"{kind}: {message}")
        what = f"raised {kind}: {_first_line(message)}"
        if cause is not None:
            facts = {key: error[key] for key in ("sample_ids", "step") if key in error}
            facts |= memory_holes(message) if cause == "oom" else {}
            return RankFault(cause=cause, what=what, facts=facts)
        if CONNECTION_LOST.search(message):
            what = f"lost the connection to other ranks: {GLOO_NOISE.sub('', _first_line(message))}"
            return RankFault(cause="network", what=what, primary=False)
        return RankFault(cause="crash", what=what)
    if code < 0:
        number = -code
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        if number == signal.SIGKILL and oom_killed:
            return RankFault(cause="oom", what=f"was killed by the kernel's OOM killer: {HOST_RAN_OUT}")
        if number in CRASH_SIGNALS and (cause := _cause_in_text(log_tail)) is not None:
            return RankFault(cause=cause, what=f"crashed with {name}: {_line_with(CAUSE_PATTERNS[cause], log_tail)}")
        if number == signal.SIGABRT and NCCL_PEER_LOST.search(log_tail):
            what = (
                f"was aborted by torch's watchdog after other ranks were lost: {_line_with(NCCL_PEER_LOST, log_tail)}"
            )
            return RankFault(cause="network", what=what, primary=False)
        return RankFault(cause="crash", what=f"{'crashed with' if number in CRASH_SIGNALS else 'was killed by'} {name}")
    if code == EXIT_DONE:
        return RankFault(cause="exit", what="exited with code 0 before training was done")
    if code == EXIT_AGAIN:
        return RankFault(cause="preempted", what="was asked to stop", primary=False)
    if code == EXIT_USER:
        return RankFault(cause="user", what="reported a configuration error (exit code 2)")
    if (cause := _cause_in_text(log_tail)) is not None:
        return RankFault(cause=cause, what=f"exited with code {code}: {_line_with(CAUSE_PATTERNS[cause], log_tail)}")
    return RankFault(cause="crash", what=f"exited with code {code} without an error event")


def _cause_in_text(text: str) -> Cause | None:
    return next((cause for cause, pattern in CAUSE_PATTERNS.items() if pattern.search(text)), None)


def _line_with(pattern: re.Pattern[str], log_tail: str) -> str:
    return next((line.strip()[:300] for line in reversed(log_tail.splitlines()) if pattern.search(line)), "")


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or [""])[0][:300]


# Operations whose inputs have the same size on all ranks. In others, such as scatter, only the root has inputs.
SAME_SIZE_OPERATIONS = frozenset({"all_reduce", "all_gather", "_allgather_base", "all_gather_into_tensor", "broadcast",
                                  "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor",
                                  "barrier"})  # fmt: skip
Edges = dict[int, dict[int, str]]


def find_waits(reports: Mapping[int, RankReport]) -> Edges:
    """Return, for each rank that waits, the ranks it waits for and the operation it waits in."""
    edges: Edges = {}
    for rank, report in reports.items():
        reasons: dict[int, str] = {}
        for operation in (each for each in report.operations if not each.done):
            for member in report.groups.get(operation.group, ()):
                peer = reports.get(member)
                began = peer.arrived.get(operation.group, 0) if peer is not None else operation.number
                if began < operation.number:
                    text = f"operation {operation.number} of group {operation.group}, {operation}; it has begun {began}"
                    reasons.setdefault(member, text)
        for member, count in report.received.items():
            peer = reports.get(member)
            sent = peer.sent.get(rank, 0) if peer is not None else count
            if sent < count:
                reasons[member] = f"message {count} from it; it has begun to send {sent}"
        if reasons:
            edges[rank] = reasons
    return edges


def terminal_components(edges: Edges) -> list[frozenset[int]]:
    """Return the strongly connected components that have no edge out: single ranks, or cycles of ranks."""
    ranks = {*edges, *(peer for peers in edges.values() for peer in peers)}
    reach: dict[int, set[int]] = {}
    for rank in ranks:
        seen: set[int] = set()
        pending = list(edges.get(rank, ()))
        while pending:
            peer = pending.pop()
            if peer not in seen:
                seen.add(peer)
                pending.extend(edges.get(peer, ()))
        reach[rank] = seen
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
        kinds = {(op.op, op.sizes, op.dtypes) if op.op in SAME_SIZE_OPERATIONS else (op.op,) for op in each.values()}
        if len(kinds) > 1 and not all(op.done for op in each.values()):
            return each
    return None


MAX_STACK_CALLS = 4
Events = Sequence[Mapping[str, Any]]
# If several ranks failed by themselves for different causes, the incident gets the first of these.
CAUSE_PRIORITY: tuple[Cause, ...] = ("user", "data", "numeric", "oom", "mismatch", "storage", "crash", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What happened and which ranks are at fault (`suspects`) or affected (`victims`)."""

    cause: Cause
    what: str  # a sentence without a full stop
    suspects: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)  # `facts` and more


def attribute_fault(
    reports: Mapping[int, RankReport], deaths: Sequence[RankEnded], events: Events, *, oom_killed: bool = False
) -> Attribution:
    """Return which ranks are at fault for the end or the hang of a run's ranks.

    `reports` are of all ranks, also of dead ones, for the end of their log. `events` are this attempt's lines of
    `events/rank-N.jsonl`. `oom_killed`: the kernel's OOM killer has killed a process since the attempt began.
    """
    faults: dict[int, RankFault] = {}
    for each in deaths:
        errors = [event["data"] for event in events if event["kind"] == "error" and event["rank"] == each.rank]
        log_tail = reports[each.rank].log_tail if each.rank in reports else ""
        faults[each.rank] = read_exit(each.code, errors[-1] if errors else None, log_tail, oom_killed=oom_killed)
    alive = {rank: each for rank, each in reports.items() if rank not in faults}
    if any(fault.primary for fault in faults.values()):
        return _attribute_deaths(faults, deaths, reports)
    if any(each.answered or each.state for each in alive.values()):
        attribution = attribute_hang(alive)
        if not faults:
            return attribution
        if attribution.suspects:
            facts = [f"rank {rank} {fault.what}" for rank, fault in faults.items()]
            evidence = attribution.evidence | {"facts": [*attribution.evidence.get("facts", ()), *facts]}
            return replace(attribution, victims=tuple(sorted({*attribution.victims, *faults})), evidence=evidence)
    # Every rank that ended had lost the connection to others, and no rank failed by itself: blame the network.
    ranks = tuple(sorted(faults))
    facts = [f"rank {rank} {faults[rank].what}" for rank in ranks]
    if faults and all(fault.cause == "preempted" for fault in faults.values()):
        return Attribution(
            cause="preempted", what=f"{name_ranks(ranks)} {is_or_are(ranks)} asked to stop", evidence={"facts": facts}
        )
    if not faults:
        return Attribution(cause="unknown", what="no rank reported anything")
    what = f"{name_ranks(ranks)} lost the connection to other ranks, and no rank had failed before"
    return Attribution(cause="network", what=what, victims=ranks, evidence={"facts": facts})


def attribute_hang(reports: Mapping[int, RankReport]) -> Attribution:
    """Return which ranks are at fault when all are alive and none makes progress."""
    ranks = sorted(reports)
    if stopped := [rank for rank in ranks if reports[rank].state in STOPPED_STATES]:
        what = f"{name_ranks(stopped)} {is_or_are(stopped)} stopped (SIGSTOP or a debugger)"
        facts = [f"the process of rank {rank} is in state T (stopped)" for rank in stopped]
        return _hang(what, stopped, ranks, facts, reports)
    if silent := [rank for rank in ranks if not reports[rank].answered]:
        doing = {"R": "is computing", "S": "sleeps in the kernel", "D": "waits for a disk"}
        does = {rank: doing.get(reports[rank].state, "is alive") for rank in silent}
        facts = [f"the heartbeat thread of rank {rank} cannot run; its process {does[rank]}" for rank in silent]
        what = f"{name_ranks(silent)} {is_or_are(silent)} stuck in code that holds the GIL"
        return _hang(what, silent, ranks, facts, reports)
    if mismatch := find_mismatch(reports):
        # Blame the minority of ranks that called another operation than the rest at the same position of a group.
        kinds: dict[str, list[int]] = {}
        for rank, operation in sorted(mismatch.items()):
            kind = f"{operation} ({', '.join(operation.dtypes)})" if operation.dtypes else str(operation)
            kinds.setdefault(kind, []).append(rank)
        fewest = min(map(len, kinds.values()))
        minorities = [ranks for ranks in kinds.values() if len(ranks) == fewest]
        suspects = minorities[0] if len(minorities) == 1 else sorted(mismatch)
        operation = next(iter(mismatch.values()))
        calls = ", but ".join(f"{name_ranks(ranks)} called {kind}" for kind, ranks in kinds.items())
        facts = [f"it was operation {operation.number} of group {operation.group}"]
        facts += [f"rank {rank} {text}" for rank, text in _sites(mismatch, reports).items()]
        evidence = _evidence(facts, suspects, reports) | {"sites": _sites(mismatch, reports)}
        victims = tuple(rank for rank in sorted(reports) if rank not in suspects)
        return Attribution(cause="mismatch", what=calls, suspects=tuple(suspects), victims=victims, evidence=evidence)
    edges = find_waits(reports)
    if not edges:
        # No rank waits for another: all are in one operation, or some do not communicate.
        inside = [rank for rank in ranks if reports[rank].operations and not reports[rank].operations[-1].done]
        started = [rank for rank in inside if reports[rank].operations[-1].state == "started"]
        if behind := [rank for rank in inside if started and rank not in started]:
            what = f"the device of {name_ranks(behind)} did not reach the operation that the others are in"
            return _hang(what, behind, ranks, [], reports)
        if inside == ranks:
            last = reports[ranks[0]].operations[-1]
            facts = [f"all ranks have begun operation {last.number} of group {last.group}, {last}, and it does not end"]
            evidence = _evidence(facts, (), reports)
            what = "all ranks are in the same operation and it does not end: suspect the network"
            return Attribution(cause="network", what=what, victims=tuple(ranks), evidence=evidence)
        outside = [rank for rank in ranks if rank not in inside] if len(inside) < len(ranks) else ranks
        slowest = min(reports[rank].step for rank in outside)
        suspects = [rank for rank in outside if reports[rank].step == slowest]
        return _hang(f"{name_ranks(suspects)} made no progress, without waiting for another rank", suspects, ranks, [],
                     reports)  # fmt: skip
    ends = terminal_components(edges)
    single = [rank for end in ends if len(end) == 1 for rank in end]
    busy = [rank for end in ends if len(end) > 1 for rank in end if not reports[rank].may_be_waiting]
    if suspects := sorted({*single, *busy}):
        facts = [_describe_wait(rank, reasons) for rank, reasons in edges.items() if rank not in suspects]
        what = f"{name_ranks(suspects)} did not reach the operation that the others wait in"
        return _hang(what, suspects, ranks, facts, reports)
    cycle = sorted(rank for end in ends for rank in end)
    facts = [_describe_wait(rank, edges[rank]) for rank in cycle]
    evidence = _evidence(facts, cycle, reports)
    victims = tuple(rank for rank in ranks if rank not in cycle)
    what = f"{name_ranks(cycle)} wait for each other in a cycle"
    return Attribution(cause="mismatch", what=what, suspects=tuple(cycle), victims=victims, evidence=evidence)


def _attribute_deaths(
    faults: Mapping[int, RankFault], deaths: Sequence[RankEnded], reports: Mapping[int, RankReport]
) -> Attribution:
    primary = {rank: fault for rank, fault in faults.items() if fault.primary}
    if all(fault.cause == "storage" and "code" in fault.facts for fault in primary.values()):
        facts = next(iter(primary.values())).facts  # no rank is at fault: all report that the disk takes no more
        codes = {str(each.rank): each.code for each in deaths}
        return Attribution(cause="storage", what=facts["what"], evidence={"exit_codes": codes} | dict(facts))
    cause = min(
        (fault.cause for fault in primary.values()),
        key=lambda each: CAUSE_PRIORITY.index(each) if each in CAUSE_PRIORITY else len(CAUSE_PRIORITY),
    )
    suspects = sorted(primary)
    times = {each.rank: each.time for each in deaths}
    first = min((rank for rank in suspects if primary[rank].cause == cause), key=times.__getitem__)
    same = [rank for rank in suspects if primary[rank].what == primary[first].what]
    what = f"{name_ranks(same)} {primary[first].what}"
    facts = [f"rank {rank} {faults[rank].what}" for rank in sorted(faults, key=times.__getitem__) if rank not in same]
    codes = {str(each.rank): each.code for each in deaths}
    evidence = {"facts": facts, "exit_codes": codes, "files": [f"logs/rank-{rank}.log" for rank in suspects]}
    for fault in primary.values():
        evidence |= dict(fault.facts)
    samples = sorted({sample for fault in primary.values() for sample in fault.facts.get("sample_ids", ())})
    evidence |= {"sample_ids": samples} if samples else {}
    evidence |= {"sites": sites} if cause == "mismatch" and (sites := _sites(reports, reports)) else {}
    victims = sorted({*reports, *faults} - set(suspects))
    return Attribution(cause=cause, what=what, suspects=tuple(suspects), victims=tuple(victims), evidence=evidence)


def _hang(
    what: str, suspects: Sequence[int], ranks: Sequence[int], facts: Sequence[str], reports: Mapping[int, RankReport]
) -> Attribution:
    victims = tuple(rank for rank in ranks if rank not in suspects)
    locations = [f"rank {rank} is at {call}" for rank in suspects if (call := reports[rank].user_call) is not None]
    evidence = _evidence([*locations, *facts], suspects, reports)
    return Attribution(cause="hang", what=what, suspects=tuple(suspects), victims=victims, evidence=evidence)


def _evidence(facts: Sequence[str], suspects: Sequence[int], reports: Mapping[int, RankReport]) -> dict[str, Any]:
    calls = {str(rank): [str(call) for call in reports[rank].calls[:MAX_STACK_CALLS]] for rank in suspects}
    files = [f"rank-{rank}.stacks.txt" for rank in (suspects or sorted(reports))]
    steps = {str(rank): each.step for rank, each in reports.items() if each.answered}
    return {"facts": list(facts), "calls": calls, "steps": steps, "files": files}


def _sites(ranks: Mapping[int, Any], reports: Mapping[int, RankReport]) -> dict[str, str]:
    calls = {rank: reports[rank].user_call for rank in sorted(ranks) if rank in reports}
    return {str(rank): f"is at {call}" for rank, call in calls.items() if call is not None}


def _describe_wait(rank: int, reasons: Mapping[int, str]) -> str:
    why = next(iter(reasons.values()))
    return f"rank {rank} waits for {name_ranks(sorted(reasons))} in {why}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def is_or_are(ranks: Sequence[int]) -> str:
    """Return the verb that follows `name_ranks`."""
    return "is" if len(ranks) == 1 else "are"
