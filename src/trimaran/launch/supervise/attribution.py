"""Fault attribution: which ranks are at fault and which are only affected, with evidence. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.core import Cause
from trimaran.launch.supervise.exit_cause import RankFault, read_exit
from trimaran.launch.supervise.node import RankEnded
from trimaran.launch.supervise.rank_report import Operation, RankReport
from trimaran.launch.supervise.wait_graph import find_mismatch, find_waits, terminal_components

MAX_STACK_CALLS = 4
Events = Sequence[Mapping[str, Any]]
# If several ranks failed by themselves for different causes, the incident gets the first of these.
CAUSE_PRIORITY: tuple[Cause, ...] = ("user", "data", "numeric", "oom", "mismatch", "storage", "crash", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What happened and which ranks are at fault (`suspects`) or affected (`victims`).

    `what` is a sentence without a full stop; `evidence` has `facts` and more.
    """

    cause: Cause
    what: str
    suspects: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)


def attribute_fault(
    reports: Mapping[int, RankReport], deaths: Sequence[RankEnded], events: Events, *, oom_killed: bool = False
) -> Attribution:
    """Return which ranks are at fault for the end or the hang of a run's ranks.

    `reports` are of all ranks, also of dead ones, for the end of their log. `events` are this attempt's lines of
    `events/rank-N.jsonl`. `oom_killed`: the kernel's OOM killer has killed a process since the attempt began.
    """
    faults = {each.rank: _fault(each, reports, events, oom_killed=oom_killed) for each in deaths}
    alive = {rank: each for rank, each in reports.items() if rank not in faults}
    if any(fault.primary for fault in faults.values()):
        return _attribute_deaths(faults, deaths, reports)
    if any(each.answered or each.state for each in alive.values()):
        attribution = attribute_hang(alive)
        if attribution.suspects or not faults:
            return _with_victims(attribution, faults)
    return _attribute_lost_connections(faults)


def attribute_hang(reports: Mapping[int, RankReport]) -> Attribution:
    """Return which ranks are at fault when all are alive and none makes progress."""
    ranks = sorted(reports)
    if stopped := [rank for rank in ranks if reports[rank].stopped]:
        what = f"{name_ranks(stopped)} {_be(stopped)} stopped (SIGSTOP or a debugger)"
        facts = [f"the process of rank {rank} is in state T (stopped)" for rank in stopped]
        return _hang(what, stopped, ranks, facts, reports)
    if silent := [rank for rank in ranks if not reports[rank].answered]:
        return _hang(f"{name_ranks(silent)} {_be(silent)} stuck in code that holds the GIL", silent, ranks,
                     [_describe_silence(reports[rank]) for rank in silent], reports)  # fmt: skip
    if mismatch := find_mismatch(reports):
        return _attribute_mismatch(mismatch, reports)
    edges = find_waits(reports)
    if not edges:
        return _attribute_without_waits(reports)
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
        return _attribute_unwritten_checkpoint(primary, deaths)
    cause = min((fault.cause for fault in primary.values()), key=_priority)
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


def _attribute_unwritten_checkpoint(faults: Mapping[int, RankFault], deaths: Sequence[RankEnded]) -> Attribution:
    """Blame the disk that cannot take the last checkpoint, which all ranks report, and no rank."""
    facts = next(iter(faults.values())).facts
    codes = {str(each.rank): each.code for each in deaths}
    return Attribution(cause="storage", what=facts["what"], evidence={"exit_codes": codes} | dict(facts))


def _priority(cause: Cause) -> int:
    return CAUSE_PRIORITY.index(cause) if cause in CAUSE_PRIORITY else 99


def _attribute_lost_connections(faults: Mapping[int, RankFault]) -> Attribution:
    """Blame the network if every rank that ended had lost the connection to others, and no rank failed by itself."""
    ranks = tuple(sorted(faults))
    facts = [f"rank {rank} {faults[rank].what}" for rank in ranks]
    if faults and all(fault.cause == "preempted" for fault in faults.values()):
        return Attribution(
            cause="preempted", what=f"{name_ranks(ranks)} {_be(ranks)} asked to stop", evidence={"facts": facts}
        )
    if not faults:
        return Attribution(cause="unknown", what="no rank reported anything")
    what = f"{name_ranks(ranks)} lost the connection to other ranks, and no rank had failed before"
    return Attribution(cause="network", what=what, victims=ranks, evidence={"facts": facts})


def _attribute_mismatch(mismatch: Mapping[int, Operation], reports: Mapping[int, RankReport]) -> Attribution:
    """Blame the minority of ranks that called another operation than the rest at the same position of a group."""
    kinds: dict[str, list[int]] = {}
    for rank, operation in sorted(mismatch.items()):
        kinds.setdefault(
            f"{operation} ({', '.join(operation.dtypes)})" if operation.dtypes else str(operation), []
        ).append(rank)
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


def _attribute_without_waits(reports: Mapping[int, RankReport]) -> Attribution:
    """Attribute a hang in which no rank waits for another: all are in one operation, or some do not communicate."""
    ranks = sorted(reports)
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


def _hang(
    what: str,
    suspects: Sequence[int],
    ranks: Sequence[int],
    facts: Sequence[str],
    reports: Mapping[int, RankReport],
) -> Attribution:
    victims = tuple(rank for rank in ranks if rank not in suspects)
    evidence = _evidence([*_locations(suspects, reports), *facts], suspects, reports)
    return Attribution(cause="hang", what=what, suspects=tuple(suspects), victims=victims, evidence=evidence)


def _evidence(facts: Sequence[str], suspects: Sequence[int], reports: Mapping[int, RankReport]) -> dict[str, Any]:
    calls = {str(rank): [str(call) for call in reports[rank].calls[:MAX_STACK_CALLS]] for rank in suspects}
    files = [f"rank-{rank}.stacks.txt" for rank in (suspects or sorted(reports))]
    steps = {str(rank): each.step for rank, each in reports.items() if each.answered}
    return {"facts": list(facts), "calls": calls, "steps": steps, "files": files}


def _locations(suspects: Sequence[int], reports: Mapping[int, RankReport]) -> list[str]:
    """Return the source line that each of `suspects` is at, as facts."""
    calls = {rank: reports[rank].user_call for rank in suspects}
    return [f"rank {rank} is at {call}" for rank, call in calls.items() if call is not None]


def _sites(ranks: Mapping[int, Any], reports: Mapping[int, RankReport]) -> dict[str, str]:
    calls = {rank: reports[rank].user_call for rank in sorted(ranks) if rank in reports}
    return {str(rank): f"is at {call}" for rank, call in calls.items() if call is not None}


def _describe_silence(report: RankReport) -> str:
    doing = {
        "R": "its process is computing",
        "S": "its process sleeps in the kernel",
        "D": "its process waits for a disk",
    }
    return f"the heartbeat thread of rank {report.rank} cannot run; {doing.get(report.state, 'its process is alive')}"


def _describe_wait(rank: int, reasons: Mapping[int, str]) -> str:
    why = next(iter(reasons.values()))
    return f"rank {rank} waits for {name_ranks(sorted(reasons))} in {why}"


def _with_victims(attribution: Attribution, faults: Mapping[int, RankFault]) -> Attribution:
    if not faults:
        return attribution
    victims = tuple(sorted({*attribution.victims, *faults}))
    facts = [*attribution.evidence.get("facts", ()), *(f"rank {rank} {fault.what}" for rank, fault in faults.items())]
    evidence = attribution.evidence | {"facts": facts}
    return Attribution(cause=attribution.cause, what=attribution.what, suspects=attribution.suspects, victims=victims,
                     evidence=evidence)  # fmt: skip


def _fault(end: RankEnded, reports: Mapping[int, RankReport], events: Events, *, oom_killed: bool) -> RankFault:
    errors = [event for event in events if event["kind"] == "error" and event["rank"] == end.rank]
    log_tail = reports[end.rank].log_tail if end.rank in reports else ""
    return read_exit(end.code, errors[-1]["data"] if errors else None, log_tail, oom_killed=oom_killed)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
