"""Branch and bound: finds the fastest plans of a space, in the order of lower bounds of their step time."""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

from trimaran.core import CONTEXTS, SHARDINGS, Plan
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


class FoundPlan(NamedTuple):
    """A plan that fits, its step time, whether its device is nearly full, and the pinned fraction of host memory."""

    seconds: float
    plan: Plan
    is_nearly_full: bool = False
    pinned_fraction: float = 0.0


@dataclass(slots=True)
class FoundPlans:
    """The plans that fit, by mesh, with the best step time so far."""

    by_mesh: dict[tuple[int, ...], list[FoundPlan]] = field(default_factory=dict)
    best_seconds: float = math.inf  # at first the limit: slower plans are ignored
    winner: FoundPlan | None = None  # set before other meshes are searched, so that they cannot replace it

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
    found_plans = FoundPlans(best_seconds=limit)
    search = _Search(space, evaluator, found_plans)
    microbatches = search.microbatches
    fits = microbatches and microbatches[0][0] <= limit
    if not fits or not any(evaluator.memory_use(evaluator.memory(plan)) <= 1 for plan in least_memory_plans(space)):
        return found_plans
    without_gain = 0
    for split in search.by_lower_bound():  # the quick pass, until many splits in a row bring no gain
        least = found_plans.best_seconds
        if evaluator.lower_bound(split) > least or without_gain == MAX_SPLITS_WITHOUT_GAIN:
            break
        search.try_few(split)
        without_gain = 0 if found_plans.best_seconds < least or not found_plans.by_mesh else without_gain + 1
    for split in search.by_lower_bound():
        if evaluator.lower_bound(split) > found_plans.best_seconds * TIE_RATIO:
            break
        # A split with several axes must be faster; a tie is not enough.
        limit = found_plans.best_seconds * (TIE_RATIO if num_model_axes(_mesh_key(split)) <= 1 else 1)
        if evaluator.lower_bound(split) <= limit:
            search.try_all(split, limit)
    if others and found_plans.by_mesh:
        search.try_other_meshes(others)
    return found_plans


class _Search:
    def __init__(self, space: Space, evaluator: PlanEvaluator, found: FoundPlans) -> None:
        self.space, self.evaluator, self.found = space, evaluator, found
        is_pinned = space.pinned("recompute") or space.pins.towers
        choice = RecomputeChoice(space.pins.recompute if is_pinned else "none")
        world, batch = space.question.cluster.world_size, space.question.recipe.train.global_batch
        bounds = []
        for each in space.microbatch_splits():  # a lower bound: all devices are busy all the time
            seconds, groups = evaluator.micro_batch_seconds(each, choice), world / (each.tp * each.cp)
            bounds.append((seconds * batch / each.micro_batch / groups, each))
        self.microbatches = sorted(bounds)

    def by_lower_bound(self) -> Iterator[MeshSplit]:
        """Yield all splits, lowest bound first. An expensive bound is computed only when it may be the lowest."""
        order = count()
        heap: list[tuple[float, int, MicrobatchSplit | MeshSplit, bool]] = [
            (bound, next(order), microbatch, False) for bound, microbatch in self.microbatches
        ]
        heapq.heapify(heap)
        while heap:
            _, _, entry, is_exact = heapq.heappop(heap)
            if isinstance(entry, MicrobatchSplit):
                for split in self.space.mesh_splits(entry):
                    heapq.heappush(heap, (self.evaluator.quick_bound(split), next(order), split, split.pp == 1))
            elif is_exact:
                yield entry
            else:
                heapq.heappush(heap, (self.evaluator.lower_bound(entry), next(order), entry, True))

    def try_other_meshes(self, others: int) -> None:
        """Add the best plans of other meshes: a quick pass over some, then an exact one over the best."""
        everything = self.found
        everything.winner = everything.ranked()[0]
        meshes, tries_left = others + NUM_EXTRA_MESHES, 4 * others
        for split in self.by_lower_bound():
            if len(everything.by_mesh) > meshes or not tries_left:
                break
            if _mesh_key(split) not in everything.by_mesh:
                tries_left -= 1
                self.try_few(split)
        for other in everything.ranked()[1 : meshes + 1]:
            shown, key = everything.ranked()[: others + 1], mesh_key_of(other.plan)
            limit = min(other.seconds, shown[-1].seconds if len(shown) > others else math.inf)
            self.found = FoundPlans(by_mesh={key: everything.by_mesh[key]}, best_seconds=limit)
            tp, pp, cp, ep = key
            microbatches = self.space.microbatch_splits_on(tp, cp, ep)
            splits = [split for each in microbatches for split in self.space.mesh_splits(each) if split.pp == pp]
            splits_left = MAX_SPLITS_PER_MESH
            for split in sorted(splits, key=self.evaluator.quick_bound):
                if self.evaluator.quick_bound(split) > self.found.best_seconds or not splits_left:
                    break
                if self.evaluator.lower_bound(split) <= self.found.best_seconds:
                    splits_left -= 1
                    self.try_all(split, self.found.best_seconds)

    def try_few(self, split: MeshSplit) -> None:
        """Try no or full sharding with no or full recompute. Offload is left to the exact pass, unless it is pinned."""
        every = self.space.recompute_choices(split)
        choices = [each for each in every if not each.towers and not isinstance(each.recompute, int)] or list(every)
        offload = self.space.offloads()[0]
        all_states, most = _plain_shardings(self.space, split, offload)
        few = [states for states in all_states if states.dp_shard in (1, most) and states.sharding != "gradients"]
        if few and self._least_memory_fits(Candidate(split, few[-1], offload), choices):
            for states in few:
                if self._least_memory_fits(Candidate(split, states, offload), choices):
                    self._add_fastest(Candidate(split, states, offload), choices)

    def try_all(self, split: MeshSplit, limit: float) -> None:
        """Try every sharding of at most `limit` seconds, with as little recompute and offload as it needs."""
        evaluator, every = self.evaluator, self.space.recompute_choices(split)
        choices = [choice for choice in every if evaluator.recompute_bound(split, choice) <= limit]
        seconds = partial(evaluator.micro_batch_seconds, split.microbatch, pp=split.pp)
        choices.sort(key=lambda choice: (seconds(choice), str(choice)))
        offloads = self._fitting_offloads(split, choices) if choices else []
        too_big: set[tuple[object, ...]] = set()
        for states in reversed(self.space.state_shardings(split)) if offloads else ():
            kind = states.sharding, states.towers, states.overlap
            # A lower bound: the fastest recompute choice, with free memory.
            if kind in too_big or evaluator.bare_seconds(Candidate(split, states, "none"), every[0]) > limit:
                continue
            candidates = [Candidate(split, states, offload) for offload in offloads]
            if not self._try_offloads(candidates, choices, limit):
                too_big.add(kind)  # fewer shards, which follow, need even more memory

    def _try_offloads(self, candidates: list[Candidate], choices: list[RecomputeChoice], limit: float) -> bool:
        """Return whether any fits. Offload only pays if less is then recomputed, or if the device is nearly full."""
        evaluator, fits, ceiling = self.evaluator, False, math.inf
        for candidate in candidates:
            split = candidate.split
            seconds = partial(evaluator.micro_batch_seconds, split.microbatch, pp=split.pp)
            cheaper = [choice for choice in choices if seconds(choice) < ceiling]
            if candidate.offload != "none":  # a rank updates at least an even part of the model
                more = evaluator.offload_bounds[candidate.offload]
                cheaper = [choice for choice in cheaper if evaluator.recompute_bound(split, choice) + more <= limit]
            if not cheaper or not self._least_memory_fits(candidate, cheaper):
                continue
            fits, most = True, self.found.best_seconds * TIE_RATIO
            # The bound is expensive, and the first choices are often enough.
            useful = (
                choice
                for choice in cheaper
                if candidate.offload != "activations" or evaluator.activation_offload_bound(split, choice) <= most
            )
            choice = self._add_fastest(candidate, useful)
            fitting = evaluator.fitting_plan(candidate, choice) if choice else None
            is_plain = choice and candidate.offload == "none" and not is_not_monotonic(candidate, choice)
            if choice and fitting and is_plain and not evaluator.slowdown(fitting[1]):
                ceiling = seconds(choice)
        return fits

    def _fitting_offloads(self, split: MeshSplit, choices: list[RecomputeChoice]) -> list[str]:
        """Return the offloads with which the split fits at all: with full sharding and full recompute.

        A device holds the least states if parameters are offloaded. If even that exceeds the device, only offloaded
        activations can help.
        """
        fitting = []
        for offload in reversed(self.space.offloads()):
            candidate = self._least_candidate(split, offload)
            if candidate is None:
                continue
            if self._least_memory_fits(candidate, choices):
                fitting.append(offload)
            elif offload == "parameters" and all(
                (candidate, each) in self.evaluator.exceeding_device for each in least_memory_recomputes(choices)
            ):
                other = self._least_candidate(split, "activations")
                return ["activations"] if other and self._least_memory_fits(other, choices) else []
        return [offload for offload in self.space.offloads() if offload in fitting]

    def _least_candidate(self, split: MeshSplit, offload: str) -> Candidate | None:
        states = least_memory_sharding(self.space, split, offload)
        return Candidate(split, states, offload) if states else None

    def _least_memory_fits(self, candidate: Candidate, choices: list[RecomputeChoice]) -> bool:
        return any(self.evaluator.fitting_plan(candidate, choice) for choice in least_memory_recomputes(choices))

    def _add_fastest(self, candidate: Candidate, choices: Iterable[RecomputeChoice]) -> RecomputeChoice | None:
        """Add the fastest recompute choice that fits and is legal, and return it. They come by their lower bounds."""
        evaluator, best_seconds, fastest = self.evaluator, math.inf, None
        for choice in choices:
            if evaluator.recompute_bound(candidate.split, choice) >= best_seconds:
                break
            if (fitting := evaluator.fitting_plan(candidate, choice)) is None:
                continue
            plan, memory = fitting
            is_nearly_full = evaluator.occupancy(memory) > NEARLY_FULL_FRACTION
            pinned = memory.host / evaluator.cluster.host_bytes
            seconds = evaluator.bare_seconds(candidate, choice) * (1 + evaluator.slowdown(memory))
            found = FoundPlan(seconds, plan, is_nearly_full, pinned)
            if self.found.is_useful(found):
                if not is_legal(plan, self.space.question):
                    continue
                self.found.add(found)
            if found.seconds < best_seconds:
                best_seconds, fastest = found.seconds, choice
            if not evaluator.slowdown(memory) and not is_not_monotonic(candidate, choice):
                break
        return fastest


def _mesh_key(split: MeshSplit) -> tuple[int, ...]:
    return split.microbatch.tp, split.pp, split.microbatch.cp, split.microbatch.ep


def mesh_key_of(plan: Plan) -> tuple[int, ...]:
    """Return the degrees that identify the mesh of a plan."""
    mesh = plan.mesh
    return mesh.tp, mesh.pp, mesh.cp, mesh.ep


def num_model_axes(key: tuple[int, ...]) -> int:
    """Return how many axes besides data parallelism are in use."""
    return sum(degree > 1 for degree in key)


def _plain_shardings(space: Space, split: MeshSplit, offload: str) -> tuple[list[StateSharding], int]:
    """Return the shardings that treat all towers alike, and over how many ranks they shard at most."""
    every = space.state_shardings(split)
    plain = [states for states in every if not states.towers and space.supports(split, states, offload)]
    return plain, max((states.dp_shard for states in plain), default=1)


def least_memory_sharding(space: Space, split: MeshSplit, offload: str) -> StateSharding | None:
    """Return the sharding that needs the least memory: over the most ranks, and of the most states."""
    plain, most = _plain_shardings(space, split, offload)
    return next((states for states in reversed(plain) if states.dp_shard == most), None)


def least_memory_recomputes(choices: Sequence[RecomputeChoice]) -> list[RecomputeChoice]:
    """Return the choices of which one saves the fewest activations: full recompute, or the closest to it."""
    full = [choice for choice in choices if choice.recompute == "full" and not choice.towers]
    strided = [choice for choice in choices if isinstance(choice.recompute, int)]
    rest = [choice for choice in choices if not isinstance(choice.recompute, int) and choice.recompute != "none"]
    return full or [*rest, *sorted(strided)[:1]] or list(choices)


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
                if states := least_memory_sharding(space, split, offload):
                    for choice in least_memory_recomputes(space.recompute_choices(split)):
                        yield space.plan(split, states, choice, offload)
