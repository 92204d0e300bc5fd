"""The fastest plans of a space: best first, by floors that no plan of a cut can beat."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

from trimaran.core import Plan, UserError
from trimaran.planner.evaluator import Evaluator
from trimaran.planner.generic_rules import check_question
from trimaran.planner.loss_choices import PIECES
from trimaran.planner.space import (
    OFFLOADS,
    SHARDINGS,
    Candidate,
    MeshSplit,
    MicrobatchSplit,
    RecomputeChoice,
    Space,
    StateSharding,
)

ALIKE = 1.05  # within five per cent the cost model cannot tell which is faster, and the plainer plan is taken
FULL = 0.88  # above this steps may get slow: the allocator frees and asks again (planner.md C.2, nanotron's runs)
VAIN = 48  # looks in a row that find nothing better: then all is looked at
SPARE = 2  # meshes that are looked at besides those that are told: a first look does not tell all
LOOKS = 3  # cuts of such a mesh: its best is nearly always among those of the lowest floors
NONE = RecomputeChoice("none")


class FoundPlan(NamedTuple):
    """A plan that fits, how long its step takes, and whether its device is all but full."""

    seconds: float
    plan: Plan
    full: bool = False


@dataclass(slots=True)
class FoundPlans:
    """The plans that fit, by mesh: fastest or plainest; and what they are compared with."""

    limit: float = math.inf  # slower plans are of no interest from the start
    by_mesh: dict[tuple[int, ...], list[FoundPlan]] = field(default_factory=dict)
    least: float = math.inf
    first: FoundPlan | None = None  # the winner, once it is settled: what is found later only stands beside it

    def __post_init__(self) -> None:
        self.least = self.limit

    def wants(self, found: FoundPlan) -> bool:
        """Return whether no plan of the same mesh is both faster and plainer, nor one much faster."""
        plain = plainness(found)
        known = self.by_mesh.get(mesh_key_of(found.plan), ())
        return not any(
            each.seconds * ALIKE < found.seconds or (each.seconds <= found.seconds and plainness(each) <= plain)
            for each in known
        )

    def add(self, found: FoundPlan) -> None:
        self.by_mesh.setdefault(mesh_key_of(found.plan), []).append(found)
        self.least = min(self.least, found.seconds)

    def ranked(self) -> list[FoundPlan]:
        """Return the best of each mesh, fastest first; of all that are nearly as fast as the fastest, the plainest."""
        plainest = sorted(map(plainest_of, self.by_mesh.values()), key=lambda each: (each.seconds, plainness(each)))
        if not plainest:
            return []
        first = self.first or plainest_of([found for founds in self.by_mesh.values() for found in founds])
        return [first, *(each for each in plainest if mesh_key_of(each.plan) != mesh_key_of(first.plan))]


def plainest_of(founds: list[FoundPlan]) -> FoundPlan:
    """Return the plainest of those plans that are nearly as fast as the fastest."""
    least = min(found.seconds for found in founds)
    alike = [found for found in founds if found.seconds <= ALIKE * least]
    return min(alike, key=lambda found: (plainness(found), found.seconds))


def plainness(found: FoundPlan) -> tuple[float, ...]:
    """Return how much there is to a plan: axes, then what moves to the host or is computed again, then shards.

    A device with room to spare is plainer than one that is full.
    """
    plan, mesh = found.plan, found.plan.mesh
    axes = axes_of(mesh_key_of(plan))
    again = {"none": 0, "selective": 1, "full": 3}.get(str(plan.recompute), 2)
    return (
        axes, found.full, OFFLOADS.index(plan.offload), len(plan.towers), again, plan.loss == PIECES,
        SHARDINGS.index(plan.sharding),
        mesh.dp_replicate > 1 and mesh.dp_shard > 1, mesh.pp, plan.num_stages // mesh.pp, mesh.tp, mesh.cp, mesh.ep,
        mesh.dp_shard, plan.comm.context != "gather",
    )  # fmt: skip


def find(space: Space, scales: Evaluator, *, limit: float = math.inf, others: int = 0) -> FoundPlans:
    """Return the fastest plan of the space that fits, and the best of up to `others` more meshes.

    `limit` is a time that plans must beat to be of interest. Ways to cut are taken by their floors, lowest first: of a
    micro-batch, then with its pipeline. Once a floor is above the best plan nothing left can beat that. A first round
    looks at few plans of each way, and finds one soon that makes the second, which looks at all, short.
    """
    finds = FoundPlans(limit=limit)
    grids = sorted((_grid_floor(space, scales, grid), grid) for grid in space.grids())
    if not grids or grids[0][0] > limit or not any(_fits(scales, plan) for plan in lean_plans(space)):
        return finds
    _dive(space, scales, finds, grids)
    for cut in by_floor(space, scales, grids):
        if scales.floor(cut) > finds.least * ALIKE:
            break
        limit = finds.least * (ALIKE if axes_of(mesh_key(cut)) <= 1 else 1)  # what is not plain has to be faster
        if scales.floor(cut) <= limit:
            _expand(space, scales, finds, cut, limit)
    if others and finds.by_mesh:
        _look_beside(space, scales, finds, grids, others)
    return finds


def _look_beside(
    space: Space, scales: Evaluator, finds: FoundPlans, grids: list[tuple[float, MicrobatchSplit]], others: int
) -> None:
    """Look for the best plans of more meshes than the winner's: first for some meshes, then to the end of the best."""
    finds.first = finds.ranked()[0]
    meshes, tries = others + SPARE, 4 * others
    for cut in by_floor(space, scales, grids):
        if len(finds.by_mesh) > meshes or not tries:
            break
        if mesh_key(cut) not in finds.by_mesh:
            tries -= 1
            _dip(space, scales, finds, cut)
    for found in finds.ranked()[1 : meshes + 1]:
        told, key = finds.ranked()[: others + 1], mesh_key_of(found.plan)
        limit = min(found.seconds, told[-1].seconds if len(told) > others else math.inf)
        _finish(space, scales, FoundPlans(by_mesh={key: finds.by_mesh[key]}, limit=limit), key)


def _finish(space: Space, scales: Evaluator, finds: FoundPlans, key: tuple[int, ...]) -> None:
    """Look at all plans of a few cuts of that mesh: of those that may beat the finds."""
    tp, pp, cp, ep = key
    cuts = [cut for grid in space.grids_of(tp, cp, ep) for cut in space.cuts(grid) if cut.pp == pp]
    looks = LOOKS
    for cut in sorted(cuts, key=scales.first_floor):
        if scales.first_floor(cut) > finds.least or not looks:
            break
        if scales.floor(cut) <= finds.least:
            looks -= 1
            _expand(space, scales, finds, cut, finds.least)


def _dive(space: Space, scales: Evaluator, finds: FoundPlans, grids: list[tuple[float, MicrobatchSplit]]) -> None:
    """Look at few plans of each way, until many in a row were no better."""
    vain = 0
    for cut in by_floor(space, scales, grids):
        least = finds.least
        if scales.floor(cut) > least or vain == VAIN:
            return
        _dip(space, scales, finds, cut)
        vain = 0 if finds.least < least or not finds.by_mesh else vain + 1


def by_floor(space: Space, scales: Evaluator, grids: list[tuple[float, MicrobatchSplit]]) -> Iterator[MeshSplit]:
    """Yield all cuts, those with the lowest floor first. What is slow to tell is asked for when it may be lowest."""
    order = count()
    ways: list[tuple[float, int, MicrobatchSplit | MeshSplit, bool]] = [
        (floor, next(order), grid, False) for floor, grid in grids
    ]
    heapq.heapify(ways)
    while ways:
        _, _, way, settled = heapq.heappop(ways)
        if isinstance(way, MicrobatchSplit):
            for cut in space.cuts(way):
                heapq.heappush(ways, (scales.first_floor(cut), next(order), cut, cut.pp == 1))
        elif settled:
            yield way
        else:
            heapq.heappush(ways, (scales.floor(way), next(order), way, True))


def _grid_floor(space: Space, scales: Evaluator, grid: MicrobatchSplit) -> float:
    """Return a time that no plan with such micro-batches beats: all devices at work on them all the time."""
    question = space.question
    level = RecomputeChoice(space.pins.recompute) if space.pinned("recompute") or space.pins.towers else NONE
    groups = question.cluster.world_size / (grid.tp * grid.cp)
    return scales.pace(grid, level) * question.recipe.train.global_batch / grid.micro_batch / groups


def _dip(space: Space, scales: Evaluator, finds: FoundPlans, cut: MeshSplit) -> None:
    """Look at a few plans of the cut: nothing or all is shared, and computed again.

    What is offloaded is left to the second look, unless that was pinned.
    """
    levels = [level for level in space.levels(cut) if not level.towers and not isinstance(level.recompute, int)]
    levels = levels or list(space.levels(cut))
    offload = space.offloads()[0]
    shares = [share for share in space.shares(cut) if not share.towers and space.goes(cut, share, offload)]
    most = max((share.dp_shard for share in shares), default=1)
    few = [share for share in shares if share.dp_shard in (1, most) and share.sharding != "gradients"]
    if not few or not _lean_fits(scales, Candidate(cut, few[-1], offload), levels):
        return
    for share in few:
        if _lean_fits(scales, Candidate(cut, share, offload), levels):
            _fastest(space, scales, finds, Candidate(cut, share, offload), levels)


def mesh_key(cut: MeshSplit) -> tuple[int, ...]:
    """Return what makes one mesh another, whatever its data ranks share."""
    return cut.grid.tp, cut.pp, cut.grid.cp, cut.grid.ep


def axes_of(key: tuple[int, ...]) -> int:
    """Return how many axes there are beside the data's."""
    return sum(degree > 1 for degree in key)


def mesh_key_of(plan: Plan) -> tuple[int, ...]:
    """Return what makes one mesh another, of a whole plan."""
    mesh = plan.mesh
    return mesh.tp, mesh.pp, mesh.cp, mesh.ep


def _expand(space: Space, scales: Evaluator, finds: FoundPlans, cut: MeshSplit, limit: float) -> None:
    """Look at every share of the cut that may take no longer than `limit`.

    Each is taken with the least that must be computed again or offloaded for it to fit.
    """
    levels = [level for level in space.levels(cut) if scales.level_floor(cut, level) <= limit]
    levels.sort(key=lambda level: (scales.pace(cut.grid, level), str(level)))
    offloads = _that_fit(space, scales, cut, levels) if levels else []
    too_big: set[tuple[object, ...]] = set()
    for share in reversed(space.shares(cut)) if offloads else ():
        like = share.sharding, share.towers
        if like in too_big or scales.share_floor(cut, share) > limit:
            continue
        if not _settle(space, scales, finds, [Candidate(cut, share, offload) for offload in offloads], levels, limit):
            too_big.add(like)  # so are fewer shards, which come later


def _settle(
    space: Space,
    scales: Evaluator,
    finds: FoundPlans,
    ways: list[Candidate],
    levels: list[RecomputeChoice],
    limit: float,
) -> bool:
    """Look at the levels of a share, offload by offload, and return whether any fits.

    To offload pays only where less is then computed again, or where the device is all but full.
    """
    fits, ceiling = False, math.inf
    for way in ways:
        less = [level for level in levels if scales.pace(way.cut.grid, level) < ceiling]
        if way.offload != "none":
            less = [level for level in less if scales.offload_floor(way, level) <= limit]
        if not less or not _lean_fits(scales, way, less):
            continue
        fits = True
        if way.offload == "activations":
            less = [level for level in less if scales.moved_floor(way.cut, level) <= finds.least * ALIKE]
        level = _fastest(space, scales, finds, way, less)
        weighed = scales.weigh(way, level) if level else None
        if level and weighed and way.offload == "none" and not uneven(way, level) and not scales.crowding(weighed[1]):
            ceiling = scales.pace(way.cut.grid, level)
    return fits


def _that_fit(space: Space, scales: Evaluator, cut: MeshSplit, levels: list[RecomputeChoice]) -> list[str]:
    """Return the offloads with which the leanest that can become of the cut fits: all is shared, all computed again.

    With parameters on the host a device holds least of the states: where even that is too much for it, so is more.
    """
    fitting = []
    for offload in reversed(space.offloads()):
        ways = [Candidate(cut, share, offload) for share in lean_shares(space, cut, offload)[-1:]]
        if any(_lean_fits(scales, way, levels) for way in ways):
            fitting.append(offload)
        elif offload == "parameters" and ways and all(scales.bursts(ways[0], each) for each in leanest_levels(levels)):
            more = [Candidate(cut, share, "activations") for share in lean_shares(space, cut, "activations")[-1:]]
            return ["activations"] if any(_lean_fits(scales, way, levels) for way in more) else []
    return [offload for offload in space.offloads() if offload in fitting]


def lean_shares(space: Space, cut: MeshSplit, offload: str) -> list[StateSharding]:
    """Return the shares of which one holds least: over as many ranks as there are. The last shares most."""
    shares = [share for share in space.shares(cut) if not share.towers and space.goes(cut, share, offload)]
    most = max((share.dp_shard for share in shares), default=1)
    return [share for share in shares if share.dp_shard == most]


def _lean_fits(scales: Evaluator, way: Candidate, levels: list[RecomputeChoice]) -> bool:
    return any(scales.weigh(way, level) for level in leanest_levels(levels))


def leanest_levels(levels: Sequence[RecomputeChoice]) -> list[RecomputeChoice]:
    """Return the levels of which one keeps least: all again, or, where that is not among them, what comes near."""
    full = [level for level in levels if level.recompute == "full" and not level.towers]
    every = [level for level in levels if isinstance(level.recompute, int)]
    rest = [level for level in levels if not isinstance(level.recompute, int) and level.recompute != "none"]
    return full or [*rest, *sorted(every)[:1]] or list(levels)


def _fastest(
    space: Space, scales: Evaluator, finds: FoundPlans, way: Candidate, levels: list[RecomputeChoice]
) -> RecomputeChoice | None:
    """Return the quickest of the levels that fit and can run, and note its plan. They come in order of their floors."""
    best, quickest = math.inf, None
    for level in levels:
        if scales.level_floor(way.cut, level) >= best:
            break
        if (weighed := scales.weigh(way, level)) is None:
            continue
        plan, memory = weighed
        found = FoundPlan(scales.seconds(plan, memory), plan, scales.occupancy(memory) > FULL)
        if finds.wants(found):
            if not allowed(space, plan):
                continue
            finds.add(found)
        if found.seconds < best:
            best, quickest = found.seconds, level
        if not scales.crowding(memory) and not uneven(way, level):
            break
    return quickest


def uneven(way: Candidate, level: RecomputeChoice) -> bool:
    """Return whether a level that computes more again may yet take less time.

    Ranks of a pipeline may compute unlike much again, and of activations that are offloaded fewer then travel.
    """
    parts = way.cut.pp > 1 and (isinstance(level.recompute, int) or bool(level.towers))
    return parts or way.offload == "activations"


def lean_plans(space: Space) -> Iterator[Plan]:
    """Yield, for each mesh, the plans of which one is its leanest.

    Least is held with the smallest micro-batch, most shards and all computed again; more stages a rank, or a backward
    that is cut in two, only hold more.
    """
    seen: set[tuple[object, ...]] = set()
    for grid in sorted(space.grids(), key=lambda grid: (grid.micro_batch, grid)):
        for cut in space.cuts(grid):
            schedule = cut.schedule if "schedule" in space.pins.pipeline.model_fields_set else "1f1b"
            key = grid[:4], cut.pp
            if key in seen or (cut.pp > 1 and cut.schedule != schedule):
                continue
            seen.add(key)
            for offload in space.offloads():
                for share in lean_shares(space, cut, offload)[-1:]:
                    yield from (space.plan(cut, share, level, offload) for level in leanest_levels(space.levels(cut)))


def _fits(scales: Evaluator, plan: Plan) -> bool:
    return scales.strain(scales.memory(plan)) <= 1


def allowed(space: Space, plan: Plan) -> bool:
    """Return whether the plan can run."""
    try:
        check_question(plan, space.question)
    except UserError:
        return False
    return True
