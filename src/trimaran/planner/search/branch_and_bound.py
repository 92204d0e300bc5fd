"""Branch and bound: finds the fastest plans of a space, in the order of lower bounds of their step time."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from trimaran.core import Plan
from trimaran.core.plan import CONTEXTS, SHARDINGS
from trimaran.planner.plan_choices import CHUNKED
from trimaran.planner.rules.legal import is_legal
from trimaran.planner.search.evaluator import PlanEvaluator
from trimaran.planner.search.space import (
    OFFLOADS,
    Candidate,
    MeshSplit,
    MicrobatchSplit,
    RecomputeChoice,
    Space,
    StateSharding,
)

TIE_RATIO = 1.05  # within 5 % the cost model cannot tell which plan is faster, so the simpler one wins
NEARLY_FULL_FRACTION = 0.88  # of device memory; above it the allocator retries and steps may get slow (nanotron's runs)
MAX_SPLITS_WITHOUT_GAIN = 48  # in a row; then the quick pass ends and the exact one begins
NUM_EXTRA_MESHES = 2  # searched besides those to be shown, because the quick pass ranks them only roughly
MAX_SPLITS_PER_MESH = 12  # searched exactly for such a mesh; those with the lowest bounds often do not fit
NO_RECOMPUTE = RecomputeChoice("none")


class FoundPlan(NamedTuple):
    """A plan that fits, its step time, whether its device is nearly full, and the pinned fraction of host memory."""

    seconds: float
    plan: Plan
    is_nearly_full: bool = False
    pinned_fraction: float = 0.0


@dataclass(slots=True)
class FoundPlans:
    """The plans that fit, by mesh, with the best step time so far."""

    max_seconds: float = math.inf  # slower plans are ignored
    by_mesh: dict[tuple[int, ...], list[FoundPlan]] = field(default_factory=dict)
    best_seconds: float = math.inf
    winner: FoundPlan | None = None  # set before other meshes are searched, so that they cannot replace it

    def __post_init__(self) -> None:
        self.best_seconds = self.max_seconds

    def is_useful(self, found: FoundPlan) -> bool:
        """Return whether no plan of the same mesh is faster and simpler, or much faster."""
        own = complexity(found)
        same_mesh = self.by_mesh.get(mesh_key_of(found.plan), ())
        return not any(
            each.seconds * TIE_RATIO < found.seconds or (each.seconds <= found.seconds and complexity(each) <= own)
            for each in same_mesh
        )

    def add(self, found: FoundPlan) -> None:
        self.by_mesh.setdefault(mesh_key_of(found.plan), []).append(found)
        self.best_seconds = min(self.best_seconds, found.seconds)

    def ranked(self) -> list[FoundPlan]:
        """Return the best plan of each mesh, fastest first; first of all the simplest that ties with the fastest."""
        simplest = sorted(map(simplest_of, self.by_mesh.values()), key=lambda each: (each.seconds, complexity(each)))
        if not simplest:
            return []
        first = self.winner or simplest_of([found for founds in self.by_mesh.values() for found in founds])
        return [first, *(each for each in simplest if mesh_key_of(each.plan) != mesh_key_of(first.plan))]


def simplest_of(founds: list[FoundPlan]) -> FoundPlan:
    """Return the simplest of the plans that tie with the fastest."""
    least = min(found.seconds for found in founds)
    tied = [found for found in founds if found.seconds <= TIE_RATIO * least]
    return min(tied, key=lambda found: (complexity(found), found.seconds))


class Complexity(NamedTuple):
    """How complex a plan is: of two plans that tie, the lesser one is chosen. The first fields count most."""

    pinned_tenths: int  # of the host memory that may be pinned
    model_axes: int
    is_nearly_full: bool
    offload: int
    towers: int
    recompute: int
    regathers: bool
    is_chunked: bool
    sharding: int
    has_replicas_of_shards: bool
    pp: int
    stages_per_rank: int
    tp: int
    cp: int
    ep: int
    dp_shard: int
    context: int
    reduces_late: bool


def complexity(found: FoundPlan) -> Complexity:
    """Return how complex a plan is."""
    plan, mesh = found.plan, found.plan.mesh
    return Complexity(
        pinned_tenths=math.ceil(10 * found.pinned_fraction),
        model_axes=num_model_axes(mesh_key_of(plan)),
        is_nearly_full=found.is_nearly_full,
        offload=OFFLOADS.index(plan.offload),
        towers=len(plan.towers),
        recompute={"none": 0, "elementwise": 1, "selective": 2, "full": 4}.get(str(plan.recompute), 3),
        regathers=plan.comm.regather,
        is_chunked=plan.loss == CHUNKED,
        sharding=SHARDINGS.index(plan.sharding),
        has_replicas_of_shards=mesh.dp_replicate > 1 and mesh.dp_shard > 1,
        pp=mesh.pp,
        stages_per_rank=plan.num_stages // mesh.pp,
        tp=mesh.tp,
        cp=mesh.cp,
        ep=mesh.ep,
        dp_shard=mesh.dp_shard,
        context=CONTEXTS.index(plan.comm.context),
        reduces_late=not plan.comm.overlap,
    )


def find_plans(space: Space, evaluator: PlanEvaluator, *, limit: float = math.inf, others: int = 0) -> FoundPlans:
    """Return the fastest plan of the space that fits, and the best plans of up to `others` more meshes.

    Plans slower than `limit` seconds are ignored. Splits are searched by their lower bounds, lowest first: first per
    micro-batch, then with a pipeline. Once a bound exceeds the best plan, nothing left can beat it. A quick pass tries
    few plans of each split, so that the exact pass soon has a good plan to prune with.
    """
    found_plans = FoundPlans(max_seconds=limit)
    microbatches = sorted(
        (_microbatch_bound(space, evaluator, microbatch), microbatch) for microbatch in space.microbatch_splits()
    )
    if (
        not microbatches
        or microbatches[0][0] > limit
        or not any((evaluator.memory_use(evaluator.memory(plan)) <= 1) for plan in least_memory_plans(space))
    ):
        return found_plans
    _quick_pass(space, evaluator, found_plans, microbatches)
    for split in by_lower_bound(space, evaluator, microbatches):
        if evaluator.lower_bound(split) > found_plans.best_seconds * TIE_RATIO:
            break
        # A split with several axes must be faster; a tie is not enough.
        limit = found_plans.best_seconds * (TIE_RATIO if num_model_axes(mesh_key(split)) <= 1 else 1)
        if evaluator.lower_bound(split) <= limit:
            _try_all(space, evaluator, found_plans, split, limit)
    if others and found_plans.by_mesh:
        _search_other_meshes(space, evaluator, found_plans, microbatches, others)
    return found_plans


def _search_other_meshes(
    space: Space,
    evaluator: PlanEvaluator,
    found_plans: FoundPlans,
    microbatches: list[tuple[float, MicrobatchSplit]],
    others: int,
) -> None:
    """Add the best plans of other meshes than the winner's: a quick pass over some, then an exact one over the best."""
    found_plans.winner = found_plans.ranked()[0]
    meshes, tries_left = others + NUM_EXTRA_MESHES, 4 * others
    for split in by_lower_bound(space, evaluator, microbatches):
        if len(found_plans.by_mesh) > meshes or not tries_left:
            break
        if mesh_key(split) not in found_plans.by_mesh:
            tries_left -= 1
            _try_few(space, evaluator, found_plans, split)
    for found in found_plans.ranked()[1 : meshes + 1]:
        shown, key = found_plans.ranked()[: others + 1], mesh_key_of(found.plan)
        limit = min(found.seconds, shown[-1].seconds if len(shown) > others else math.inf)
        _search_mesh(space, evaluator, FoundPlans(by_mesh={key: found_plans.by_mesh[key]}, max_seconds=limit), key)


def _search_mesh(space: Space, evaluator: PlanEvaluator, found_plans: FoundPlans, key: tuple[int, ...]) -> None:
    """Try all plans of those splits of one mesh that may beat what was found."""
    tp, pp, cp, ep = key
    splits = [
        split
        for microbatch in space.microbatch_splits_on(tp, cp, ep)
        for split in space.mesh_splits(microbatch)
        if split.pp == pp
    ]
    splits_left = MAX_SPLITS_PER_MESH
    for split in sorted(splits, key=evaluator.quick_bound):
        if evaluator.quick_bound(split) > found_plans.best_seconds or not splits_left:
            break
        if evaluator.lower_bound(split) <= found_plans.best_seconds:
            splits_left -= 1
            _try_all(space, evaluator, found_plans, split, found_plans.best_seconds)


def _quick_pass(
    space: Space, evaluator: PlanEvaluator, found_plans: FoundPlans, microbatches: list[tuple[float, MicrobatchSplit]]
) -> None:
    """Try few plans of each split, until many in a row bring no gain."""
    without_gain = 0
    for split in by_lower_bound(space, evaluator, microbatches):
        least = found_plans.best_seconds
        if evaluator.lower_bound(split) > least or without_gain == MAX_SPLITS_WITHOUT_GAIN:
            return
        _try_few(space, evaluator, found_plans, split)
        without_gain = 0 if found_plans.best_seconds < least or not found_plans.by_mesh else without_gain + 1


def by_lower_bound(
    space: Space, evaluator: PlanEvaluator, microbatches: list[tuple[float, MicrobatchSplit]]
) -> Iterator[MeshSplit]:
    """Yield all splits, lowest bound first. An expensive bound is computed only when it may be the lowest."""
    order = count()
    heap: list[tuple[float, int, MicrobatchSplit | MeshSplit, bool]] = [
        (bound, next(order), microbatch, False) for bound, microbatch in microbatches
    ]
    heapq.heapify(heap)
    while heap:
        _, _, entry, is_exact = heapq.heappop(heap)
        if isinstance(entry, MicrobatchSplit):
            for split in space.mesh_splits(entry):
                heapq.heappush(heap, (evaluator.quick_bound(split), next(order), split, split.pp == 1))
        elif is_exact:
            yield entry
        else:
            heapq.heappush(heap, (evaluator.lower_bound(entry), next(order), entry, True))


def _microbatch_bound(space: Space, evaluator: PlanEvaluator, microbatch: MicrobatchSplit) -> float:
    """Return a lower bound for plans with such micro-batches: all devices busy all the time."""
    question = space.question
    choice = RecomputeChoice(space.pins.recompute) if space.pinned("recompute") or space.pins.towers else NO_RECOMPUTE
    groups = question.cluster.world_size / (microbatch.tp * microbatch.cp)
    return (
        evaluator.micro_batch_seconds(microbatch, choice)
        * question.recipe.train.global_batch
        / microbatch.micro_batch
        / groups
    )


def _try_few(space: Space, evaluator: PlanEvaluator, found_plans: FoundPlans, split: MeshSplit) -> None:
    """Try a few plans of the split: with no or full sharding, and with no or full recompute.

    Offload is left to the exact pass, unless it is pinned.
    """
    choices = [
        choice
        for choice in space.recompute_choices(split)
        if not choice.towers and not isinstance(choice.recompute, int)
    ]
    choices = choices or list(space.recompute_choices(split))
    offload = space.offloads()[0]
    all_states = [
        states
        for states in space.state_shardings(split)
        if not states.towers and space.supports(split, states, offload)
    ]
    most = max((states.dp_shard for states in all_states), default=1)
    few = [states for states in all_states if states.dp_shard in (1, most) and states.sharding != "gradients"]
    if not few or not _least_memory_fits(evaluator, Candidate(split, few[-1], offload), choices):
        return
    for states in few:
        if _least_memory_fits(evaluator, Candidate(split, states, offload), choices):
            _add_fastest(space, evaluator, found_plans, Candidate(split, states, offload), choices)


def mesh_key(split: MeshSplit) -> tuple[int, ...]:
    """Return the degrees that identify a mesh, whatever its data ranks shard."""
    return split.microbatch.tp, split.pp, split.microbatch.cp, split.microbatch.ep


def num_model_axes(key: tuple[int, ...]) -> int:
    """Return how many axes besides data parallelism are in use."""
    return sum(degree > 1 for degree in key)


def mesh_key_of(plan: Plan) -> tuple[int, ...]:
    """Return the degrees that identify the mesh of a plan."""
    mesh = plan.mesh
    return mesh.tp, mesh.pp, mesh.cp, mesh.ep


def _try_all(space: Space, evaluator: PlanEvaluator, found_plans: FoundPlans, split: MeshSplit, limit: float) -> None:
    """Try every sharding of the split that may take at most `limit` seconds.

    Each is tried with as little recompute and offload as it needs to fit.
    """
    choices = [choice for choice in space.recompute_choices(split) if evaluator.recompute_bound(split, choice) <= limit]
    choices.sort(key=lambda choice: (evaluator.micro_batch_seconds(split.microbatch, choice, split.pp), str(choice)))
    offloads = _fitting_offloads(space, evaluator, split, choices) if choices else []
    too_big: set[tuple[object, ...]] = set()
    for states in reversed(space.state_shardings(split)) if offloads else ():
        kind = states.sharding, states.towers, states.overlap
        if kind in too_big or evaluator.sharding_bound(split, states) > limit:
            continue
        if not _try_offloads(
            space, evaluator, found_plans, [Candidate(split, states, offload) for offload in offloads], choices, limit
        ):
            too_big.add(kind)  # fewer shards, which follow, need even more memory


def _try_offloads(
    space: Space,
    evaluator: PlanEvaluator,
    found_plans: FoundPlans,
    candidates: list[Candidate],
    choices: list[RecomputeChoice],
    limit: float,
) -> bool:
    """Try the recompute choices of one sharding, offload by offload, and return whether any fits.

    Offload only pays if less is then recomputed, or if the device is nearly full.
    """
    fits, ceiling = False, math.inf
    for candidate in candidates:
        split = candidate.split
        cheaper = [
            choice for choice in choices if evaluator.micro_batch_seconds(split.microbatch, choice, split.pp) < ceiling
        ]
        if candidate.offload != "none":
            cheaper = [choice for choice in cheaper if evaluator.offload_bound(candidate, choice) <= limit]
        if not cheaper or not _least_memory_fits(evaluator, candidate, cheaper):
            continue
        fits, most = True, found_plans.best_seconds * TIE_RATIO
        # The bound is expensive, and the first choices are often enough.
        useful = (
            choice
            for choice in cheaper
            if candidate.offload != "activations" or evaluator.activation_offload_bound(split, choice) <= most
        )
        choice = _add_fastest(space, evaluator, found_plans, candidate, useful)
        fitting = evaluator.fitting_plan(candidate, choice) if choice else None
        if (
            choice
            and fitting
            and candidate.offload == "none"
            and not is_not_monotonic(candidate, choice)
            and not evaluator.slowdown(fitting[1])
        ):
            ceiling = evaluator.micro_batch_seconds(split.microbatch, choice, split.pp)
    return fits


def _fitting_offloads(
    space: Space, evaluator: PlanEvaluator, split: MeshSplit, choices: list[RecomputeChoice]
) -> list[str]:
    """Return the offloads with which the split fits at all: with full sharding and full recompute.

    A device holds the least states if parameters are offloaded. If even that exceeds the device, only offloaded
    activations can help.
    """
    fitting = []
    for offload in reversed(space.offloads()):
        candidates = [
            Candidate(split, states, offload) for states in least_memory_shardings(space, split, offload)[-1:]
        ]
        if any(_least_memory_fits(evaluator, candidate, choices) for candidate in candidates):
            fitting.append(offload)
        elif (
            offload == "parameters"
            and candidates
            and all(evaluator.exceeds_device(candidates[0], each) for each in least_memory_recomputes(choices))
        ):
            more = [
                Candidate(split, states, "activations")
                for states in least_memory_shardings(space, split, "activations")[-1:]
            ]
            return (
                ["activations"] if any(_least_memory_fits(evaluator, candidate, choices) for candidate in more) else []
            )
    return [offload for offload in space.offloads() if offload in fitting]


def least_memory_shardings(space: Space, split: MeshSplit, offload: str) -> list[StateSharding]:
    """Return the shardings over the most ranks; one of them needs the least memory. The last one shards the most."""
    all_states = [
        states
        for states in space.state_shardings(split)
        if not states.towers and space.supports(split, states, offload)
    ]
    most = max((states.dp_shard for states in all_states), default=1)
    return [states for states in all_states if states.dp_shard == most]


def _least_memory_fits(evaluator: PlanEvaluator, candidate: Candidate, choices: list[RecomputeChoice]) -> bool:
    return any(evaluator.fitting_plan(candidate, choice) for choice in least_memory_recomputes(choices))


def least_memory_recomputes(choices: Sequence[RecomputeChoice]) -> list[RecomputeChoice]:
    """Return the choices of which one saves the fewest activations: full recompute, or the closest to it."""
    full = [choice for choice in choices if choice.recompute == "full" and not choice.towers]
    strided = [choice for choice in choices if isinstance(choice.recompute, int)]
    rest = [choice for choice in choices if not isinstance(choice.recompute, int) and choice.recompute != "none"]
    return full or [*rest, *sorted(strided)[:1]] or list(choices)


def _add_fastest(
    space: Space,
    evaluator: PlanEvaluator,
    found_plans: FoundPlans,
    candidate: Candidate,
    choices: Iterable[RecomputeChoice],
) -> RecomputeChoice | None:
    """Add the fastest recompute choice that fits and is legal, and return it. `choices` come by their lower bounds."""
    best_seconds, fastest = math.inf, None
    for choice in choices:
        if evaluator.recompute_bound(candidate.split, choice) >= best_seconds:
            break
        if (fitting := evaluator.fitting_plan(candidate, choice)) is None:
            continue
        plan, memory = fitting
        is_nearly_full = evaluator.occupancy(memory) > NEARLY_FULL_FRACTION
        pinned = memory.host / evaluator.cluster.host_bytes
        found = FoundPlan(evaluator.candidate_seconds(candidate, choice, memory), plan, is_nearly_full, pinned)
        if found_plans.is_useful(found):
            if not is_legal(plan, space.question):
                continue
            found_plans.add(found)
        if found.seconds < best_seconds:
            best_seconds, fastest = found.seconds, choice
        if not evaluator.slowdown(memory) and not is_not_monotonic(candidate, choice):
            break
    return fastest


def is_not_monotonic(candidate: Candidate, choice: RecomputeChoice) -> bool:
    """Return whether a choice that recomputes more may still be faster.

    Pipeline ranks may recompute different numbers of layers, and recompute leaves fewer activations to offload.
    """
    uneven = candidate.split.pp > 1 and (isinstance(choice.recompute, int) or bool(choice.towers))
    return uneven or candidate.offload == "activations"


def least_memory_plans(space: Space) -> Iterator[Plan]:
    """Yield, for each mesh, plans of which one needs the least memory.

    That is with the smallest micro-batch, the most shards and full recompute. More stages per rank, or a split
    backward, only need more.
    """
    seen: set[tuple[object, ...]] = set()
    for microbatch in sorted(space.microbatch_splits(), key=lambda microbatch: (microbatch.micro_batch, microbatch)):
        for split in space.mesh_splits(microbatch):
            schedule = split.schedule if "schedule" in space.pins.pipeline.model_fields_set else "1f1b"
            key = microbatch.degrees, split.pp
            if key in seen or (split.pp > 1 and split.schedule != schedule):
                continue
            seen.add(key)
            for offload in space.offloads():
                for states in least_memory_shardings(space, split, offload)[-1:]:
                    yield from (
                        space.plan(split, states, choice, offload)
                        for choice in least_memory_recomputes(space.recompute_choices(split))
                    )
