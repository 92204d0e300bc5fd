"""Prepares the next attempt: a plan that fits the nodes and avoids the last fault, and the ranks' environment."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from trimaran.core import Incident, Plan, Recipe
from trimaran.core.regular_files import read_regular_text
from trimaran.launch.supervise.node import AttemptSpec, Node
from trimaran.launch.supervise.oom_recovery import allocator_after_ooms, recover_from_oom
from trimaran.launch.supervise.recovery_policy import PolicyDecision, RecoveryOptions
from trimaran.launch.supervise.replan import full_size, resized, smaller_sizes, with_prediction
from trimaran.runs import RunDirectory, append_line
from trimaran.runs.attempts import read_attempts
from trimaran.runs.change_request import replace_plan

log = logging.getLogger(__name__)


class Rendezvous(Protocol):
    """The address and token of the store that the ranks of an attempt join, and their environment."""

    store: str
    token: str

    def environment(self, plan: Plan) -> Mapping[str, str]:
        """Return the variables of the ranks of `plan` on every node, on top of the node's own environment."""
        ...


def attempt_spec(run: RunDirectory, plan: Plan, rendezvous: Rendezvous, *, attempt: int) -> AttemptSpec:
    """Return the spec for all ranks of `plan`; each node gets its part of it."""
    size = plan.mesh.world_size
    return AttemptSpec(
        attempt=attempt,
        first_rank=0,
        num_ranks=size,
        world_size=size,
        store=rendezvous.store,
        token=rendezvous.token,
        environment={**rendezvous.environment(plan), **allocator_after_ooms(run)},
    )


def fit_plan(run: RunDirectory, nodes: Sequence[Node], *, world_size: int | None = None) -> str:
    """Give the run a plan for `world_size` ranks, or for as many as the nodes hold. Returns an error text, or "".

    A plan that already fits stays. If there is no plan for that many ranks, the next smaller number is tried.
    """
    plan, recipe, capacity = run.read_plan(), run.read_recipe(), sum(node.num_ranks for node in nodes)
    size = min(world_size or plan.mesh.world_size, capacity)
    if size == plan.mesh.world_size:
        return ""
    fewest = recipe.faults.ranks[0] if recipe.faults.ranks else 1
    new = next((new for each in range(size, fewest - 1, -1) if (new := resized(plan, recipe, each))), None)
    if new is None:
        return f"there is no plan for {fewest} to {size} ranks"
    replace_plan(run, new)
    return ""


def read_resize_request(run: RunDirectory, nodes: Sequence[Node]) -> int | None:
    """Return the number of ranks in the `resize` file; None if there is none, or no plan exists for it."""
    if not run.resize_request.exists():
        return None
    text = read_regular_text(run.resize_request, errors="replace").strip()
    if not text:
        return None  # being written
    plan, recipe, capacity = run.read_plan(), run.read_recipe(), sum(node.num_ranks for node in nodes)
    now = plan.mesh.world_size
    fewest, most = recipe.faults.ranks or (now, now)
    size = int(text[:9]) if text.isascii() and text.isdigit() else 0
    if size != now and fewest <= size <= min(most, capacity) and resized(plan, recipe, size):
        return size
    log.warning("resize to %r is refused: %d to %d ranks are possible, if a plan exists for them; there are %d now",
                text[:20], fewest, min(most, capacity), now)  # fmt: skip
    run.resize_request.unlink()
    return None


def larger_size(run: RunDirectory, *, capacity: int) -> int | None:
    """Return the largest number of ranks above the plan's that `capacity`, the recipe and the planner allow."""
    plan, recipe = run.read_plan(), run.read_recipe()
    now, most = plan.mesh.world_size, recipe.faults.ranks[1] if recipe.faults.ranks else full_size(recipe)
    return next((size for size in range(min(capacity, most), now, -1) if resized(plan, recipe, size)), None)


class GrowthPlanner:
    """Finds a larger number of ranks if more nodes are here than the plan is for.

    `growth` returns how many ranks are possible if more nodes are present than the given ones; None if not.
    """

    def __init__(self, run: RunDirectory, growth: Callable[[Sequence[Node]], int | None]) -> None:
        self._run, self._growth = run, growth
        self._has_started = False
        self._planned_capacity = 0

    def size_at_start(self, nodes: Sequence[Node]) -> int | None:
        """Return the number of ranks for the first start, on `nodes`; None for that of the plan, and later.

        More nodes may be here than the plan is for if some were lost before, or if they join an elastic run.
        """
        self._planned_capacity = 0
        if self._has_started:
            return None
        self._has_started = True
        may_join = bool(self._run.read_recipe().faults.ranks) or bool(read_attempts(self._run).attempts)
        if not may_join or self._growth(()) is None:
            return None
        return larger_size(self._run, capacity=sum(node.num_ranks for node in nodes))

    def size_with_joined(self, nodes: Sequence[Node]) -> int | None:
        """Return the number of ranks to continue with if nodes have joined those that run; None if they do not help."""
        capacity = self._growth(nodes)
        if capacity is None or capacity == self._planned_capacity:
            return None
        self._planned_capacity = capacity  # planned once for each capacity: the answer stays the same
        return larger_size(self._run, capacity=capacity)


def recovery_options(run: RunDirectory, recipe: Recipe) -> RecoveryOptions:
    """Return the changes that are still possible for the run."""
    plan = run.read_plan()
    change = recover_from_oom(run, recipe)
    smaller = next((size for size in smaller_sizes(plan, recipe) if resized(plan, recipe, size)), None)
    quarantined = len(read_regular_text(run.quarantine).splitlines()) if run.quarantine.exists() else 0
    return RecoveryOptions(
        world_size=plan.mesh.world_size,
        smaller=smaller,
        less_memory=change.why if change else None,
        allocator=change.allocator if change else "",
        quarantined=quarantined,
        last_step=recipe.train.steps,
    )


def apply_decision(run: RunDirectory, recipe: Recipe, decision: PolicyDecision, incident: Incident) -> None:
    """Change the plan and the quarantine in the run directory as `decision` says, for the next attempt."""
    plan = run.read_plan()
    if decision.action == "replanned" and not decision.allocator:
        if (change := recover_from_oom(run, recipe)) and change.plan is not None:
            replace_plan(run, with_prediction(change.plan, recipe))
    elif decision.action == "resized" and decision.world_size and (new := resized(plan, recipe, decision.world_size)):
        replace_plan(run, new)
    for sample in decision.samples:
        line = {"sample": sample, "reason": incident.what, "step": incident.step}
        append_line(run.quarantine, line, reserve=run.reserve)
