"""What a plan may be: every way to cut network, work and states that keeps the pins and can run."""

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

from trimaran.core import Comm, Mesh, Pipeline, Plan, UserError
from trimaran.core.plan import TowerPlan
from trimaran.models import ModelSpec, Tower, VlmSpec, split_outline
from trimaran.models.perception_spec import PerceptionSpec
from trimaran.models.stages import Spec
from trimaran.planner.axis_rules import check_axes, takes_micro_batches
from trimaran.planner.degrees import divisors
from trimaran.planner.generic_rules import split_sizes
from trimaran.planner.loss_choices import PIECES, losses_of
from trimaran.planner.question import Question

# Past this a micro-batch makes a device no faster, only fuller.
MAX_MICRO_BATCH = {"cuda": 64, "cpu": 16}
MAX_MICRO_BATCH_TOKENS = 32_768
MIN_POSITIONS = 128  # of a sequence on one rank: fewer do not fill one tile of a matrix product
MOST_STAGES_A_RANK = 8
EVERY, FINELY = (8, 4, 2), (8, 6, 4, 3, 2)  # which layers may be computed again
FEW_DEVICES = 8  # on which there is little else to choose
SHARDINGS = ("none", "optimizer", "gradients", "parameters")
OFFLOADS = ("none", "activations", "optimizer", "parameters")


class MicrobatchSplit(NamedTuple):
    """What the arithmetic of one micro-batch depends on."""

    tp: int
    cp: int
    ep: int
    context: str
    micro_batch: int


class MeshSplit(NamedTuple):
    """One way to cut network and work, before the data ranks decide what of the states they share."""

    grid: MicrobatchSplit
    pp: int
    schedule: str
    stages: tuple[int, ...]
    dp: int
    grad_accum: int


class StateSharding(NamedTuple):
    """What of the states the data ranks share; `towers` are those that do it differently."""

    sharding: str
    dp_shard: int
    towers: tuple[tuple[str, str], ...] = ()


class RecomputeChoice(NamedTuple):
    """What is not kept: computed again in backward, where `towers` may do it differently, and how the loss is made."""

    recompute: str | int
    towers: tuple[tuple[str, str | int], ...] = ()
    loss: str = ""  # the usual one


class Candidate(NamedTuple):
    """A cut with what its data ranks share, and what lives on the host."""

    cut: MeshSplit
    share: StateSharding
    offload: str


class Space:
    """All plans that a question leaves open."""

    def __init__(self, question: Question) -> None:
        self.question, self.pins, self.losses = question, question.pins, losses_of(question)
        self._shares: dict[tuple[int, int], list[StateSharding]] = {}

    def pinned(self, field: str) -> bool:
        return field in self.pins.model_fields_set

    def degree(self, axis: str) -> int | None:
        """Return the degree that was pinned for the axis."""
        return getattr(self.pins.mesh, axis) if axis in self.pins.mesh.model_fields_set else None

    def grids(self) -> Iterator[MicrobatchSplit]:
        """Yield what a micro-batch may be cut into. tp stays where the innermost links are: inside a node."""
        world = self.question.cluster.world_size
        sizes = self._micro_batches()
        for tp in self._degrees("tp", math.gcd(world, self._reach())):
            for cp in self._degrees("cp", world // tp if world % tp == 0 else 1):
                for context, ep in product(self._contexts(tp, cp), self._degrees("ep", world)):
                    if self._divides(tp, cp, ep, context):
                        yield from (
                            MicrobatchSplit(tp, cp, ep, context, size) for size in sizes if self._worth(size, cp)
                        )

    def grids_of(self, tp: int, cp: int, ep: int) -> Iterator[MicrobatchSplit]:
        """Yield all that a micro-batch may be on ranks that are cut so, whether other cuts make more of it or not."""
        for context in self._contexts(tp, cp):
            if self._divides(tp, cp, ep, context):
                yield from (
                    MicrobatchSplit(tp, cp, ep, context, size)
                    for size in self._micro_batches()
                    if self._holds(size, cp)
                )

    def cuts(self, grid: MicrobatchSplit) -> Iterator[MeshSplit]:
        """Yield the pipelines that such micro-batches may go through, and none; all of them use every device."""
        question = self.question
        batch, inner = question.recipe.train.global_batch, grid.tp * grid.cp
        for pp in self._degrees("pp", question.cluster.world_size // inner):
            dp, left = divmod(question.cluster.world_size, inner * pp)
            if left or batch % dp or batch // dp % grid.micro_batch or dp * grid.cp % grid.ep:
                continue
            count = batch // dp // grid.micro_batch
            if self.pinned("grad_accum") and count != self.pins.grad_accum:
                continue
            for schedule, stages in self._pipelines(pp):
                if pp == 1 or takes_micro_batches(schedule, pp, count):
                    yield MeshSplit(grid, pp, schedule, stages, dp, count)

    def shares(self, cut: MeshSplit) -> list[StateSharding]:
        """Return what the data ranks may share, over some or all: nothing, optimizer states, gradients, weights."""
        key = cut.dp, cut.grid.cp
        if key not in self._shares:
            self._shares[key] = list(self._open_shares(*key))
        return self._shares[key]

    def _open_shares(self, dp: int, cp: int) -> Iterator[StateSharding]:
        replicas, shards = self.degree("dp_replicate"), self.degree("dp_shard")
        for sharding in (self.pins.sharding,) if self.pinned("sharding") else SHARDINGS:
            for dp_shard in divisors(dp, most=dp) if sharding != "none" else (1,):
                if shards not in (None, dp_shard) or replicas not in (None, dp // dp_shard):
                    continue
                if sharding == "none" or dp_shard * cp > 1 or self._shares_alone(sharding):
                    yield from (StateSharding(sharding, dp_shard, towers) for towers in self._tower_shares(sharding))

    def goes(self, cut: MeshSplit, share: StateSharding, offload: str) -> bool:
        """Return whether share and offload go together: parameters leave by the shard, for which one rank will do."""
        if offload == "parameters" and (share.sharding != "parameters" or (share.towers and self.question.trains)):
            return False
        alone = share.sharding != "none" and share.dp_shard * cut.grid.cp == 1
        return not alone or offload == "parameters" or self.pins.engine == "deepspeed"

    def levels(self, cut: MeshSplit) -> tuple[RecomputeChoice, ...]:
        """Return what need not be kept. Where logits are large they may also be made in pieces."""
        grid, levels = cut.grid, self._recomputes(cut)
        if not self.losses.come_in_pieces(grid.micro_batch, tp=grid.tp, pp=cut.pp, cp=grid.cp):
            return levels
        return (*levels, *(level._replace(loss=PIECES) for level in levels))

    def _recomputes(self, cut: MeshSplit) -> tuple[RecomputeChoice, ...]:
        """Return what may be computed again. A backward that is cut in two can do nothing twice."""
        if self.pinned("recompute") or self.pins.towers:
            return (RecomputeChoice(self.pins.recompute),)
        if cut.schedule == "zero-bubble":
            return (RecomputeChoice("none"),)
        assert self.question.outline is not None
        if self.pins.compile and cut.grid.tp > 1 and self.question.cluster.device.kind == "cpu":
            return RecomputeChoice("none"), RecomputeChoice("selective")  # torch cannot compile the others there
        layers = self.question.outline.layers
        every = FINELY if self.question.cluster.world_size <= FEW_DEVICES else EVERY
        some = [RecomputeChoice(each) for each in every if each <= layers]
        return (
            RecomputeChoice("none"),
            RecomputeChoice("selective"),
            *some,
            *self._tower_levels(),
            RecomputeChoice("full"),
        )

    def offloads(self) -> tuple[str, ...]:
        """Return what may live on the host: nothing on a CPU, where the host is all there is."""
        if self.pinned("offload"):
            return (self.pins.offload,)
        return OFFLOADS if self.question.cluster.device.kind == "cuda" else ("none",)

    def plan(self, cut: MeshSplit, share: StateSharding, level: RecomputeChoice, offload: str = "none") -> Plan:
        """Return the plan. It is not validated: a search makes thousands of them."""
        pins, grid = self.pins, cut.grid
        mesh = mesh_of(cut.dp // share.dp_shard, share.dp_shard, grid.tp, cut.pp, grid.cp, grid.ep)
        fields: dict[str, Any] = {
            "mesh": mesh,
            "sharding": share.sharding,
            "pipeline": pipeline_of(cut.schedule, cut.stages),
            "micro_batch": grid.micro_batch,
            "grad_accum": cut.grad_accum,
            "precision": pins.precision if self.pinned("precision") else precision_of(self.question, share.sharding),
            "recompute": level.recompute,
            "offload": offload,
            "compile": self._compiled(cut),
            "loss": self.losses.on(grid.tp, cut.pp, level.loss),
            "comm": comm_of(pins.comm, grid.context),
            "engine": pins.engine,
            "towers": pins.towers or towers_of(share.towers, level.towers),
            "prediction": None,
        }
        return Plan.model_construct(**fields)

    def _degrees(self, axis: str, most: int) -> list[int]:
        if (degree := self.degree(axis)) is not None:
            return [degree]
        if not self._open(axis):
            return [1]
        question = self.question
        assert question.outline is not None
        if axis == "pp":
            most = min(most, question.outline.layers)
        if axis == "cp":
            most = min(most, max(1, question.positions // MIN_POSITIONS))
        known = {"tp": most, "ep": most}.get(axis, question.cluster.world_size)
        return [each for each in divisors(known, most=most) if question.cluster.world_size % each == 0]

    def _open(self, axis: str) -> bool:
        """Return whether the planner may use the axis where nobody pinned it.

        Our trainer cuts a Hugging Face model's forward in no way, and only known shapes into slices. Whole replicas are
        what compressed gradients and steps alone are for, and all that DeepSpeed does with a mesh is shard.
        """
        question, comm = self.question, self.pins.comm
        if self.pins.engine == "deepspeed" or comm.compression != "none" or comm.local_steps > 1:
            return False
        if axis in ("tp", "pp") and self.losses.pins_fusion:
            return False
        if question.trains and question.recipe.model.family == "hf":
            return axis in ("tp", "cp") and isinstance(question.spec, ModelSpec)
        return True

    def _reach(self) -> int:
        cluster = self.question.cluster
        return max(cluster.devices_per_node, cluster.levels[0].devices)

    def _contexts(self, tp: int, cp: int) -> tuple[str, ...]:
        if cp == 1 or "context" in self.pins.comm.model_fields_set:
            return (self.pins.comm.context,)
        return ("gather", "exchange")

    def _divides(self, tp: int, cp: int, ep: int, context: str) -> bool:
        """Return whether the degrees divide what they split, pinned ones too: what does not is for others to tell."""
        question = self.question
        outline, recipe = question.outline, question.recipe
        assert outline is not None
        plan = Plan.model_construct(
            mesh=mesh_of(dp_replicate=ep, tp=tp, cp=cp, ep=ep), comm=Comm.model_construct(context=context)
        )
        if question.trains and isinstance(question.spec, VlmSpec | PerceptionSpec):
            return self._trains_so(plan.model_copy(update={"towers": self.pins.towers}), question.spec)
        if any(
            size % degree
            for axis, degree in (("tp", tp), ("cp", cp), ("ep", ep))
            if degree > 1
            for _, size in split_sizes(outline, plan, recipe.data.seq_len, axis)
        ):
            return False
        ours = question.trains and recipe.model.family == "decoder"
        whole = ours and (question.recipe.data.seq_len // cp % tp or outline.main.vocab % tp)
        opaque = any(not hasattr(block, "heads") for tower in outline.towers for block, _ in tower.runs)
        return not whole and not (opaque and tp * cp > 1)

    def _trains_so(self, plan: Plan, spec: Spec) -> bool:
        """Return whether our trainer cuts a network of several towers like this.

        Blocks of which only totals are known, a perception model's convolutions, stay whole on every slice.
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

    def _worth(self, size: int, cp: int) -> bool:
        """Return whether such micro-batches of parts of a sequence are of interest.

        Two halves of two sequences on a rank take what one whole sequence takes, and the way between the halves: more
        data ranks with a smaller micro-batch do the same for less.
        """
        pinned = self.pinned("micro_batch") or self.pinned("grad_accum")
        if cp > 1 and not pinned and not self.pins.mesh.model_fields_set and math.gcd(size, cp) > 1:
            return False
        return self._holds(size, cp)

    def _holds(self, size: int, cp: int) -> bool:
        """Return whether such micro-batches are of a size that makes a device faster, or were pinned."""
        pinned = self.pinned("micro_batch") or self.pinned("grad_accum")
        return size == 1 or pinned or size * self.question.positions // cp <= MAX_MICRO_BATCH_TOKENS

    def _pipelines(self, pp: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the schedules of a pipeline with their stages, cut by cost where nobody cut them.

        GPipe is left out unless it was pinned: 1F1B takes as long and keeps fewer activations.
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

    def _shares_alone(self, sharding: str) -> bool:
        """Return whether one rank may have shards: what is offloaded begins with them, if only with one."""
        if self.pins.engine == "deepspeed":
            return True
        wanted = not self.pinned("sharding") or self.pins.offload == "parameters"
        return sharding == "parameters" and wanted and "parameters" in self.offloads()

    def _others(self) -> list[Tower]:
        """Return the towers beside the main one that may have their own way: deep enough to matter."""
        outline = self.question.outline
        assert outline is not None
        can = not self.question.trains or isinstance(self.question.spec, VlmSpec)
        free = can and not self.pinned("towers")
        return [tower for tower in outline.towers[:-1] if free and tower.layers > 2]

    def _tower_levels(self) -> list[RecomputeChoice]:
        others = self._others()
        ways = [(main, own) for main in ("none", "selective", "full") for own in ("none", "selective", "full")]
        return [
            RecomputeChoice(main, tuple((tower.name, own) for tower in others))
            for main, own in ways
            if others and main != own
        ]

    def _tower_shares(self, sharding: str) -> list[tuple[tuple[str, str], ...]]:
        others = self._others()
        less = {"parameters": ("optimizer", "none"), "gradients": ("none",), "optimizer": ("none",)}.get(sharding, ())
        return [(), *(tuple((tower.name, own) for tower in others) for own in less if others)]

    def _compiled(self, cut: MeshSplit) -> bool:
        """Return whether to compile blocks: on a GPU, but not for DeepSpeed or a backward that is cut in two."""
        if self.pinned("compile"):
            return self.pins.compile
        whole = cut.pp == 1 or cut.schedule != "zero-bubble"
        return self.question.cluster.device.kind == "cuda" and whole and self.pins.engine != "deepspeed"


def precision_of(question: Question, sharding: str) -> str:
    """Return the quickest precision that needs nobody's consent: bf16 where the device has it, else fp16, else fp32.

    DeepSpeed has neither without shards. In fp16 steps may be skipped, and replicas that train alone would skip
    different ones.
    """
    pins, has = question.pins, question.cluster.device.peak_flops
    if pins.engine == "deepspeed" and sharding == "none":
        return "fp32"
    if "bf16" in has:
        return "bf16"
    return "fp16" if "fp16" in has and pins.comm.local_steps == 1 else "fp32"


def rounds_of(schedule: str, layers: int, pp: int) -> tuple[int, ...]:
    """Return how many stages a rank may hold: with `interleaved` two, as many as can be, and what is most even."""
    if schedule != "interleaved":
        rounds = 2 if schedule == "zero-bubble" else 1
        return (rounds,) if rounds * pp <= layers else ()
    most = min(MOST_STAGES_A_RANK, layers // pp)
    if most < 2:
        return ()
    even = min(range(2, most + 1), key=lambda rounds: (-(-layers // (rounds * pp)) * rounds, -rounds))
    return tuple(sorted({2, even, most}))


@lru_cache(maxsize=8192)
def mesh_of(dp_replicate: int = 1, dp_shard: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Mesh:
    """Return the mesh, made once."""
    return Mesh.model_construct(dp_replicate=dp_replicate, dp_shard=dp_shard, tp=tp, pp=pp, cp=cp, ep=ep)


@lru_cache(maxsize=8192)
def pipeline_of(schedule: str, stages: tuple[int, ...]) -> Pipeline:
    """Return the pipeline, made once."""
    return Pipeline.model_construct(schedule=schedule, stages=stages)


@lru_cache(maxsize=256)
def comm_of(pins: Comm, context: str) -> Comm:
    """Return the pinned settings with this way for keys to meet queries."""
    return pins if pins.context == context else pins.model_copy(update={"context": context})


@lru_cache(maxsize=256)
def towers_of(shares: tuple[tuple[str, str], ...], levels: tuple[tuple[str, str | int], ...]) -> dict[str, TowerPlan]:
    """Return what single towers do differently. Nobody changes what comes back."""
    share, level = dict(shares), dict(levels)
    return {
        name: TowerPlan.model_construct(sharding=share.get(name), recompute=level.get(name))
        for name in dict.fromkeys([*share, *level])
    }
