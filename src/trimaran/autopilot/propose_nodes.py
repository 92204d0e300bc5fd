"""Leaving a slow node out: if a rank is so slow that the others are faster without its node."""

from collections.abc import Mapping, Sequence
from typing import Any

from trimaran.autopilot.proposal import Proposal
from trimaran.doctor.evidence import Evidence
from trimaran.doctor.rules.speed.straggler import slow_computer
from trimaran.doctor.step_breakdown import step_breakdown
from trimaran.launch.replan import resized
from trimaran.run.left_out_nodes import LEFT_OUT_FIELD

MIN_UNCERTAINTY = 0.05  # of a step


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
        )
    ]


def hosts_of_ranks(evidence: Evidence) -> dict[int, str]:
    """Return the host of each rank of the newest attempt."""
    starts = evidence.events_of_kind("start")
    newest = max((int(each.get("attempt") or 0) for each in starts), default=0)
    return {
        int(each["rank"]): str(each["data"]["host"])
        for each in starts
        if each.get("attempt") == newest and isinstance(each.get("data"), dict) and "host" in each["data"]
    }
