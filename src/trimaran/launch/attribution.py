"""Who did it: the ranks that are to blame, told from those that only suffered, with evidence. Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimaran.core import Cause
from trimaran.launch.exit_cause import Fault, read_end
from trimaran.launch.node import Ended
from trimaran.launch.rank_report import Operation, RankReport
from trimaran.launch.wait_graph import find_mismatch, sinks, waits

NUM_CALLS = 4
Events = Sequence[Mapping[str, Any]]
# Where several ranks ended of themselves and not alike, the first of these is what it is called.
ORDER: tuple[Cause, ...] = ("user", "data", "numeric", "oom", "mismatch", "storage", "crash", "exit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """What happened and who did it. `what` is a sentence without a full stop; `evidence` has `facts` and more."""

    cause: Cause
    what: str
    suspects: tuple[int, ...] = ()
    victims: tuple[int, ...] = ()
    evidence: dict[str, Any] = field(default_factory=dict)


def attribute_fault(
    reports: Mapping[int, RankReport], deaths: Sequence[Ended], events: Events, *, oom_killed: bool = False
) -> Attribution:
    """Return who is to blame for the end or the standstill of a run's ranks.

    `rank reports` are of all ranks, the dead ones too, for their last words; `events` are this attempt's lines of
    `events/rank-N.jsonl`. `oom_killed`: the kernel has killed a process for want of memory since the attempt began.
    """
    faults = {each.rank: _fault(each, reports, events, oom_killed=oom_killed) for each in deaths}
    alive = {rank: each for rank, each in reports.items() if rank not in faults}
    if any(fault.own for fault in faults.values()):
        return _judge_deaths(faults, deaths, reports)
    if any(each.answered or each.state for each in alive.values()):
        judgement = attribute_hang(alive)
        if judgement.suspects or not faults:
            return _with_victims(judgement, faults)
    return _judge_losses(faults)


def attribute_hang(reports: Mapping[int, RankReport]) -> Attribution:
    """Return who is to blame when all live and nothing moves."""
    ranks = sorted(reports)
    if stopped := [rank for rank in ranks if reports[rank].stopped]:
        what = f"{name_ranks(stopped)} {_be(stopped)} stopped (SIGSTOP or a debugger)"
        facts = [f"the kernel says that the process of rank {rank} is in state T, stopped" for rank in stopped]
        return _hang(what, stopped, ranks, facts, reports)
    if silent := [rank for rank in ranks if not reports[rank].answered]:
        return _hang(f"{name_ranks(silent)} {_be(silent)} stuck in code that holds Python's lock", silent, ranks,
                     [_silence(reports[rank]) for rank in silent], reports)  # fmt: skip
    if mismatch := find_mismatch(reports):
        return _judge_mismatch(mismatch, reports)
    edges = waits(reports)
    if not edges:
        return _judge_motionless(reports)
    ends = sinks(edges)
    single = [rank for end in ends if len(end) == 1 for rank in end]
    busy = [rank for end in ends if len(end) > 1 for rank in end if not reports[rank].communicates]
    if suspects := sorted({*single, *busy}):
        facts = [_waiting(rank, reasons) for rank, reasons in edges.items() if rank not in suspects]
        what = f"{name_ranks(suspects)} did not come to where the others wait"
        return _hang(what, suspects, ranks, facts, reports)
    circle = sorted(rank for end in ends for rank in end)
    facts = [_waiting(rank, edges[rank]) for rank in circle]
    evidence = _evidence(facts, circle, reports)
    victims = tuple(rank for rank in ranks if rank not in circle)
    what = f"{name_ranks(circle)} wait for each other in a circle"
    return Attribution(cause="mismatch", what=what, suspects=tuple(circle), victims=victims, evidence=evidence)


def _judge_deaths(
    faults: Mapping[int, Fault], deaths: Sequence[Ended], reports: Mapping[int, RankReport]
) -> Attribution:
    own = {rank: fault for rank, fault in faults.items() if fault.own}
    cause = min((fault.cause for fault in own.values()), key=lambda each: ORDER.index(each) if each in ORDER else 99)
    suspects = sorted(own)
    times = {each.rank: each.time for each in deaths}
    first = min((rank for rank in suspects if own[rank].cause == cause), key=times.__getitem__)
    same = [rank for rank in suspects if own[rank].what == own[first].what]
    what = f"{name_ranks(same)} {own[first].what}"
    facts = [f"rank {rank} {faults[rank].what}" for rank in sorted(faults, key=times.__getitem__) if rank not in same]
    codes = {str(each.rank): each.code for each in deaths}
    evidence = {"facts": facts, "exit_codes": codes, "files": [f"logs/rank-{rank}.log" for rank in suspects]}
    for fault in own.values():
        evidence |= dict(fault.facts)
    samples = sorted({sample for fault in own.values() for sample in fault.facts.get("sample_ids", ())})
    evidence |= {"sample_ids": samples} if samples else {}
    evidence |= {"sites": sites} if cause == "mismatch" and (sites := _sites(reports, reports)) else {}
    victims = sorted({*reports, *faults} - set(suspects))
    return Attribution(cause=cause, what=what, suspects=tuple(suspects), victims=tuple(victims), evidence=evidence)


def _judge_losses(faults: Mapping[int, Fault]) -> Attribution:
    """All that ended say that they lost the others, and nobody is to blame for it: so it was what lies between them."""
    ranks = tuple(sorted(faults))
    facts = [f"rank {rank} {faults[rank].what}" for rank in ranks]
    if faults and all(fault.cause == "preempted" for fault in faults.values()):
        return Attribution(
            cause="preempted", what=f"{name_ranks(ranks)} {_be(ranks)} asked to stop", evidence={"facts": facts}
        )
    if not faults:
        return Attribution(cause="unknown", what="nothing is known of any rank")
    what = f"{name_ranks(ranks)} lost the others, and no rank had failed before"
    return Attribution(cause="network", what=what, victims=ranks, evidence={"facts": facts})


def _judge_mismatch(mismatch: Mapping[int, Operation], reports: Mapping[int, RankReport]) -> Attribution:
    """Different calls at the same place in a group's sequence; fewer ranks are wrong than right, so blame the fewer."""
    kinds: dict[str, list[int]] = {}
    for rank, operation in sorted(mismatch.items()):
        kinds.setdefault(
            f"{operation} ({', '.join(operation.dtypes)})" if operation.dtypes else str(operation), []
        ).append(rank)
    fewest = min(map(len, kinds.values()))
    odd = [ranks for ranks in kinds.values() if len(ranks) == fewest]
    suspects = odd[0] if len(odd) == 1 else sorted(mismatch)
    some = next(iter(mismatch.values()))
    calls = ", but ".join(f"{name_ranks(ranks)} called {kind}" for kind, ranks in kinds.items())
    facts = [f"it was operation {some.number} of group {some.group}"]
    facts += [f"rank {rank} {text}" for rank, text in _sites(mismatch, reports).items()]
    evidence = _evidence(facts, suspects, reports) | {"sites": _sites(mismatch, reports)}
    victims = tuple(rank for rank in sorted(reports) if rank not in suspects)
    return Attribution(cause="mismatch", what=calls, suspects=tuple(suspects), victims=victims, evidence=evidence)


def _judge_motionless(reports: Mapping[int, RankReport]) -> Attribution:
    """Nobody waits for anybody: either all are inside of one operation that does not end, or none communicates."""
    ranks = sorted(reports)
    inside = [rank for rank in ranks if reports[rank].operations and not reports[rank].operations[-1].done]
    started = [rank for rank in inside if reports[rank].operations[-1].state == "started"]
    if behind := [rank for rank in inside if started and rank not in started]:
        what = f"the device of {name_ranks(behind)} did not come to the operation that the others are in"
        return _hang(what, behind, ranks, [], reports)
    if inside == ranks:
        last = reports[ranks[0]].operations[-1]
        facts = [f"all ranks have begun operation {last.number} of group {last.group}, {last}, and it does not end"]
        evidence = _evidence(facts, (), reports)
        what = "all ranks are in the same operation and it does not end: suspect what connects them"
        return Attribution(cause="network", what=what, victims=tuple(ranks), evidence=evidence)
    outside = [rank for rank in ranks if rank not in inside] if len(inside) < len(ranks) else ranks
    slowest = min(reports[rank].step for rank in outside)
    suspects = [rank for rank in outside if reports[rank].step == slowest]
    return _hang(f"{name_ranks(suspects)} did not come on, and waits for no other rank", suspects, ranks, [], reports)


def _hang(
    what: str,
    suspects: Sequence[int],
    ranks: Sequence[int],
    facts: Sequence[str],
    reports: Mapping[int, RankReport],
) -> Attribution:
    victims = tuple(rank for rank in ranks if rank not in suspects)
    evidence = _evidence([*_standing(suspects, reports), *facts], suspects, reports)
    return Attribution(cause="hang", what=what, suspects=tuple(suspects), victims=victims, evidence=evidence)


def _evidence(facts: Sequence[str], suspects: Sequence[int], reports: Mapping[int, RankReport]) -> dict[str, Any]:
    calls = {str(rank): [str(call) for call in reports[rank].calls[:NUM_CALLS]] for rank in suspects}
    files = [f"rank-{rank}.stacks.txt" for rank in (suspects or sorted(reports))]
    steps = {str(rank): each.step for rank, each in reports.items() if each.answered}
    return {"facts": list(facts), "calls": calls, "steps": steps, "files": files}


def _standing(suspects: Sequence[int], reports: Mapping[int, RankReport]) -> list[str]:
    """Return where each of `suspects` stands, as facts."""
    places = {rank: reports[rank].place for rank in suspects}
    return [f"rank {rank} stands at {place}" for rank, place in places.items() if place is not None]


def _sites(ranks: Mapping[int, Any], reports: Mapping[int, RankReport]) -> dict[str, str]:
    places = {rank: reports[rank].place for rank in sorted(ranks) if rank in reports}
    return {str(rank): f"stands at {place}" for rank, place in places.items() if place is not None}


def _silence(report: RankReport) -> str:
    doing = {"R": "it computes without a pause", "S": "it sleeps in the kernel", "D": "it waits for a disk"}
    return (
        f"the heartbeat thread thread of rank {report.rank} cannot run; {doing.get(report.state, 'its process lives')}"
    )


def _waiting(rank: int, reasons: Mapping[int, str]) -> str:
    why = next(iter(reasons.values()))
    return f"rank {rank} waits for {name_ranks(sorted(reasons))} in {why}"


def _with_victims(judgement: Attribution, faults: Mapping[int, Fault]) -> Attribution:
    if not faults:
        return judgement
    victims = tuple(sorted({*judgement.victims, *faults}))
    facts = [*judgement.evidence.get("facts", ()), *(f"rank {rank} {fault.what}" for rank, fault in faults.items())]
    evidence = judgement.evidence | {"facts": facts}
    return Attribution(cause=judgement.cause, what=judgement.what, suspects=judgement.suspects, victims=victims,
                     evidence=evidence)  # fmt: skip


def _fault(end: Ended, reports: Mapping[int, RankReport], events: Events, *, oom_killed: bool) -> Fault:
    errors = [event for event in events if event["kind"] == "error" and event["rank"] == end.rank]
    words = reports[end.rank].words if end.rank in reports else ""
    return read_end(end.code, errors[-1]["data"] if errors else None, words, oom_killed=oom_killed)


def name_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, `ranks 1 and 2`, `ranks 0, 1 and 2`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 6:
        return f"ranks {', '.join(map(str, ranks[:5]))} and {len(ranks) - 5} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _be(ranks: Sequence[int]) -> str:
    return "is" if len(ranks) == 1 else "are"
