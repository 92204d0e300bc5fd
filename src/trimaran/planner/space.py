"""The search space: every split of model, batch and states that keeps the pins and can run."""

import math
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

from trimaran.core import Comm, Mesh, Pipeline, Plan, UserError
from trimaran.core.plan import TowerPlan
from trimaran.cost.host_time import positions_to_hide_launches
from trimaran.cost.job import captures_steps
from trimaran.cost.roofline import rates_of
from trimaran.models import ModelSpec, Tower, VlmSpec, split_outline
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.stages import Spec
from trimaran.planner.axis_rules import check_axes, takes_micro_batches
from trimaran.planner.degrees import divisors
from trimaran.planner.generic_rules import split_sizes
from trimaran.planner.loss_choices import CHUNKED, losses_of
from trimaran.planner.question import Question

# Larger micro-batches do not make a device faster; they only need more memory. Up to the second number of tokens they
# do, if launching their kernels takes long: those of a small model, or of one whose steps are not captured.
MAX_MICRO_BATCH = {"cuda": 256, "cpu": 16}
MAX_MICRO_BATCH_TOKENS, MAX_LAUNCH_BOUND_TOKENS = 32_768, 131_072
MIN_POSITIONS = 128  # of a sequence per rank; fewer do not fill one tile of a matmul
MAX_STAGES_PER_RANK = 8
RECOMPUTE_STRIDES, FINE_RECOMPUTE_STRIDES = (8, 4, 2), (8, 6, 4, 3, 2)  # recompute every k-th layer
MAX_DEVICES_WITH_FINE_STRIDES = 8  # small clusters have few other choices
SHARDINGS = ("none", "optimizer", "gradients", "parameters")
OFFLOADS = ("none", "activations", "optimizer", "parameters")


class MicrobatchSplit(NamedTuple):
    """All that the compute of one micro-batch depends on."""

    tp: int
    cp: int
    ep: int
    context: str
    micro_batch: int


class MeshSplit(NamedTuple):
    """A split of model and batch, before the sharding of states is chosen."""

    microbatch: MicrobatchSplit
    pp: int
    schedule: str
    stages: tuple[int, ...]
    dp: int
    grad_accum: int


class StateSharding(NamedTuple):
    """What the data ranks shard, and over how many of them. `towers` are those that differ."""

    sharding: str
    dp_shard: int
    towers: tuple[tuple[str, str], ...] = ()


class RecomputeChoice(NamedTuple):
    """What is recomputed in backward, where `towers` may differ, and how the loss is computed."""

    recompute: str | int
    towers: tuple[tuple[str, str | int], ...] = ()
    loss: str = ""  # empty: the default


class Candidate(NamedTuple):
    """A split with its state sharding and its offload."""

    split: MeshSplit
    states: StateSharding
    offload: str


class Space:
    """All plans that a question leaves open."""

    def __init__(self, question: Question) -> None:
        self.question, self.pins, self.losses = question, question.pins, losses_of(question)
        self._shardings: dict[tuple[int, int], list[StateSharding]] = {}

    @cached_property
    def _max_tokens(self) -> float:
        """The most tokens of a useful micro-batch: more if it takes long to launch than if it is busy anyway."""
        question, cluster = self.question, self.question.cluster
        if cluster.device.kind == "cpu":
            return MAX_MICRO_BATCH_TOKENS
        is_captured = cluster.world_size == 1 and captures_steps(question.job, self.pins)
        rates = rates_of(cluster.device, precision_of(question, "none"))
        useful = positions_to_hide_launches(question.job, rates, is_captured=is_captured)
        return min(MAX_LAUNCH_BOUND_TOKENS, max(MAX_MICRO_BATCH_TOKENS, useful))

    def pinned(self, field: str) -> bool:
        return field in self.pins.model_fields_set

    def degree(self, axis: str) -> int | None:
        """Return the pinned degree of the axis, if any."""
        return getattr(self.pins.mesh, axis) if axis in self.pins.mesh.model_fields_set else None

    def microbatch_splits(self) -> Iterator[MicrobatchSplit]:
        """Yield the splits of a micro-batch. tp stays on the innermost links, inside a node."""
        world = self.question.cluster.world_size
        sizes = self._micro_batches()
        for tp in self._degrees("tp", math.gcd(world, self._max_tp())):
            for cp in self._degrees("cp", world // tp if world % tp == 0 else 1):
                for context, ep in product(self._contexts(tp, cp), self._degrees("ep", world)):
                    if self._divides(tp, cp, ep, context):
                        yield from (
                            MicrobatchSplit(tp, cp, ep, context, size) for size in sizes if self._is_useful(size, cp)
                        )

    def microbatch_splits_on(self, tp: int, cp: int, ep: int) -> Iterator[MicrobatchSplit]:
        """Yield all micro-batches for these degrees, also those that are never the best."""
        for context in self._contexts(tp, cp):
            if self._divides(tp, cp, ep, context):
                yield from (
                    MicrobatchSplit(tp, cp, ep, context, size)
                    for size in self._micro_batches()
                    if self._is_small_enough(size, cp)
                )

    def mesh_splits(self, microbatch: MicrobatchSplit) -> Iterator[MeshSplit]:
        """Yield the pipelines for such micro-batches, and no pipeline. All of them use every device."""
        question = self.question
        batch, inner = question.recipe.train.global_batch, microbatch.tp * microbatch.cp
        for pp in self._degrees("pp", question.cluster.world_size // inner):
            dp, left = divmod(question.cluster.world_size, inner * pp)
            if left or batch % dp or batch // dp % microbatch.micro_batch or dp * microbatch.cp % microbatch.ep:
                continue
            count = batch // dp // microbatch.micro_batch
            if self.pinned("grad_accum") and count != self.pins.grad_accum:
                continue
            for schedule, stages in self._pipelines(pp):
                if pp == 1 or takes_micro_batches(schedule, pp, count):
                    yield MeshSplit(microbatch, pp, schedule, stages, dp, count)

    def state_shardings(self, split: MeshSplit) -> list[StateSharding]:
        """Return what the data ranks may shard, over some or all of them: nothing, optimizer, gradients, parameters."""
        key = split.dp, split.microbatch.cp
        if key not in self._shardings:
            self._shardings[key] = list(self._free_shardings(*key))
        return self._shardings[key]

    def _free_shardings(self, dp: int, cp: int) -> Iterator[StateSharding]:
        replicas, shards = self.degree("dp_replicate"), self.degree("dp_shard")
        for sharding in (self.pins.sharding,) if self.pinned("sharding") else SHARDINGS:
            for dp_shard in divisors(dp, most=dp) if sharding != "none" else (1,):
                if shards not in (None, dp_shard) or replicas not in (None, dp // dp_shard):
                    continue
                if sharding == "none" or dp_shard * cp > 1 or self._shards_one_rank(sharding):
                    yield from (StateSharding(sharding, dp_shard, towers) for towers in self._tower_shardings(sharding))

    def supports(self, split: MeshSplit, states: StateSharding, offload: str) -> bool:
        """Return whether sharding and offload work together: offloaded parameters need shards, if only one."""
        if offload == "parameters" and (
            states.sharding != "parameters" or (states.towers and self.question.for_trainer)
        ):
            return False
        is_one_rank = states.sharding != "none" and states.dp_shard * split.microbatch.cp == 1
        return not is_one_rank or offload == "parameters" or self.pins.engine == "deepspeed"

    def recompute_choices(self, split: MeshSplit) -> tuple[RecomputeChoice, ...]:
        """Return what may be recomputed. Where logits are large, each choice also comes with a chunked loss."""
        microbatch, choices = split.microbatch, self._recomputes(split)
        if not self.losses.can_chunk(microbatch.micro_batch, tp=microbatch.tp, pp=split.pp, cp=microbatch.cp):
            return choices
        return (*choices, *(choice._replace(loss=CHUNKED) for choice in choices))

    def _recomputes(self, split: MeshSplit) -> tuple[RecomputeChoice, ...]:
        """Return what may be recomputed. A split backward (zero-bubble) allows nothing."""
        if self.pinned("recompute") or self.pins.towers:
            return (RecomputeChoice(self.pins.recompute),)
        if split.schedule == "zero-bubble":
            return (RecomputeChoice("none"),)
        assert self.question.outline is not None
        if self.pins.compile and split.microbatch.tp > 1 and self.question.cluster.device.kind == "cpu":
            return RecomputeChoice("none"), RecomputeChoice("selective")  # torch cannot compile the others for a CPU
        layers = self.question.outline.layers
        strides = (
            FINE_RECOMPUTE_STRIDES
            if self.question.cluster.world_size <= MAX_DEVICES_WITH_FINE_STRIDES
            else RECOMPUTE_STRIDES
        )
        some = [RecomputeChoice(each) for each in strides if each <= layers]
        return (
            RecomputeChoice("none"),
            RecomputeChoice("selective"),
            *some,
            *self._tower_recomputes(),
            RecomputeChoice("full"),
        )

    def offloads(self) -> tuple[str, ...]:
        """Return what may be offloaded to the host: nothing on a CPU, and no parameters beside 4-bit ones."""
        if self.pinned("offload"):
            return (self.pins.offload,)
        if self.question.cluster.device.kind != "cuda":
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
        mesh = mesh_of(
            split.dp // states.dp_shard, states.dp_shard, microbatch.tp, split.pp, microbatch.cp, microbatch.ep
        )
        fields: dict[str, Any] = {
            "mesh": mesh,
            "sharding": states.sharding,
            "pipeline": pipeline_of(split.schedule, split.stages),
            "micro_batch": microbatch.micro_batch,
            "grad_accum": split.grad_accum,
            "precision": pins.precision if self.pinned("precision") else precision_of(self.question, states.sharding),
            "recompute": choice.recompute,
            "offload": offload,
            "compile": self._compiled(split),
            "cuda_graphs": pins.cuda_graphs,
            "loss": self.losses.on(microbatch.tp, split.pp, choice.loss),
            "comm": comm_of(pins.comm, microbatch.context),
            "engine": pins.engine,
            "towers": pins.towers or towers_of(states.towers, choice.towers),
            "prediction": None,
        }
        return Plan.model_construct(**fields)

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

        Our trainer does not change the forward of a Hugging Face model, and applies tp only to known shapes. Compressed
        gradients, local steps and gradients that are reduced after backward need full replicas. DeepSpeed only shards.
        """
        question, comm = self.question, self.pins.comm
        needs_replicas = comm.compression != "none" or comm.local_steps > 1 or not comm.overlap
        if self.pins.engine == "deepspeed" or needs_replicas:
            return False
        if axis in ("tp", "pp") and self.losses.pins_fusion:
            return False
        if axis == "tp" and self.has_packed_weights:
            return False
        if question.for_trainer and question.recipe.model.family == "hf":
            return axis in ("tp", "cp") and isinstance(question.spec, ModelSpec)
        return True

    def _max_tp(self) -> int:
        cluster = self.question.cluster
        return max(cluster.devices_per_node, cluster.levels[0].devices)

    def _contexts(self, tp: int, cp: int) -> tuple[str, ...]:
        if cp == 1 or "context" in self.pins.comm.model_fields_set:
            return (self.pins.comm.context,)
        return ("gather", "exchange")

    def _divides(self, tp: int, cp: int, ep: int, context: str) -> bool:
        """Return whether the degrees divide what they split, pinned ones too. Errors are raised elsewhere."""
        question = self.question
        outline, recipe = question.outline, question.recipe
        assert outline is not None
        plan = Plan.model_construct(
            mesh=mesh_of(dp_replicate=ep, tp=tp, cp=cp, ep=ep), comm=Comm.model_construct(context=context)
        )
        if question.for_trainer and isinstance(question.spec, VlmSpec | PerceptionSpec):
            return self._trainer_accepts(plan.model_copy(update={"towers": self.pins.towers}), question.spec)
        if any(
            size % degree
            for axis, degree in (("tp", tp), ("cp", cp), ("ep", ep))
            if degree > 1
            for _, size in split_sizes(outline, plan, recipe.data.seq_len, axis)
        ):
            return False
        ours = question.for_trainer and recipe.model.family == "decoder"
        indivisible = ours and (question.recipe.data.seq_len // cp % tp or outline.main.vocab % tp)
        opaque = any(not hasattr(block, "heads") for tower in outline.towers for block, _ in tower.runs)
        return not indivisible and not (opaque and tp * cp > 1)

    def _trainer_accepts(self, plan: Plan, spec: Spec) -> bool:
        """Return whether our trainer can split a model of several towers like this.

        Opaque blocks, such as a perception model's convolutions, stay unsplit on every tensor-parallel rank.
        """
        try:
            check_axes(plan, self.question.recipe, spec)
        except UserError:
            return False
        return True

    def _micro_batches(self) -> list[int]:
        question = self.question
        if self.pinned("micro_batch"):
            return [self.pins.micro_batch]
        batch = question.recipe.train.global_batch
        if self.pinned("grad_accum"):
            batch //= math.gcd(batch, self.pins.grad_accum)
            return divisors(batch, most=4096)
        return divisors(batch, most=MAX_MICRO_BATCH[question.cluster.device.kind])

    def _is_useful(self, size: int, cp: int) -> bool:
        """Return whether such micro-batches of sequence parts can be the best.

        Two halves of two sequences on a rank cost as much as one full sequence plus the communication between the
        halves. More data ranks with a smaller micro-batch do the same for less.
        """
        pinned = self.pinned("micro_batch") or self.pinned("grad_accum")
        if cp > 1 and not pinned and not self.pins.mesh.model_fields_set and math.gcd(size, cp) > 1:
            return False
        return self._is_small_enough(size, cp)

    def _is_small_enough(self, size: int, cp: int) -> bool:
        """Return whether a larger micro-batch could still make the device faster, or whether it was pinned."""
        pinned = self.pinned("micro_batch") or self.pinned("grad_accum")
        return size == 1 or pinned or size * self.question.positions // cp <= self._max_tokens

    def _pipelines(self, pp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the schedules of a pipeline with their stages, split by cost where they are not pinned.

        GPipe is left out unless pinned: 1F1B takes as long and holds fewer activations.
        """
        pipeline = self.pins.pipeline
        if pp == 1:
            yield pipeline.schedule, ()
            return
        schedules = ("1f1b", "interleaved", "zero-bubble")
        if "schedule" in pipeline.model_fields_set:
            schedules = (pipeline.schedule,)
        for schedule in schedules:
            if schedule == "zero-bubble" and self.pinned("compile") and self.pins.compile:
                continue
            if pipeline.stages:
                yield schedule, pipeline.stages
                continue
            outline = self.question.outline
            assert outline is not None
            for rounds in rounds_of(schedule, outline.layers, pp):
                yield schedule, split_outline(outline, rounds * pp, seq_len=self.question.recipe.data.seq_len)

    def _shards_one_rank(self, sharding: str) -> bool:
        """Return whether one rank may have shards: offloaded parameters need them."""
        if self.pins.engine == "deepspeed":
            return True
        wanted = not self.pinned("sharding") or self.pins.offload == "parameters"
        return sharding == "parameters" and wanted and "parameters" in self.offloads()

    def _side_towers(self) -> list[Tower]:
        """Return the towers besides the main one that may have their own settings: those with several layers."""
        outline = self.question.outline
        assert outline is not None
        can = not self.question.for_trainer or isinstance(self.question.spec, VlmSpec)
        free = can and not self.pinned("towers")
        return [tower for tower in outline.towers[:-1] if free and tower.layers > 2]

    def _tower_recomputes(self) -> list[RecomputeChoice]:
        others = self._side_towers()
        pairs = [(main, own) for main in ("none", "selective", "full") for own in ("none", "selective", "full")]
        return [
            RecomputeChoice(main, tuple((tower.name, own) for tower in others))
            for main, own in pairs
            if others and main != own
        ]

    def _tower_shardings(self, sharding: str) -> list[tuple[tuple[str, str], ...]]:
        others = self._side_towers()
        less = {"parameters": ("optimizer", "none"), "gradients": ("none",), "optimizer": ("none",)}.get(sharding, ())
        return [(), *(tuple((tower.name, own) for tower in others) for own in less if others)]

    def _compiled(self, split: MeshSplit) -> bool:
        """Return whether to compile blocks: on a GPU, but not for DeepSpeed or a split backward."""
        if self.pinned("compile"):
            return self.pins.compile
        one_backward = split.pp == 1 or split.schedule != "zero-bubble"
        return self.question.cluster.device.kind == "cuda" and one_backward and self.pins.engine != "deepspeed"


def precision_of(question: Question, sharding: str) -> str:
    """Return the fastest precision that is safe by default: bf16 if the device has it, else fp16, else fp32.

    DeepSpeed has neither without shards. fp16 may skip steps, so replicas with local steps would diverge.
    """
    pins, has = question.pins, question.cluster.device.peak_flops
    if pins.engine == "deepspeed" and sharding == "none":
        return "fp32"
    if "bf16" in has:
        return "bf16"
    return "fp16" if "fp16" in has and pins.comm.local_steps == 1 else "fp32"


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
def comm_of(pins: Comm, context: str) -> Comm:
    """Return the pinned settings with this kind of context parallelism."""
    return pins if pins.context == context else pins.model_copy(update={"context": context})


@lru_cache(maxsize=256)
def towers_of(
    shardings: tuple[tuple[str, str], ...], choices: tuple[tuple[str, str | int], ...]
) -> dict[str, TowerPlan]:
    """Return the settings of single towers. The result is shared: do not change it."""
    sharding, recompute = dict(shardings), dict(choices)
    return {
        name: TowerPlan.model_construct(sharding=sharding.get(name), recompute=recompute.get(name))
        for name in dict.fromkeys([*sharding, *recompute])
    }
