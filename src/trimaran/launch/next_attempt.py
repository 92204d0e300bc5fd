"""What is started next: the plan that fits the machines and what went wrong, and the environment of its ranks."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from trimaran.core import Incident, Plan, Recipe
from trimaran.launch.node import Node, Orders
from trimaran.launch.policy import Means, PolicyDecision
from trimaran.launch.replace_plan import keep_plan
from trimaran.launch.replan import full_size, leaner, resized, smaller_sizes, with_prediction
from trimaran.run import RunDirectory, append_line

log = logging.getLogger(__name__)


class Rendezvous(Protocol):
    """Where the ranks of an attempt meet, and what their environment is under a plan."""

    store: str
    token: str

    def environment(self, plan: Plan) -> Mapping[str, str]:
        """Return what ranks of `plan` find in their environment on every node, on top of the node's own."""
        ...


def orders_for(plan: Plan, meeting: Rendezvous, *, attempt: int) -> Orders:
    """Return the orders for all ranks of `plan`; each node gets its part of them."""
    size = plan.mesh.world_size
    return Orders(
        attempt=attempt,
        first_rank=0,
        num_ranks=size,
        world_size=size,
        store=meeting.store,
        token=meeting.token,
        environment=meeting.environment(plan),
    )


def fit_plan(run: RunDirectory, nodes: Sequence[Node], *, world_size: int | None = None) -> str:
    """Give the run a plan for `world_size` ranks, or for as many as there is room for. Returns why that failed, if so.

    A plan that fits already stays. Where the work cannot be split over all that there is room for, fewer have to do.
    """
    plan, recipe, room = run.read_plan(), run.read_recipe(), sum(node.num_ranks for node in nodes)
    size = min(world_size or plan.mesh.world_size, room)
    if size == plan.mesh.world_size:
        return ""
    fewest = recipe.faults.ranks[0] if recipe.faults.ranks else 1
    new = next((new for each in range(size, fewest - 1, -1) if (new := resized(plan, recipe, each))), None)
    if new is None:
        return f"there is no plan for {fewest} to {size} ranks"
    keep_plan(run, new)
    return ""


def read_wanted_size(run: RunDirectory, nodes: Sequence[Node]) -> int | None:
    """Return the number of ranks that a person asks for in the `resize` file; a number that cannot be is refused."""
    if not run.resize_request.exists():
        return None
    text = run.resize_request.read_text(encoding="utf-8", errors="replace").strip()
    if not text:
        return None  # being written
    plan, recipe, room = run.read_plan(), run.read_recipe(), sum(node.num_ranks for node in nodes)
    now = plan.mesh.world_size
    fewest, most = recipe.faults.ranks or (now, now)
    size = int(text[:9]) if text.isascii() and text.isdigit() else 0
    if size != now and fewest <= size <= min(most, room) and resized(plan, recipe, size):
        return size
    log.warning("resize to %r is refused: %d to %d ranks can be had, where a plan exists for them; there are %d now",
                text[:20], fewest, min(most, room), now)  # fmt: skip
    run.resize_request.unlink()
    return None


def larger_size(run: RunDirectory, *, room: int) -> int | None:
    """Return the largest number of ranks above the plan's that `room`, the recipe and the planner allow."""
    plan, recipe = run.read_plan(), run.read_recipe()
    now, most = plan.mesh.world_size, recipe.faults.ranks[1] if recipe.faults.ranks else full_size(recipe)
    return next((size for size in range(min(room, most), now, -1) if resized(plan, recipe, size)), None)


def means_of(run: RunDirectory, recipe: Recipe) -> Means:
    """Return what the run has left to answer trouble with."""
    plan = run.read_plan()
    lean = leaner(plan)
    smaller = next((size for size in smaller_sizes(plan, recipe) if resized(plan, recipe, size)), None)
    quarantined = len(run.quarantine.read_text(encoding="utf-8").splitlines()) if run.quarantine.exists() else 0
    return Means(
        world_size=plan.mesh.world_size, smaller=smaller, leaner=lean[1] if lean else None, quarantined=quarantined
    )


def repair(run: RunDirectory, recipe: Recipe, course: PolicyDecision, incident: Incident) -> None:
    """Change the run directory as `course` says, so that the next attempt goes on differently."""
    plan = run.read_plan()
    if course.action == "replanned" and (lean := leaner(plan)):
        keep_plan(run, with_prediction(lean[0], recipe))
    elif course.action == "resized" and course.world_size and (new := resized(plan, recipe, course.world_size)):
        keep_plan(run, new)
    for sample in course.samples:
        append_line(run.quarantine, {"sample": sample, "reason": incident.what, "step": incident.step})
