"""How plans are weighed in a search: bytes, seconds, and the least that a way to cut can take, before it is whole."""

import math

from trimaran.core import Plan
from trimaran.cost.offload_time import least_offloads
from trimaran.cost.peak_memory import Memory, memory_of
from trimaran.cost.step import HOST_SHARE, crowding_share
from trimaran.cost.step_time import seconds_of
from trimaran.planner.space import Candidate, MeshSplit, MicrobatchSplit, RecomputeChoice, Space, StateSharding

ENDLESS = 1e9  # a plan that does not run at all
# Shards of one rank: no plan, but quicker than any. Nothing is exchanged, and sharded gradients add up for nothing.
ALONE = StateSharding("optimizer", 1)


class Evaluator:
    """The cost model for one question, with what it said before."""

    def __init__(self, space: Space) -> None:
        self.space, self.job, self.cluster = space, space.question.job, space.question.cluster
        self._paces: dict[tuple[MicrobatchSplit, RecomputeChoice], float] = {}
        self._bubbles: dict[tuple[object, ...], float] = {}
        self._floors: dict[MeshSplit, float] = {}
        self._moved: dict[tuple[MeshSplit, RecomputeChoice], float] = {}
        self._weighed: dict[tuple[Candidate, RecomputeChoice], tuple[Plan, Memory] | None] = {}
        self._bursting: set[tuple[Candidate, RecomputeChoice]] = set()
        self._too_big: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        self.num_weighed = 0
        self._offloads = least_offloads(self.job, self.cluster)

    def memory(self, plan: Plan) -> Memory:
        self.num_weighed += 1
        return memory_of(self.job, self.cluster, plan)

    def occupancy(self, memory: Memory) -> float:
        return memory.device / self.cluster.device.memory_bytes

    def strain(self, memory: Memory) -> float:
        """Return how much of what there is the plan needs, of the device or of the host; above 1 it does not fit."""
        host = HOST_SHARE * self.cluster.host_bytes
        return max(self.occupancy(memory), memory.host / host) if memory.runs else ENDLESS

    def crowding(self, memory: Memory) -> float:
        """Return how much longer a step takes, of its length, because the device is nearly full."""
        return crowding_share(memory, self.cluster, self.job)

    def seconds(self, plan: Plan, memory: Memory) -> float:
        """Return how long a step takes, as `predict` does."""
        bare = sum(seconds_of(self.job, self.cluster, plan).terms.values())
        return bare * (1 + self.crowding(memory))

    def pace(self, grid: MicrobatchSplit, level: RecomputeChoice) -> float:
        """Return what one more micro-batch takes the whole network on one group of slices, without a pipeline.

        It is the difference between two steps: what each step has but once, as the sum of the gradients, is left out.
        """
        if (known := self._paces.get((grid, level))) is None:
            cut = MeshSplit(grid, 1, "1f1b", (), _ranks(grid), 1)
            one, two = (
                sum(seconds_of(self.job, self.cluster, plan).terms.values())
                for plan in (self.space.plan(cut._replace(grad_accum=num), ALONE, level) for num in (1, 2))
            )
            known = self._paces[grid, level] = two - one
        return known

    def first_floor(self, cut: MeshSplit) -> float:
        """Return a time that no plan of this cut beats, known at once: equal stages, and the bubble in theory."""
        level, key = self.space.levels(cut)[0], (cut.pp, cut.schedule, len(cut.stages), cut.grad_accum)
        if key not in self._bubbles:
            self._bubbles[key] = self.space.plan(cut, ALONE, level).bubble
        return self.pace(cut.grid, level) * cut.grad_accum / cut.pp / (1 - self._bubbles[key])

    def floor(self, cut: MeshSplit) -> float:
        """Return a time that no plan of this cut beats, whatever its data ranks share, compute again and offload."""
        if (known := self._floors.get(cut)) is None:
            known = self.first_floor(cut)
            if cut.pp > 1:
                known = max(known, self._work(cut, self.space.levels(cut)[0], "none"))
            self._floors[cut] = known
        return known

    def moved_floor(self, cut: MeshSplit, level: RecomputeChoice) -> float:
        """Return a time that no plan of this cut and level beats that offloads activations."""
        if (known := self._moved.get((cut, level))) is None:
            known = self._moved[cut, level] = self._work(cut, level, "activations")
        return known

    def _work(self, cut: MeshSplit, level: RecomputeChoice, offload: str) -> float:
        """Return how long the slowest rank is at work on every micro-batch, and the bubble.

        The work is what twice as many take longer: what each step has but once, as the sum of the gradients, is left
        out.
        """
        alone = cut._replace(dp=_ranks(cut.grid))
        these, twice = (
            seconds_of(self.job, self.cluster, self.space.plan(each, ALONE, level, offload)).terms
            for each in (alone, alone._replace(grad_accum=2 * cut.grad_accum))
        )
        bubble = these.get("bubble", 0.0)
        return sum(twice.values()) - twice.get("bubble", 0.0) - (sum(these.values()) - bubble) + bubble

    def level_floor(self, cut: MeshSplit, level: RecomputeChoice) -> float:
        """Return a time that no plan of this cut beats that computes so much again, whatever it offloads."""
        return max(self.floor(cut), self.pace(cut.grid, level) * cut.grad_accum / cut.pp)

    def offload_floor(self, way: Candidate, level: RecomputeChoice) -> float:
        """Return a time that no plan beats that offloads so, if every rank updates only its share of the parameters."""
        return self.level_floor(way.cut, level) + self._offloads[way.offload]

    def share_floor(self, cut: MeshSplit, share: StateSharding) -> float:
        """Return a time that no plan of this cut and share beats: that of the quickest level, on a device with room."""
        plan = self.space.plan(cut, share, self.space.levels(cut)[0])
        return sum(seconds_of(self.job, self.cluster, plan).terms.values())

    def weigh(self, way: Candidate, level: RecomputeChoice) -> tuple[Plan, Memory] | None:
        """Return the plan and its bytes where it fits; else None. Whether it can run is asked elsewhere, of few."""
        if (way, level) in self._weighed:
            return self._weighed[way, level]
        found = None
        if self.space.goes(*way) and not self._outgrown(way, level):
            plan = self.space.plan(way.cut, way.share, level, way.offload)
            memory = self.memory(plan)
            if self.strain(memory) <= 1:
                found = plan, memory
            else:
                if self.occupancy(memory) > 1:
                    self._bursting.add((way, level))
                sizes = way.cut.grid.micro_batch, way.share.dp_shard
                self._too_big.setdefault(_alike(way, level), []).append(sizes)
        self._weighed[way, level] = found
        return found

    def bursts(self, way: Candidate, level: RecomputeChoice) -> bool:
        """Return whether a plan that was weighed is too big for its device, and not for the host alone."""
        return (way, level) in self._bursting

    def _outgrown(self, way: Candidate, level: RecomputeChoice) -> bool:
        """Return whether a plan that holds no more was too big: with no larger micro-batch, over no fewer shards."""
        known = self._too_big.get(_alike(way, level), ())
        return any(size <= way.cut.grid.micro_batch and shards >= way.share.dp_shard for size, shards in known)


def _ranks(grid: MicrobatchSplit) -> int:
    """Return how many data ranks there must be for the experts to be spread so far."""
    return grid.ep // math.gcd(grid.ep, grid.cp)


def _alike(way: Candidate, level: RecomputeChoice) -> tuple[object, ...]:
    cut, share = way.cut, way.share
    return cut.grid[:4], cut.pp, cut.schedule, len(cut.stages), share.sharding, share.towers, level, way.offload
