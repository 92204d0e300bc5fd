"""Prepares the next attempt: a plan that fits the nodes and avoids the last fault, and the ranks' environment.

After an OOM the allocator gets expandable segments if memory was fragmented, else the plan takes a rung of the memory
ladder. The planner is imported only then: most runs need no new plan.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trimaran.core import Comm, Incident, Mesh, Plan, Recipe, UserError, read_regular_text, show_bytes
from trimaran.launch.supervise.node import Node
from trimaran.launch.supervise.recovery_policy import PolicyDecision, RecoveryOptions
from trimaran.machine import Cluster
from trimaran.machine.parse_cluster import cluster_of as cluster_in
from trimaran.machine.parse_cluster import full_cluster
from trimaran.runs import RunDirectory, append_line, read_attempts, read_incidents, replace_plan
from trimaran.runs.fault_texts import HOST_RAN_OUT
from trimaran.runs.rank_environment import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS

log = logging.getLogger(__name__)

# Fields that change the results of training, not only how they are computed. They stay as they were.
FIXED_FIELDS = ("precision", "engine", "comm")


def less_memory(plan: Plan, recipe: Recipe, *, may_offload: bool = True) -> tuple[Plan, str] | None:
    """Return the plan to continue with after an OOM, and what changes; None if nothing is left to change."""
    from trimaran.planner.change_plan import question_of  # noqa: PLC0415
    from trimaran.planner.memory_ladder import next_rung  # noqa: PLC0415

    try:
        question = question_of(recipe, plan.mesh.world_size, os.environ)
    except UserError:
        question = None
    return next_rung(plan, question, may_offload=may_offload)


def with_prediction(plan: Plan, recipe: Recipe) -> Plan:
    """Return `plan` with its prediction, if the model's outline is known. Raises if the plan is not valid."""
    from trimaran.planner import change_plan  # noqa: PLC0415

    return change_plan.with_prediction(plan, recipe, os.environ)


def smaller_sizes(plan: Plan, recipe: Recipe) -> range:
    """Return the world sizes below the plan's that the recipe allows, the largest first."""
    fewest = recipe.faults.ranks[0] if recipe.faults.ranks else plan.mesh.world_size
    return range(plan.mesh.world_size - 1, fewest - 1, -1)


def resized(plan: Plan, recipe: Recipe, world_size: int) -> Plan | None:
    """Return the best plan for `world_size` ranks with the same results as `plan`; None if there is none."""
    from trimaran.models import outline_if_known, spec_of  # noqa: PLC0415
    from trimaran.models.hf_facts import HfFacts, cached_facts  # noqa: PLC0415
    from trimaran.planner import choose  # noqa: PLC0415

    try:
        cluster = cluster_of(recipe, world_size)
    except UserError:
        return None
    spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
    facts = cached_facts(recipe.model, os.environ)
    if facts is None and recipe.model.kind.is_hf:  # it is not known what our trainer can do; the axes of `plan` work
        unknown = UserError("M026.whether-model-supports", where="plan.mesh")
        facts = HfFacts(
            without_tp=unknown if plan.mesh.tp == 1 else None,
            without_cp=unknown if plan.mesh.cp == 1 else None,
            has_fp8_layers=plan.precision == "fp8",
        )
    for pins in _looser(recipe.plan if isinstance(recipe.plan, Plan) else Plan(), plan):
        try:
            return choose(recipe.model_copy(update={"plan": pins}), spec, cluster, outline, facts)
        except UserError:
            continue
    return None


def _looser(pins: Plan, plan: Plan) -> Iterator[Plan]:
    """Yield the user's pinned fields, with fewer and fewer of those that depend on the number of ranks."""
    # `overlap` changes no results, and only full replicas do without it.
    pinned = {"overlap": pins.comm.overlap} if "overlap" in pins.comm.model_fields_set else {}
    comm = Comm.model_validate(plan.comm.model_dump(exclude={"overlap"}) | pinned)
    fixed = {name: getattr(plan, name) for name in FIXED_FIELDS} | {"comm": comm}
    tree = {name: getattr(pins, name) for name in pins.model_fields_set - {"prediction"}} | fixed
    yield Plan(**tree)
    batch = {name: value for name, value in tree.items() if name not in ("micro_batch", "grad_accum")}
    if pins.rows_by_rank:  # of as many data ranks as there were
        del batch["micro_batches"]
    inner = {axis: getattr(pins.mesh, axis) for axis in pins.mesh.model_fields_set - {"dp_replicate", "dp_shard"}}
    yield Plan(**batch | {"mesh": Mesh(**inner)})
    yield Plan(**{name: value for name, value in batch.items() if name not in ("mesh", "pipeline", "sharding")})


def cluster_of(recipe: Recipe, world_size: int) -> Cluster:
    """Return the part of the recipe's cluster that `world_size` ranks use."""
    return cluster_in(recipe, world_size, os.environ)


@dataclass(frozen=True, slots=True, kw_only=True)
class OomRecovery:
    """The change after an OOM: another plan, or other settings of the allocator. `why` is a sentence for a person."""

    why: str
    plan: Plan | None = None
    allocator: str = ""


def recover_from_oom(run: RunDirectory, recipe: Recipe) -> OomRecovery | None:
    """Return what to change after the run's last OOM; None if nothing is left to change."""
    # The global batch stays. If the host ran out of memory, nothing is offloaded to it.
    from trimaran.planner.memory_ladder import may_expand_segments  # noqa: PLC0415  as in `replan`

    plan, last = run.read_plan(), next((each for each in reversed(read_incidents(run)) if each.cause == "oom"), None)
    is_set = any(name in os.environ for name in ALLOCATOR_VARIABLES) or allocator_after_ooms(run)
    if last is not None and not is_set:
        holes, wanted = (float(last.evidence.get(name) or 0.0) for name in ("hole_bytes", "wanted_bytes"))
        if may_expand_segments(plan, hole_bytes=holes, wanted_bytes=wanted):
            why = f"memory was fragmented: {show_bytes(holes)} were free in pieces, {show_bytes(wanted)} were wanted; "
            return OomRecovery(why=f"{why}the allocator gets {EXPANDABLE_SEGMENTS}", allocator=EXPANDABLE_SEGMENTS)
    change = less_memory(plan, recipe, may_offload=last is None or HOST_RAN_OUT not in last.what)
    return OomRecovery(why=change[1], plan=change[0]) if change else None


def allocator_after_ooms(run: RunDirectory, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the allocator's variable for the ranks if an OOM of this run changed it; the user's own setting wins."""
    if any(name in outer for name in ALLOCATOR_VARIABLES):
        return {}
    changed = [each.evidence["allocator"] for each in read_incidents(run) if each.evidence.get("allocator")]
    return {ALLOCATOR_VARIABLES[0]: str(changed[-1])} if changed else {}


def fit_plan(run: RunDirectory, nodes: Sequence[Node], *, world_size: int | None = None) -> str:
    """Give the run a plan for `world_size` ranks, or for as many as the nodes hold. Returns an error text, or ""."""
    # A plan that already fits stays. If there is no plan for that many ranks, the next smaller number is tried.
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
    now = plan.mesh.world_size
    most = recipe.faults.ranks[1] if recipe.faults.ranks else full_cluster(recipe, os.environ).world_size
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
        """Return the number of ranks for the first start, on `nodes`; None for that of the plan, and later."""
        # More nodes may be here than the plan is for if some were lost before, or if they join an elastic run.
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
    return RecoveryOptions(
        world_size=plan.mesh.world_size,
        smaller=next((size for size in smaller_sizes(plan, recipe) if resized(plan, recipe, size)), None),
        less_memory=change.why if change else None,
        allocator=change.allocator if change else "",
        quarantined=len(read_regular_text(run.quarantine).splitlines()) if run.quarantine.exists() else 0,
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
