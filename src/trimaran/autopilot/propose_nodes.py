"""Leaving a slow node out, if the others are faster without it, and taking it back when it has recovered."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.autopilot.proposal import Proposal
from trimaran.core import Decision, Recipe
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.rules.balance import slow_computer
from trimaran.doctor.step_breakdown import step_breakdown
from trimaran.launch.supervise.next_attempt import resized
from trimaran.runs.left_out_nodes import LEFT_OUT_FIELD, has_recovered, speedup_of

MIN_UNCERTAINTY = 0.05  # of a step
MIN_RETURN_GAIN = 0.05  # of a step, for a start of all ranks
SLOW_RATIO, SLOW_RANKS = "slow_ratio", "slow_ranks"  # of a decision's baseline


def without_slow_node(
    evidence: Evidence, settings: Mapping[str, Any], *, instead: Sequence[Proposal] = ()
) -> list[Proposal]:
    """Return the proposal to leave the slowest rank's node out; none if the recipe or the planner do not allow it.

    The others do its work: the global batch stays. `instead` are other answers to the slow rank, which keep the node:
    leaving it out must be better than these.
    """
    slow, measured, plan = slow_computer(evidence), step_breakdown(evidence), evidence.plan
    hosts = hosts_of_ranks(evidence)
    if slow is None or measured is None or LEFT_OUT_FIELD not in settings or slow.rank not in hosts:
        return []
    host, size = hosts[slow.rank], plan.mesh.world_size
    left = size - sum(each == host for each in hosts.values())
    fewest = evidence.recipe.faults.ranks[0] if evidence.recipe.faults.ranks else size
    if not fewest <= left < size or resized(plan, evidence.recipe, left) is None:
        return []
    compute = measured.compute + measured.straggler  # of the slowest rank
    gain = compute * (1 - size / left / slow.ratio) / measured.step
    if gain <= max((each.gain for each in instead), default=0.0):
        return []
    undo: dict[str, Any] = {LEFT_OUT_FIELD: settings[LEFT_OUT_FIELD]}
    return [
        Proposal(
            patch={LEFT_OUT_FIELD: sorted({*settings[LEFT_OUT_FIELD], host})},
            undo=undo,
            gain=gain,
            uncertainty=max(MIN_UNCERTAINTY, gain / 3),
            reason=f"rank {slow.rank} computes {slow.ratio:.1f} times as long as the others; leave {host} out: "
            f"{left} of {size} ranks go on",
            finding="F005",
            is_measured=True,
            facts={SLOW_RATIO: slow.ratio, SLOW_RANKS: size - left},
        )
    ]


def with_recovered_node(
    evidence: Evidence,
    settings: Mapping[str, Any],
    *,
    decisions: Sequence[Decision],
    speeds: Mapping[str, Sequence[float]],
) -> list[Proposal]:
    """Return the proposals to take left-out nodes back that are clearly faster than when they were left out.

    `speeds` are measured while the nodes are idle, see `node_speeds.py`. A node that a person has left out stays out.
    """
    measured, plan, recipe = step_breakdown(evidence), evidence.plan, evidence.recipe
    left_out, now, found = settings.get(LEFT_OUT_FIELD, []), plan.mesh.world_size, list[Proposal]()
    if measured is None:
        return []
    for host in left_out:
        cause = _why_left_out(host, decisions)
        if cause is None or not has_recovered(speeds.get(host, ())):
            continue
        size = now + int(cause.baseline.get(SLOW_RANKS, 0))
        if size == now or not _may_have(recipe, size) or resized(plan, recipe, size) is None:
            continue
        speedup = speedup_of(speeds[host])
        ratio = max(1.0, cause.baseline.get(SLOW_RATIO, 1.0) / speedup)  # of its compute to that of the others
        gain = measured.compute * (1 - now / size * ratio) / measured.step
        if gain < MIN_RETURN_GAIN:
            continue
        found.append(
            Proposal(
                patch={LEFT_OUT_FIELD: sorted({*left_out} - {host})},
                undo={LEFT_OUT_FIELD: [*left_out]},
                gain=gain,
                uncertainty=max(MIN_UNCERTAINTY, gain / 2),
                reason=f"{host} computes {speedup:.1f} times as fast as when decision {cause.id} left it out; take it "
                f"back: {size} ranks instead of {now}",
                finding="F005",
                is_measured=True,
            )
        )
    return found


def _why_left_out(host: str, decisions: Sequence[Decision]) -> Decision | None:
    """Return the last decision that left a node out; None if a person did."""
    added = (
        each
        for each in reversed(decisions)
        if each.outcome == "kept"
        and host in each.patch.get(LEFT_OUT_FIELD, ())
        and host not in each.undo[LEFT_OUT_FIELD]
    )
    return next(added, None)


def _may_have(recipe: Recipe, size: int) -> bool:
    fewest, most = recipe.faults.ranks or (size, size)
    return fewest <= size <= most


def hosts_of_ranks(evidence: Evidence) -> dict[int, str]:
    """Return the host of each rank of the newest attempt."""
    starts = evidence.events_of_kind("start")
    newest = max((int(each.get("attempt") or 0) for each in starts), default=0)
    return {
        int(each["rank"]): str(each["data"]["host"])
        for each in starts
        if each.get("attempt") == newest and isinstance(each.get("data"), dict) and "host" in each["data"]
    }
