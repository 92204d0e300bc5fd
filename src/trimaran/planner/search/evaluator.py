"""The cost model as a search uses it: memory, seconds, and lower bounds of plans that are not complete yet."""

import math

from trimaran.core import Plan
from trimaran.cost.offload_time import least_offloads
from trimaran.cost.peak_memory import Memory, peak_memory_of
from trimaran.cost.step import MAX_PINNED_FRACTION, allocator_slowdown
from trimaran.cost.step_time import step_time_of, step_times_of
from trimaran.planner.search.space import Candidate, MeshSplit, MicrobatchSplit, RecomputeChoice, Space, StateSharding

CANNOT_RUN = 1e9  # memory use of a plan that cannot run
# States sharded over one rank: not a legal plan, but faster than any. Nothing is sent, and accumulation costs nothing.
CHEAPEST_STATES = StateSharding("optimizer", 1)
# On a single device nothing is sharded: its weights are split, and its steps may be captured.
UNSHARDED_STATES = StateSharding("none", 1)
CAPTURED_STATES = StateSharding("none", 1, overlap=False)  # of replicas


class PlanEvaluator:
    """The cost model for one question, with cached results."""

    def __init__(self, space: Space) -> None:
        self.space, self.job, self.cluster = space, space.question.job, space.question.cluster
        self._micro_batch_seconds: dict[tuple[MicrobatchSplit, RecomputeChoice, bool], float] = {}
        self._bubbles: dict[tuple[object, ...], float] = {}
        self._lower_bounds: dict[MeshSplit, float] = {}
        self._activation_offload_bounds: dict[tuple[MeshSplit, RecomputeChoice], float] = {}
        self._fitting_plans: dict[tuple[Candidate, RecomputeChoice], tuple[Plan, Memory] | None] = {}
        self._bare_seconds: dict[tuple[Candidate, RecomputeChoice], float] = {}
        # Evaluated plans that exceed their device, and not only the host.
        self.exceeding_device: set[tuple[Candidate, RecomputeChoice]] = set()
        self._too_big: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        self.num_evaluated = 0
        self.offload_bounds = least_offloads(self.job, self.cluster)
        self._cheapest_states = UNSHARDED_STATES if self.cluster.world_size == 1 else CHEAPEST_STATES

    def memory(self, plan: Plan) -> Memory:
        self.num_evaluated += 1
        return peak_memory_of(self.job, self.cluster, plan)

    def occupancy(self, memory: Memory) -> float:
        return memory.device / self.cluster.device.memory_bytes

    def memory_use(self, memory: Memory) -> float:
        """Return the needed fraction of device or host memory, whichever is higher. Above 1 the plan does not fit."""
        host = MAX_PINNED_FRACTION * self.cluster.host_bytes
        return max(self.occupancy(memory), memory.host / host) if memory.runs else CANNOT_RUN

    def slowdown(self, memory: Memory) -> float:
        """Return how much longer a nearly full device makes a step, as a fraction of it."""
        return allocator_slowdown(memory, self.cluster, self.job)

    def seconds(self, plan: Plan, memory: Memory) -> float:
        """Return the step time, as `predict` does."""
        return self._seconds_of(plan) * (1 + self.slowdown(memory))

    def _seconds_of(self, plan: Plan) -> float:
        return sum(step_time_of(self.job, self.cluster, plan).terms.values())

    def bare_seconds(self, candidate: Candidate, choice: RecomputeChoice) -> float:
        """Return the step time of a candidate's plan if its device had free memory."""
        if (cached := self._bare_seconds.get((candidate, choice))) is None:
            plan = self.space.plan(candidate.split, candidate.states, choice, candidate.offload)
            cached = self._bare_seconds[candidate, choice] = self._seconds_of(plan)
        return cached

    def micro_batch_seconds(self, microbatch: MicrobatchSplit, choice: RecomputeChoice, pp: int = 1) -> float:
        """Return the time that one more micro-batch takes for the whole model, on one rank of `pp` that share it.

        It is the difference between two steps, so costs that occur once per step, such as the gradient reduction,
        cancel. Replicas whose steps are captured take less than others if launching kernels takes long, and more if
        it does not: they add up full gradients.
        """
        captures = self.space.captures_replicas(microbatch, pp)
        if (cached := self._micro_batch_seconds.get((microbatch, choice, captures))) is None:
            dp, states = (2, CAPTURED_STATES) if captures else (_min_data_ranks(microbatch), self._cheapest_states)
            plan = self.space.plan(MeshSplit(microbatch, 1, "1f1b", (), dp, 1), states, choice)
            one, two = (sum(each.terms.values()) for each in step_times_of(self.job, self.cluster, plan, (1, 2)))
            # Two ranks of a pipeline are not captured: any `pp` above 1 is the time without.
            cached = min(two - one, self.micro_batch_seconds(microbatch, choice, pp=2)) if captures else two - one
            self._micro_batch_seconds[microbatch, choice, captures] = cached
        return cached

    def quick_bound(self, split: MeshSplit) -> float:
        """Return a cheap lower bound for all plans of this split: equal stages and the theoretical bubble."""
        choice = self.space.recompute_choices(split)[0]
        key = split.pp, split.schedule, len(split.stages), split.grad_accum
        if key not in self._bubbles:
            self._bubbles[key] = self.space.plan(split, self._cheapest_states, choice).bubble
        seconds = self.micro_batch_seconds(split.microbatch, choice, split.pp)
        return seconds * split.grad_accum / split.pp / (1 - self._bubbles[key])

    def lower_bound(self, split: MeshSplit) -> float:
        """Return a lower bound for all plans of this split, whatever they shard, recompute and offload."""
        if (cached := self._lower_bounds.get(split)) is None:
            cached = self.quick_bound(split)
            if split.pp > 1:
                cached = max(cached, self._busy_bound(split, self.space.recompute_choices(split)[0], "none"))
            self._lower_bounds[split] = cached
        return cached

    def activation_offload_bound(self, split: MeshSplit, choice: RecomputeChoice) -> float:
        """Return a lower bound for plans of this split and choice that offload activations."""
        if (cached := self._activation_offload_bounds.get((split, choice))) is None:
            cached = self._activation_offload_bounds[split, choice] = self._busy_bound(split, choice, "activations")
        return cached

    def _busy_bound(self, split: MeshSplit, choice: RecomputeChoice, offload: str) -> float:
        """Return how long the slowest rank is busy with all micro-batches, plus the bubble.

        The busy time is the difference to a step with twice as many micro-batches, so costs of a whole step cancel.
        """
        minimal = split._replace(dp=_min_data_ranks(split.microbatch))
        plan = self.space.plan(minimal, self._cheapest_states, choice, offload)
        times = step_times_of(self.job, self.cluster, plan, (split.grad_accum, 2 * split.grad_accum))
        once, twice = (each.terms for each in times)
        bubble = once.get("bubble", 0.0)
        return sum(twice.values()) - twice.get("bubble", 0.0) - (sum(once.values()) - bubble) + bubble

    def recompute_bound(self, split: MeshSplit, choice: RecomputeChoice) -> float:
        """Return a lower bound for plans of this split and recompute choice, whatever they offload."""
        seconds = self.micro_batch_seconds(split.microbatch, choice, split.pp)
        return max(self.lower_bound(split), seconds * split.grad_accum / split.pp)

    def fitting_plan(self, candidate: Candidate, choice: RecomputeChoice) -> tuple[Plan, Memory] | None:
        """Return the plan and its memory if it fits, else None. Legality is checked later, for few plans."""
        if (candidate, choice) in self._fitting_plans:
            return self._fitting_plans[candidate, choice]
        found, (split, states, offload) = None, candidate
        # A plan of the same family that needs no more memory did not fit: no larger micro-batch, no fewer shards.
        family = (
            *(split.microbatch.degrees, split.pp, split.schedule, len(split.stages)),
            *(states.sharding, states.towers, states.overlap, choice, offload),
        )
        size, too_big = split.microbatch.micro_batch, self._too_big.setdefault(family, [])
        is_too_big = any(each <= size and shards >= states.dp_shard for each, shards in too_big)
        if not is_too_big and self.space.supports(*candidate):
            plan = self.space.plan(split, states, choice, offload)
            memory = self.memory(plan)
            if self.memory_use(memory) <= 1:
                found = plan, memory
            else:
                if self.occupancy(memory) > 1:
                    self.exceeding_device.add((candidate, choice))
                too_big.append((size, states.dp_shard))
        self._fitting_plans[candidate, choice] = found
        return found


def _min_data_ranks(microbatch: MicrobatchSplit) -> int:
    return microbatch.ep // math.gcd(microbatch.ep, microbatch.cp)
