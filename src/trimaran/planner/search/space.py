"""The search space: every split of model, batch and states that keeps the pins and can run."""

import math
from collections.abc import Iterator
from copy import copy
from functools import cache, cached_property, lru_cache
from itertools import permutations, product
from typing import Any, NamedTuple

from trimaran.core import CONTEXTS, SHARDINGS, Comm, Mesh, Pipeline, Plan, TowerPlan, UserError
from trimaran.cost import captures_steps, positions_to_hide_launches, rates_of
from trimaran.models import Tower, every_rank_has_rows, split_outline, vision_of
from trimaran.planner.plan_choices import CHUNKED, FUSED, losses_of
from trimaran.planner.question import NO_PINS, Question
from trimaran.planner.rules.axis_rules import check_axes, check_hf_axes, divisors, takes_micro_batches
from trimaran.planner.rules.legal import split_sizes

# Larger micro-batches do not make a device faster; they only need more memory. Up to the second number of tokens they
# do, if launching their kernels takes long: those of a small model, or of one whose steps are not captured.
MAX_MICRO_BATCH = {"cuda": 256, "cpu": 16}
MAX_MICRO_BATCH_TOKENS, MAX_LAUNCH_BOUND_TOKENS = 32_768, 131_072
MIN_POSITIONS = 128  # of a sequence per rank; fewer do not fill one tile of a matmul
MAX_STAGES_PER_RANK = 8
RECOMPUTE_STRIDES, FINE_RECOMPUTE_STRIDES = (8, 4, 2), (8, 6, 4, 3, 2)  # recompute every k-th layer
MAX_DEVICES_WITH_FINE_STRIDES = 8  # small clusters have few other choices
WEIGHT_AND_GRADIENT_BYTES = 8  # of a replicated parameter, both in fp32
OFFLOADS = ("none", "activations", "optimizer", "parameters")


class MicrobatchSplit(NamedTuple):
    """All that the compute of one micro-batch depends on."""

    tp: int
    cp: int
    ep: int
    context: str
    micro_batch: int
    replicated: tuple[str, ...] = ()  # towers that each tensor-parallel rank holds, for its part of the images

    @property
    def degrees(self) -> tuple[object, ...]:
        """All but the size of the micro-batch."""
        return self.tp, self.cp, self.ep, self.context, self.replicated


class MeshSplit(NamedTuple):
    """A split of model and batch, before the sharding of states is chosen."""

    microbatch: MicrobatchSplit
    pp: int
    schedule: str
    stages: tuple[int, ...]
    dp: int
    grad_accum: int


class StateSharding(NamedTuple):
    """What the data ranks shard, and over how many of them. `towers` are those that differ.

    overlap: replicas sum their gradients during backward. If not, afterwards, so that steps can be captured.
    """

    sharding: str
    dp_shard: int
    towers: tuple[tuple[str, str], ...] = ()
    overlap: bool = True


class RecomputeChoice(NamedTuple):
    """What is recomputed in backward, where `towers` may differ, and how the loss is computed."""

    recompute: str | int
    towers: tuple[tuple[str, str | int], ...] = ()
    loss: str = ""  # empty: the default
    regather: bool = False  # tensor-parallel ranks gather inputs again in backward


class Candidate(NamedTuple):
    """A split with its state sharding and its offload."""

    split: MeshSplit
    states: StateSharding
    offload: str


class Space:
    """All plans that a question leaves open."""

    def __init__(self, question: Question) -> None:
        self.question, self.pins, self.losses = question, question.pins, losses_of(question)
        self._may_offload = True
        self._shardings: dict[tuple[int, int, bool, tuple[str, ...]], list[StateSharding]] = {}
        self._schedules: dict[int, tuple[tuple[str, tuple[int, ...]], ...]] = {}
        self._recompute_choices: dict[tuple[MicrobatchSplit, int, bool], tuple[RecomputeChoice, ...]] = {}
        self._divides = cache(self._are_divisible)

    @cached_property
    def _max_tokens(self) -> float:
        """The most tokens of a useful micro-batch: more if it takes long to launch than if it is busy anyway."""
        question, cluster = self.question, self.question.cluster
        if not cluster.device.traits.runs_async:
            return MAX_MICRO_BATCH_TOKENS
        is_captured = cluster.world_size == 1 and captures_steps(question.job, self.pins)
        rates = rates_of(cluster.device, precision_of(question, "none"), question.job.stack.time.sustained)
        useful = positions_to_hide_launches(question.job, rates, is_captured=is_captured)
        return min(MAX_LAUNCH_BOUND_TOKENS, max(MAX_MICRO_BATCH_TOKENS, useful))

    @cached_property
    def _may_capture(self) -> bool:
        """Whether replicas may sum gradients after backward, and their steps can then be CUDA graphs."""
        job, pins, comm = self.question.job, self.pins, self.pins.comm
        is_ours = job.can_capture and job.stack.name == "trimaran" and pins.engine_traits.captures_steps
        is_plain = comm.compression == "none" and not comm.local.is_on and pins.cuda_graphs
        overlaps = "overlap" in comm.model_fields_set and comm.overlap
        cluster, states = self.question.cluster, (WEIGHT_AND_GRADIENT_BYTES + job.state_bytes)
        has_replicas = cluster.world_size > 1 and cluster.device.traits.has_graphs
        fits = states * job.outline.trained_parameters < cluster.device.memory_bytes  # saves time for large models
        return is_ours and is_plain and has_replicas and fits and not overlaps

    def captures_replicas(self, microbatch: MicrobatchSplit, pp: int = 1) -> bool:
        """Return whether some plan with such micro-batches has replicas whose steps are captured."""
        return microbatch.tp == microbatch.cp == microbatch.ep == pp == 1 and self._may_capture

    def pinned(self, field: str) -> bool:
        return field in self.pins.model_fields_set

    def degree(self, axis: str) -> int | None:
        """Return the pinned degree of the axis, if any."""
        return getattr(self.pins.mesh, axis) if axis in self.pins.mesh.model_fields_set else None

    def microbatch_splits(self) -> Iterator[MicrobatchSplit]:
        """Yield the splits of a micro-batch. tp stays on the innermost links, inside a node."""
        world = self.question.cluster.world_size
        cluster, sizes = self.question.cluster, self._micro_batches()
        is_free = not (self.pinned("micro_batch") or self.pinned("grad_accum") or self.pins.mesh.model_fields_set)
        for tp in self._degrees("tp", math.gcd(world, max(cluster.devices_per_node, cluster.levels[0].devices))):
            for cp in self._degrees("cp", world // tp if world % tp == 0 else 1):
                choices = product(self._contexts(tp, cp), self._degrees("ep", world), self._replicated_towers(tp))
                for context, ep, replicated in choices:
                    for size in sizes if self._divides(tp, cp, ep, context, replicated) else ():
                        # Two halves of two sequences on a rank cost as much as one full sequence plus the communication
                        # between the halves. More data ranks with a smaller micro-batch do the same for less.
                        is_dominated = is_free and cp > 1 and math.gcd(size, cp) > 1
                        if not is_dominated and self._is_small_enough(size, cp):
                            yield MicrobatchSplit(tp, cp, ep, context, size, replicated)

    def microbatch_splits_on(self, tp: int, cp: int, ep: int) -> Iterator[MicrobatchSplit]:
        """Yield all micro-batches for these degrees, also those that are never the best."""
        for context, replicated in product(self._contexts(tp, cp), self._replicated_towers(tp)):
            for size in self._micro_batches() if self._divides(tp, cp, ep, context, replicated) else ():
                if self._is_small_enough(size, cp):
                    yield MicrobatchSplit(tp, cp, ep, context, size, replicated)

    def mesh_splits(self, microbatch: MicrobatchSplit) -> Iterator[MeshSplit]:
        """Yield the pipelines for such micro-batches, and no pipeline. All of them use every device."""
        question = self.question
        batch, inner = question.recipe.train.global_batch, microbatch.tp * microbatch.cp
        for pp in self._degrees("pp", question.cluster.world_size // inner):
            dp, left = divmod(question.cluster.world_size, inner * pp)
            if left or dp * microbatch.cp % microbatch.ep:
                continue
            at_once, pinned = dp * microbatch.micro_batch, self.pins.micro_batches
            if isinstance(pinned, tuple):
                at_once = sum(pinned) if pinned else at_once
                can_deal = len(pinned) in (0, dp)
            else:  # measured speeds need data ranks, and rows to deal
                can_deal = min(dp, microbatch.micro_batch) > 1 or question.cluster.world_size == 1
            if not can_deal or batch % at_once:
                continue
            count = batch // at_once
            if self.pinned("grad_accum") and count != self.pins.grad_accum:
                continue
            if pp not in self._schedules:
                self._schedules[pp] = tuple(self._pipelines(pp))
            for schedule, stages in self._schedules[pp]:
                if pp == 1 or takes_micro_batches(schedule, pp, count):
                    yield MeshSplit(microbatch, pp, schedule, stages, dp, count)

    def state_shardings(self, split: MeshSplit) -> list[StateSharding]:
        """Return what the data ranks may shard, over some or all of them: nothing, optimizer, gradients, parameters.

        Nothing comes twice if a step can be captured: with gradients that are summed after backward, and during it.
        """
        is_free = "overlap" not in self.pins.comm.model_fields_set
        late = is_free and split.dp > 1 and self.captures_replicas(split.microbatch, split.pp)
        replicated = split.microbatch.replicated
        key = split.dp, split.microbatch.cp, late, replicated
        if key not in self._shardings:
            # First those that need the most memory: a captured step holds more than any other.
            captured = [StateSharding("none", 1, overlap=False)] if late else []
            others = list(self._free_shardings(split.dp, split.microbatch.cp, replicated))
            self._shardings[key] = [*(each for each in captured if each._replace(overlap=True) in others), *others]
        return self._shardings[key]

    def _free_shardings(self, dp: int, cp: int, replicated: tuple[str, ...]) -> Iterator[StateSharding]:
        replicas, shards = self.degree("dp_replicate"), self.degree("dp_shard")
        free = SHARDINGS if self.pins.engine_traits.is_synchronous else ("none",)
        for sharding in (self.pins.sharding,) if self.pinned("sharding") else free:
            shards_one_rank = self.pins.engine_traits.shards_one_rank
            if sharding == "parameters" and (not self.pinned("sharding") or self.pins.offload == "parameters"):
                shards_one_rank |= "parameters" in self.offloads()  # offloaded ones need shards
            for dp_shard in divisors(dp, most=dp) if sharding != "none" else (1,):
                if shards not in (None, dp_shard) or replicas not in (None, dp // dp_shard):
                    continue
                if sharding == "none" or dp_shard * cp > 1 or shards_one_rank:
                    # Side towers may be sharded less or, over tensor-parallel ranks, alone.
                    less = {"parameters": ("optimizer", "none"), "gradients": ("none",), "optimizer": ("none",)}
                    own, names = less.get(sharding, ()), [tower.name for tower in self._side_towers()]
                    if sharding == "none" and replicated:
                        own, names = ("optimizer", "parameters"), list(replicated)
                    yield StateSharding(sharding, dp_shard)
                    for each in own if names else ():
                        yield StateSharding(sharding, dp_shard, tuple((name, each) for name in names))

    def supports(self, split: MeshSplit, states: StateSharding, offload: str) -> bool:
        """Return whether sharding and offload work together: offloaded parameters need shards, if only one."""
        if offload == "parameters" and (
            states.sharding != "parameters" or (states.towers and self.question.for_trainer)
        ):
            return False
        if not states.overlap and offload != "none":
            return False  # such a step is not captured, so that nothing is gained
        is_one_rank = states.sharding != "none" and states.dp_shard * split.microbatch.cp == 1
        return not is_one_rank or offload == "parameters" or self.pins.engine_traits.shards_one_rank

    def recompute_choices(self, split: MeshSplit) -> tuple[RecomputeChoice, ...]:
        """Return what may be recomputed. Where logits are large, each choice also comes with a chunked loss."""
        microbatch = split.microbatch
        key = microbatch, split.pp, split.schedule == "zero-bubble"
        if (choices := self._recompute_choices.get(key)) is None:
            choices = self._recomputes(split)
            if self.losses.can_chunk(microbatch.micro_batch, tp=microbatch.tp, pp=split.pp, cp=microbatch.cp):
                choices = *choices, *(choice._replace(loss=CHUNKED) for choice in choices)
            self._recompute_choices[key] = choices
        return choices

    def _recomputes(self, split: MeshSplit) -> tuple[RecomputeChoice, ...]:
        """Return what may be recomputed. A split backward (zero-bubble) allows nothing."""
        question, nothing = self.question, [RecomputeChoice("none")]
        is_ours = self._is_ours and question.for_trainer and question.recipe.model.kind.splits_sequence
        may_regather = is_ours and "regather" not in self.pins.comm.model_fields_set and split.microbatch.tp > 1
        if may_regather and not (self._has_experts and self._compiled(split)):
            nothing.append(RecomputeChoice("none", regather=True))
        if self.pinned("recompute") or self.pins.towers:
            return tuple(nothing) if self.pins.recompute == "none" else (RecomputeChoice(self.pins.recompute),)
        if split.schedule == "zero-bubble":
            return tuple(nothing)
        assert question.outline is not None
        by_operator = [RecomputeChoice("elementwise")] * self._is_ours + [RecomputeChoice("selective")]
        device = question.cluster.device
        if self.pins.compile and split.microbatch.tp > 1 and not device.traits.compiles_recomputed_slices:
            return *nothing, *by_operator  # torch cannot compile the others for a CPU
        layers = question.outline.layers
        is_small = question.cluster.world_size <= MAX_DEVICES_WITH_FINE_STRIDES
        strides = FINE_RECOMPUTE_STRIDES if is_small else RECOMPUTE_STRIDES
        some = [RecomputeChoice(each) for each in strides if each <= layers]
        apart = []
        if others := self._side_towers():
            modes = permutations(("none", "selective", "full"), 2)
            apart = [RecomputeChoice(main, tuple((tower.name, own) for tower in others)) for main, own in modes]
        return *nothing, *by_operator, *some, *apart, RecomputeChoice("full")

    @cached_property
    def _is_ours(self) -> bool:
        return self.question.job.stack.name == "trimaran"

    @cached_property
    def _has_experts(self) -> bool:
        outline = self.question.outline
        assert outline is not None
        return any(getattr(block, "experts", None) for tower in outline.towers for block, _ in tower.runs)

    def without_offload(self) -> "Space":
        """Return the plans of this space that offload nothing, unless offload is pinned."""
        space = copy(self)
        space._may_offload = False
        return space

    def offloads(self) -> tuple[str, ...]:
        """Return what may be offloaded: nothing on a CPU or from asynchronous workers; no 4-bit parameters."""
        if self.pinned("offload"):
            return (self.pins.offload,)
        has_host = self.question.cluster.device.traits.has_own_memory
        if not has_host or not self._may_offload or not self.pins.engine_traits.is_synchronous:
            return ("none",)
        return OFFLOADS[:-1] if self.has_packed_weights else OFFLOADS

    @property
    def has_packed_weights(self) -> bool:
        """Whether frozen weights are 4-bit ones, which are whole on every rank."""
        adapter = self.question.recipe.model.adapter
        return adapter is not None and adapter.base == "4bit"

    def plan(self, split: MeshSplit, states: StateSharding, choice: RecomputeChoice, offload: str = "none") -> Plan:
        """Return the plan. It is not validated, because a search makes thousands of them."""
        pins, microbatch = self.pins, split.microbatch
        degrees = microbatch.tp, split.pp, microbatch.cp, microbatch.ep
        overlap, regather = pins.comm.overlap and states.overlap, pins.comm.regather or choice.regather
        fields: dict[str, Any] = {
            "mesh": mesh_of(split.dp // states.dp_shard, states.dp_shard, *degrees),
            "sharding": states.sharding,
            "pipeline": pipeline_of(split.schedule, split.stages),
            "micro_batch": microbatch.micro_batch,
            "grad_accum": split.grad_accum,
            "precision": pins.precision if self.pinned("precision") else precision_of(self.question, states.sharding),
            "recompute": choice.recompute,
            "offload": offload,
            "compile": self._compiled(split),
            "loss": self.losses.on(microbatch.tp, split.pp, choice.loss),
            "comm": comm_of(pins.comm, microbatch.context, overlap, regather),
            "towers": pins.towers or towers_of(states.towers, choice.towers, microbatch.replicated),
            "prediction": None,
        }
        return pins.model_copy(update=fields)  # takes half as long as a new one

    def _degrees(self, axis: str, most: int) -> list[int]:
        if (degree := self.degree(axis)) is not None:
            return [degree]
        if not self._may_use(axis):
            return [1]
        question = self.question
        assert question.outline is not None
        if axis == "pp":
            most = min(most, question.outline.layers)
        if axis == "cp":
            most = min(most, max(1, question.positions // MIN_POSITIONS))
        known = {"tp": most, "ep": most}.get(axis, question.cluster.world_size)
        return [each for each in divisors(known, most=most) if question.cluster.world_size % each == 0]

    def _may_use(self, axis: str) -> bool:
        """Return whether the planner may use an axis that is not pinned.

        A Hugging Face model has the axes that its code allows, and tp only for known shapes. Compressed
        gradients, local steps, gradients that are reduced after backward and asynchronous training need full replicas.
        DeepSpeed only shards.
        """
        question, comm = self.question, self.pins.comm
        needs_replicas = comm.compression != "none" or comm.local.is_on or not comm.overlap
        if needs_replicas or not self.pins.engine_traits.splits_models:
            return False
        if axis in ("tp", "pp") and self.losses.pinned in (FUSED, CHUNKED):  # which neither allows
            return False
        if (axis == "tp" and self.has_packed_weights) or (axis == "ep" and not self._has_experts):
            return False
        if question.for_trainer and question.recipe.model.kind.is_hf:
            facts, spec = self.question.facts, self.question.spec
            if vision_of(spec) is not None:
                return False
            if axis in ("pp", "ep"):
                without = None if facts is None else facts.without_pp if axis == "pp" else facts.without_ep
                return facts is not None and without is None
            return axis in ("tp", "cp") and spec is not None
        return not (question.for_trainer and question.recipe.model.kind.is_plugin)

    def _contexts(self, tp: int, cp: int) -> tuple[str, ...]:
        if cp == 1 or "context" in self.pins.comm.model_fields_set:
            return (self.pins.comm.context,)
        return CONTEXTS

    def _are_divisible(self, tp: int, cp: int, ep: int, context: str, replicated: tuple[str, ...]) -> bool:
        """Return whether the degrees divide what they split, pinned ones too. Errors are raised elsewhere."""
        question, outline, recipe = self.question, self.question.outline, self.question.recipe
        assert outline is not None
        facts = question.facts if question.for_trainer else None
        if facts is not None:
            try:
                check_hf_axes(facts, tp=tp, cp=cp, ep=ep)
            except UserError:
                return False
        mesh, towers = mesh_of(dp_replicate=ep, tp=tp, cp=cp, ep=ep), towers_of((), (), replicated)
        comm = comm_of(NO_PINS.comm, context, NO_PINS.comm.overlap, NO_PINS.comm.regather)
        plan = NO_PINS.model_copy(update={"mesh": mesh, "comm": comm, "towers": self.pins.towers or towers})
        if question.for_trainer and question.spec is not None and len(question.spec.tower_names) > 1:
            # Opaque blocks, such as a perception model's convolutions, stay unsplit on every tensor-parallel rank.
            try:
                check_axes(plan, self.question.recipe, question.spec)
            except UserError:
                return False
            return True
        for axis, degree in (("tp", tp), ("cp", cp), ("ep", ep)):
            sizes = split_sizes(outline, plan, recipe.data.seq_len, axis) if degree > 1 else ()
            if any(size % degree for _, size in sizes):
                return False
        ours = question.for_trainer and recipe.model.kind.splits_sequence
        indivisible = ours and (recipe.data.seq_len // cp % tp or not every_rank_has_rows(outline.main.vocab, tp))
        opaque = any(not hasattr(block, "heads") for tower in outline.towers for block, _ in tower.runs)
        return not indivisible and not (opaque and tp * cp > 1)

    def _micro_batches(self) -> list[int]:
        question = self.question
        if self.pinned("micro_batch"):
            return [self.pins.micro_batch]
        batch = question.recipe.train.global_batch
        if self.pinned("grad_accum"):
            batch //= math.gcd(batch, self.pins.grad_accum)
            return divisors(batch, most=4096)
        return divisors(batch, most=MAX_MICRO_BATCH[question.cluster.device.kind])

    def _is_small_enough(self, size: int, cp: int) -> bool:
        """Return whether a larger micro-batch could still make the device faster, or whether it was pinned."""
        pinned = self.pinned("micro_batch") or self.pinned("grad_accum")
        return size == 1 or pinned or size * self.question.positions // cp <= self._max_tokens

    def _pipelines(self, pp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield schedules with stages split by cost. GPipe is left out unless pinned: 1F1B holds fewer activations."""
        pipeline = self.pins.pipeline
        if pp == 1:
            yield pipeline.schedule, ()
            return
        schedules = ("1f1b", "interleaved", "zero-bubble")
        if self.question.outline is not None and self.question.outline.main.prediction_layers:
            schedules = schedules[:2]  # P122
        for schedule in (pipeline.schedule,) if "schedule" in pipeline.model_fields_set else schedules:
            if schedule == "zero-bubble" and self.pinned("compile") and self.pins.compile:
                continue
            if pipeline.stages:
                if len(pipeline.stages) >= pp:
                    yield schedule, pipeline.stages
                continue
            outline = self.question.outline
            assert outline is not None
            for rounds in rounds_of(schedule, outline.layers, pp):
                yield schedule, split_outline(outline, rounds * pp, seq_len=self.question.recipe.data.seq_len)

    def _side_towers(self) -> list[Tower]:
        """Return the towers besides the main one that may have their own settings: those with several layers."""
        outline = self.question.outline
        assert outline is not None
        can = not self.question.for_trainer or vision_of(self.question.spec) is not None
        free = can and not self.pinned("towers")
        return [tower for tower in outline.towers[:-1] if free and tower.layers > 2]

    def _replicated_towers(self, tp: int) -> list[tuple[str, ...]]:
        """Return which towers tensor-parallel ranks may replicate: none, or all that come before the main one."""
        question, outline = self.question, self.question.outline
        is_ours = question.for_trainer and question.recipe.model.kind.reads == "images"
        if tp == 1 or self.pinned("towers") or not is_ours:
            return [()]
        assert outline is not None
        return [(), tuple(tower.name for tower in outline.towers[:-1])]

    def _compiled(self, split: MeshSplit) -> bool:
        """Return whether to compile blocks: on a GPU, but not for DeepSpeed or a split backward."""
        if self.pinned("compile"):
            return self.pins.compile
        one_backward = split.pp == 1 or split.schedule != "zero-bubble"
        if self.pins.comm.regather and split.microbatch.tp > 1 and self._has_experts:
            return False  # torch does not compile it
        device = self.question.cluster.device
        return device.traits.compiles_by_default and one_backward and self.pins.engine_traits.compiles


def precision_of(question: Question, sharding: str) -> str:
    """Return the fastest precision that is safe by default: bf16 if the device has it, else fp16, else fp32.

    DeepSpeed has neither without shards. fp16 may skip steps, so replicas with local steps would diverge, and the
    workers of asynchronous training have no common loss scale.
    """
    pins, has = question.pins, question.cluster.device.peak_flops
    if sharding == "none" and pins.engine_traits.needs_shards_for_16_bits:
        return "fp32"
    if "bf16" in has:
        return "bf16"
    has_one_scale = not pins.comm.local.is_on and pins.engine_traits.is_synchronous
    return "fp16" if "fp16" in has and has_one_scale else "fp32"


def rounds_of(schedule: str, layers: int, pp: int) -> tuple[int, ...]:
    """Return how many stages a rank may hold: with `interleaved` two, the most possible, and the most even split."""
    if schedule != "interleaved":
        rounds = 2 if schedule == "zero-bubble" else 1
        return (rounds,) if rounds * pp <= layers else ()
    most = min(MAX_STAGES_PER_RANK, layers // pp)
    if most < 2:
        return ()
    even = min(range(2, most + 1), key=lambda rounds: (-(-layers // (rounds * pp)) * rounds, -rounds))
    return tuple(sorted({2, even, most}))


@lru_cache(maxsize=8192)
def mesh_of(dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
    """Return the mesh, cached."""
    return Mesh.model_construct(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, pp=pp, cp=cp, ep=ep)


@lru_cache(maxsize=8192)
def pipeline_of(schedule: str, stages: tuple[int, ...]) -> Pipeline:
    """Return the pipeline, cached."""
    return Pipeline.model_construct(schedule=schedule, stages=stages)


@lru_cache(maxsize=256)
def comm_of(pins: Comm, context: str, overlap: bool, regather: bool) -> Comm:
    """Return the pinned settings with this kind of context parallelism, with or without overlap and regather."""
    if (pins.context, pins.overlap, pins.regather) == (context, overlap, regather):
        return pins
    return pins.model_copy(update={"context": context, "overlap": overlap, "regather": regather})


@lru_cache(maxsize=256)
def towers_of(
    shardings: tuple[tuple[str, str], ...], choices: tuple[tuple[str, str | int], ...], replicated: tuple[str, ...] = ()
) -> dict[str, TowerPlan]:
    """Return the settings of single towers. The result is shared: do not change it."""
    sharding, recompute, tp = dict(shardings), dict(choices), dict.fromkeys(replicated, 1)
    return {
        name: TowerPlan.model_construct(sharding=sharding.get(name), recompute=recompute.get(name), tp=tp.get(name))
        for name in dict.fromkeys([*sharding, *recompute, *tp])
    }
