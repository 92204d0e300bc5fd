"""What a run does after an OOM: expandable segments if memory was fragmented, else a rung of the memory ladder."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trimaran.core import Incident, Plan, Recipe, show_bytes
from trimaran.launch.supervise.replan import less_memory
from trimaran.runs import RunDirectory, read_incidents
from trimaran.runs.out_of_memory import HOST_RAN_OUT
from trimaran.runs.rank_environment import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecovery:
    """The change after an OOM: another plan, or other settings of the allocator. `why` is a sentence for a person."""

    why: str
    plan: Plan | None = None
    allocator: str = ""


def recover_from_oom(run: RunDirectory, recipe: Recipe) -> OomRecovery | None:
    """Return what to change after the run's last OOM; None if nothing is left to change.

    The global batch stays. If the host ran out of memory, nothing is offloaded to it.
    """
    plan, last = run.read_plan(), next((each for each in reversed(read_incidents(run)) if each.cause == "oom"), None)
    if last is not None and (found := _expand_segments(run, plan, last)):
        return found
    change = less_memory(plan, recipe, may_offload=last is None or HOST_RAN_OUT not in last.what)
    return OomRecovery(why=change[1], plan=change[0]) if change else None


def allocator_after_ooms(run: RunDirectory, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the allocator's variable for the ranks if an OOM of this run changed it; the user's own setting wins."""
    if any(name in outer for name in ALLOCATOR_VARIABLES):
        return {}
    changed = [each.evidence["allocator"] for each in read_incidents(run) if each.evidence.get("allocator")]
    return {ALLOCATOR_VARIABLES[0]: str(changed[-1])} if changed else {}


def _expand_segments(run: RunDirectory, plan: Plan, last: Incident) -> OomRecovery | None:
    from trimaran.planner.memory_ladder import may_expand_segments  # noqa: PLC0415  as in `replan`

    holes, wanted = (float(last.evidence.get(name) or 0.0) for name in ("hole_bytes", "wanted_bytes"))
    is_set = any(name in os.environ for name in ALLOCATOR_VARIABLES) or allocator_after_ooms(run)
    if is_set or not may_expand_segments(plan, hole_bytes=holes, wanted_bytes=wanted):
        return None
    why = f"memory was fragmented: {show_bytes(holes)} were free in pieces, {show_bytes(wanted)} were wanted; "
    return OomRecovery(why=f"{why}the allocator gets {EXPANDABLE_SEGMENTS}", allocator=EXPANDABLE_SEGMENTS)
