"""The plan: how the work is split over the ranks, as an immutable value."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimaran.core.replica_sync import AsyncSgd, Compression, CompressionField, LocalSteps, LocalStepsField, settings_of
from trimaran.core.traits import ENGINE_TRAITS, EngineTraits
from trimaran.core.units import Bytes, Flops, Seconds

Degree = Annotated[int, Field(ge=1, le=65536)]
Axis = Literal["dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"]
Sharding = Literal["none", "optimizer", "gradients", "parameters"]
SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")  # by ZeRO stage
BatchSize = Annotated[int, Field(ge=1, le=2**24)]
MicroBatches = Annotated[tuple[BatchSize, ...], Field(max_length=65536)] | Literal["measured"]
Recompute = Literal["none", "elementwise", "selective", "full"] | Annotated[int, Field(ge=1, le=65536)]
RECOMPUTED_BY_OPERATOR = ("elementwise", "selective")  # the outputs of some operators are saved
Loss = Literal["logits", "fused", "chunked"]
ContextMethod = Literal["gather", "exchange", "ring"]
CONTEXTS: tuple[ContextMethod, ...] = ("gather", "exchange", "ring")  # the simplest first
AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
WORLD = "world"  # all ranks: the sums of a step, such as its loss and its tokens
DATA_AXES = ("dp_replicate", "dp_shard")
# The axis of what is sent inside layers and between stages, by the first words of the prediction's terms.
PAYLOAD_AXES = {
    "tensor slices": "tp",
    "gradients of images": "tp",
    "parts of the sequence": "cp",
    "experts": "ep",
    "between stages": "pp",
    "weights of replicas": "dp_replicate",
    "sums of the step": WORLD,
    "waiting for the slowest rank": WORLD,
}
DATA_PAYLOADS = ("all-gather of weights", "gradients", "copies of gathered weights")


class KindPrediction(BaseModel):
    """What a step needs on one kind of device of a cluster with several kinds.

    `rows` are the most that one of its data ranks has in a micro-batch, and `layers` the fewest and the most that its
    pipeline ranks hold. `busy_seconds` is a step without waiting for the other kinds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str
    ranks: int
    rows: int
    layers: tuple[int, int]
    busy_seconds: Seconds
    device_bytes: Bytes
    memory_bytes: Annotated[Bytes, Field(description="that the device has")]


class Prediction(BaseModel):
    """Bytes and seconds of one rank and one optimizer step, with the names that the run reports.

    `peak_bytes` is the peak of one rank's tensors, as the framework would report it; `reserved_bytes` is what its
    allocator reserves for them. `device_bytes` adds the CUDA context and the collectives' buffers: what the device must
    have. `host_bytes` is pinned on one node. `error` is the expected relative half-width around `step_seconds`, and
    around `peak_bytes` unless that has its own. `no_mfu` is why `mfu` is 0 and not known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    fits: bool
    peak_bytes: Bytes
    reserved_bytes: Bytes
    step_seconds: Seconds
    tokens_per_second: float
    mfu: float
    flops_per_step: Flops
    device_peak_flops: Flops
    repeated_flops: Annotated[Flops, Field(description="recomputed flops of a step")] = Flops(0.0)
    memory: Annotated[dict[str, Bytes], Field(description="peak bytes of one rank by term")]
    time: Annotated[dict[str, Seconds], Field(description="seconds of one step by term")]
    exposed: Annotated[dict[str, Seconds], Field(description="the seconds of `comm` by payload and link")] = {}
    device_bytes: Bytes = Bytes(0)
    host_bytes: Bytes = Bytes(0)
    disk_bytes: Annotated[Bytes, Field(description="of one node's disk, for offloaded tensors")] = Bytes(0)
    error: float = 0.3
    memory_error: Annotated[float | None, Field(description="of `peak_bytes`; null: the same as `error`")] = None
    no_mfu: Annotated[str, Field(description="why no MFU is given; empty if one is")] = ""
    source: str = Field(default="", description="the source of the rates behind the seconds")
    cluster: str = Field(default="", description="nodes and devices that it is for: 2x8xH100; empty in older plans")

    kinds: Annotated[tuple[KindPrediction, ...], Field(description="of a cluster with several kinds of devices")] = ()

    @property
    def memory_limit(self) -> Bytes | None:
        """The memory of the fullest kind of device, which `device_bytes` is of; None if all devices are equal."""
        fullest = max(self.kinds, key=lambda kind: kind.device_bytes / kind.memory_bytes, default=None)
        return fullest.memory_bytes if fullest else None

    @property
    def mfu_is_known(self) -> bool:
        """Whether the device's peak is known, so that a measured step has an MFU. Older plans did not say so."""
        return not self.no_mfu and not self.source.startswith("cpu ")

    def error_of(self, name: str, off: float = 0.0) -> float:
        """Return the expected relative error of a total, such as `peak_bytes`, in the direction of `off`.

        A rate is within its bar if the time of a step is: a fifth less time is a quarter more tokens per second.
        """
        if name in ("tokens_per_second", "mfu"):
            return self.error / max(1 - self.error, 0.1) if off > 0 else self.error / (1 + self.error)
        return self.error if name != "peak_bytes" or self.memory_error is None else self.memory_error


class Mesh(BaseModel):
    """The degree of each axis. Experts are spread over data ranks, so `ep` is not a factor of the world size."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dp_replicate: Degree = 1
    dp_shard: Degree = 1
    tp: Degree = 1
    pp: Degree = 1
    cp: Degree = 1
    ep: Degree = 1

    @property
    def world_size(self) -> int:
        return math.prod((self.dp_replicate, self.dp_shard, self.tp, self.pp, self.cp))

    @property
    def dp(self) -> int:
        """Ranks that process different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def data(self) -> int:
        """Ranks that process different tokens: gradients are summed over them."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks that parameters are sharded over: dp_shard and context parallel ranks."""
        return self.dp_shard * self.cp

    @property
    def expert_ranks(self) -> int:
        """Ranks that experts may be spread over. Sharded experts stay inside the shards."""
        return self.shards if self.dp_shard > 1 else self.data

    def __str__(self) -> str:
        split = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(split) or "one device"


class Pipeline(BaseModel):
    """How layers become pipeline stages. `stages` is the number of layers of each; empty means split by cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    stages: Annotated[tuple[Annotated[int, Field(le=65536)], ...], Field(max_length=65536)] = ()


@cache
def _local_steps(steps: int) -> LocalSteps:
    """Return local steps with default options. The planner asks for them for every plan that it prices."""
    return LocalSteps.model_construct(steps=steps)


class Comm(BaseModel):
    """How gradients, weights, keys and inputs are communicated.

    `bucket_mb` is how many MiB of gradients are sent together: a bucket of replicas, or at least, of small layers whose
    weights are sharded. `prefetch` is how many blocks ahead sharded weights are gathered. `reshard` says what happens
    to a block's gathered weights after its forward: `auto` frees them if parameters are sharded, a number keeps them
    sharded over that many ranks. `context` is how context parallel attention reaches the keys of other ranks: by
    gathering keys and values on every rank, by exchanging heads for positions (Ulysses), or block by block while the
    last block is computed (ring attention). With `overlap`, replicas
    sum their gradients during backward, bucket by bucket. Without it they do so after backward, which can then be a
    CUDA graph. The planner chooses, unless it is pinned. Tensor-parallel ranks gather the input of attention, of the
    feed-forward and of the head. With `regather` each saves only its own part of it, and gathers it again in backward.
    `async_sgd` is for `engine: async` only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket_mb: Annotated[int, Field(ge=1, le=4096)] = 25
    compression: CompressionField = "none"
    local_steps: LocalStepsField = 1
    prefetch: Annotated[int, Field(ge=1, le=64)] = 1
    reshard: Literal["auto", "always", "never"] | Annotated[int, Field(ge=2, le=65536)] = "auto"
    context: ContextMethod = "gather"
    overlap: bool = True
    regather: bool = False
    async_sgd: AsyncSgd = AsyncSgd()

    @property
    def local(self) -> LocalSteps:
        """`local_steps` with all its options; a number alone averages weights every so many steps."""
        return self.local_steps if isinstance(self.local_steps, LocalSteps) else _local_steps(self.local_steps)

    @property
    def sync_every(self) -> int:
        """Steps from one synchronisation of the replicas to the next; 1 if they do not train alone."""
        return self.local_steps.steps if isinstance(self.local_steps, LocalSteps) else self.local_steps

    @property
    def compression_settings(self) -> Compression:
        """The settings of `compression`, which may be a plain word."""
        return settings_of(self.compression)


class TowerPlan(BaseModel):
    """What one tower of a model does differently from the rest; None follows the plan."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sharding: Sharding | None = None
    recompute: Recompute | None = None
    tp: Annotated[Degree | None, Field(description="ranks that split each matrix; divides the mesh's tp")] = None


class Fp8(BaseModel):
    """How `precision: fp8` scales its operands.

    `tensor` has one scale for each operand. `block` has one for each 1x128 values of inputs and gradients and for each
    128x128 of a weight, on Hopper. `mx` has a power of two for each 1x32 values (MXFP8), on Blackwell.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    recipe: Literal["tensor", "block", "mx"] = "tensor"
    all_gather: Annotated[bool, Field(description="sharded weights of fp8 layers are gathered in fp8")] = False


class Disk(BaseModel):
    """The folder that `offload` writes to in place of host memory; empty: host memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Annotated[str, Field(max_length=4096, description="a folder on a local NVMe disk of every node")] = ""
    any_filesystem: Annotated[bool, Field(description="allow filesystems in memory and on the network")] = False


class Plan(BaseModel):
    """How a recipe runs on a cluster. Batch, gradient accumulation and degrees are set only here.

    A recipe's `plan:` has this type, too: its `model_fields_set` are the fields that the user pinned, and the planner
    fills in the rest. `loss` says how head and loss are computed. `logits` keeps the full logits for backward, `fused`
    overwrites them with their gradient at once, and `chunked` computes only some rows of them at a time. `cuda_graphs`
    allows forward and backward to be replayed as CUDA graphs, see `captures_steps`. With `engine: async` replicas do
    not wait for each other: a parameter server applies their gradients as they arrive.

    With a path in `disk`, `offload: optimizer` and `offload: parameters` keep their tensors in files there.

    `micro_batches` is for data ranks of unequal speed: the rows of a micro-batch of each, where `micro_batch` is then
    the most of them. With `measured` the ranks measure their speeds at start, and share as many rows as with
    `micro_batch` each. Empty: every data rank has `micro_batch` rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mesh: Mesh = Mesh()
    sharding: Sharding = "none"
    pipeline: Pipeline = Pipeline()
    micro_batch: BatchSize = 1
    micro_batches: MicroBatches = ()
    grad_accum: BatchSize = 1
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    fp8: Fp8 = Fp8()
    recompute: Recompute = "none"
    offload: Literal["none", "optimizer", "parameters", "activations"] = "none"
    disk: Disk = Disk()
    compile: bool = False
    cuda_graphs: bool = True
    loss: Loss = "logits"
    comm: Comm = Comm()
    engine: Literal["torch", "deepspeed", "async"] = "torch"
    towers: Annotated[dict[str, TowerPlan], Field(description="what single towers of a VLM do differently")] = {}
    prediction: Annotated[Prediction | None, Field(exclude=True)] = None

    @model_validator(mode="after")
    def _with_largest_micro_batch(self) -> Self:
        """Set `micro_batch` to the most rows of any rank: memory and time of a step follow from it."""
        if self.rows_by_rank:
            object.__setattr__(self, "micro_batch", max(self.rows_by_rank))  # the only change, before anyone sees it
            self.model_fields_set.add("micro_batch")
        return self

    @property
    def rows_by_rank(self) -> tuple[int, ...]:
        """The rows of a micro-batch of each data rank, if they are given; empty if all ranks have `micro_batch`."""
        return self.micro_batches if isinstance(self.micro_batches, tuple) else ()

    @property
    def rows_at_once(self) -> int:
        """Rows that all data ranks together process at a time, in one micro-batch each."""
        return sum(self.rows_by_rank) or self.mesh.dp * self.micro_batch

    @property
    def global_batch(self) -> int:
        return self.rows_at_once * self.grad_accum

    @property
    def engine_traits(self) -> EngineTraits:
        """What the plan's engine does and supports."""
        return ENGINE_TRAITS[self.engine]

    @property
    def sync_every(self) -> int:
        """Steps from one at which all replicas hold the same weights to the next."""
        return self.comm.sync_every if self.engine_traits.is_synchronous else self.comm.async_sgd.pause_every

    @property
    def is_elastic(self) -> bool:
        """Whether each replica is a world of its own, which the others can go on without."""
        return self.comm.local.elastic and self.comm.local.is_on and self.mesh.dp_replicate > 1

    @property
    def splits_weights(self) -> bool:
        """Whether each matrix is stored as two 16-bit halves; matmuls read the upper half.

        Together they are the fp32 weight, bit for bit. It pays if no gradient is communicated: gradients stay 16 bits
        wide, as backward produced them.
        """
        alone = self.mesh.world_size == 1 and self.sharding == "none" and not self.engine_traits.keeps_states_elsewhere
        alone = alone and not self.comm.local.is_on  # the exchange reads and writes whole weights
        # Host memory would be pinned for the lower halves; files are as large as they need to be.
        offloads = ("none", "activations", "optimizer") if self.disk.path else ("none", "activations")
        return alone and self.precision in ("bf16", "fp8") and self.offload in offloads

    @property
    def offloads_to_disk(self) -> bool:
        """Whether optimizer states, and parameters if they are offloaded, are in files."""
        return bool(self.disk.path) and self.offload in ("optimizer", "parameters")

    @property
    def joins_projections(self) -> bool:
        """Whether projections of the same input are one matmul (`nets/decoder/joint_projections.py`).

        Weights must be adjacent in memory without a copy at every step: here they are split. In fp8 every layer has its
        own scale, and recompute by operator counts matmuls.
        """
        return self.splits_weights and self.precision == "bf16" and self.recompute not in RECOMPUTED_BY_OPERATOR

    @property
    def joins_projections_on_cpu(self) -> bool:
        """Whether projections of the same input are one matmul on a CPU, where weights of fp32 plans are joined, too.

        In compiled code they stay separate: the compiler does not look inside our operators.
        """
        shardings = (self.sharding, *(each.sharding or "none" for each in self.towers.values()))
        is_replicated = (
            self.mesh.world_size == self.mesh.dp_replicate and self.mesh.ep == 1 and {*shardings} == {"none"}
        )
        is_plain = self.precision == "fp32" and not self.compile and not self.engine_traits.shards_weights_itself
        return self.joins_projections or (is_replicated and is_plain and self.recompute not in RECOMPUTED_BY_OPERATOR)

    @property
    def reduces_after_backward(self) -> bool:
        """Whether replicas sum their gradients after the last backward of a step, not during it."""
        return not self.comm.overlap and self.mesh.world_size == self.mesh.dp_replicate > 1 == self.mesh.ep

    @property
    def captures_steps(self) -> bool:
        """Whether a GPU replays forward and backward as CUDA graphs, for batches of one shape.

        Neither may communicate, so there is one rank, or replicas reduce their gradients afterwards. Nothing may wait
        for the host: a loss scale does, and so does recompute outside compiled blocks, which saves the state of the
        random number generator.
        """
        alone = (self.mesh.world_size == 1 or self.reduces_after_backward) and self.sharding == "none"
        alone = alone and self.engine_traits.captures_steps
        waits = self.precision == "fp16" or self.offload != "none" or (self.recompute != "none" and not self.compile)
        return self.cuda_graphs and alone and not waits

    @property
    def num_stages(self) -> int:
        """Stages that the layers are split into; 1 without a pipeline."""
        if self.mesh.pp == 1:
            return 1
        rounds = 2 if self.pipeline.schedule in ("interleaved", "zero-bubble") else 1
        return len(self.pipeline.stages) or rounds * self.mesh.pp

    @property
    def bubble(self) -> float:
        """The fraction of a step in which a rank of the pipeline waits, in theory; 0 without a pipeline.

        Assumes equal stages and free communication. `zero-bubble` is the V-shaped schedule. It assumes that forward,
        backward to the input and backward to the weights take equally long: a rank has 6 such units per micro-batch.
        With too few micro-batches to fill the pipeline, it waits longer.
        """
        ranks, count = self.mesh.pp, self.grad_accum
        idle, busy = ranks - 1, self.num_stages // ranks * count
        if ranks > 1 and self.pipeline.schedule == "zero-bubble":
            idle, busy = max(ranks - 1, 2 * (2 * ranks - 1 - count)), 6 * count
        return idle / (busy + idle)

    def __str__(self) -> str:
        batch = f"micro-batch {self.micro_batch} x accumulation {self.grad_accum} x {self.mesh.dp} data ranks"
        if rows := self.rows_by_rank:
            batch = f"micro-batches of {show_rows(rows)} rows x accumulation {self.grad_accum}"
        elif self.micro_batches:
            batch += ", rows by measured speed"
        extras = [f"shard {self.sharding}"] if self.sharding != "none" else []
        extras += [self.pipeline.schedule] if self.mesh.pp > 1 else []
        extras += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        to = " to disk" if self.offloads_to_disk else ""
        extras += [f"offload {self.offload}{to}"] if self.offload != "none" else []
        extras += [f"loss {self.loss}"] if self.loss != "logits" else []
        extras += ["ring attention"] if self.comm.context == "ring" and self.mesh.cp > 1 else []
        extras += ["inputs gathered again"] if self.comm.regather and self.mesh.tp > 1 else []
        extras += ["gradients summed after backward"] if self.reduces_after_backward else []
        extras += ["compiled"] if self.compile else []
        extras += ["elastic replicas"] if self.is_elastic else []
        extras += [self.engine] if self.engine != "torch" else []
        extras += [] if self.engine_traits.is_synchronous else [f"staleness {self.comm.async_sgd.staleness}"]
        recipe = f" by {self.fp8.recipe}" if self.precision == "fp8" and self.fp8.recipe != "tensor" else ""
        return ", ".join([str(self.mesh), self.precision + recipe, batch, *extras])


def show_rows(rows: Sequence[int]) -> str:
    """Return the rows of each data rank as text, such as `4 x 5 + 4 x 3`: ranks times rows."""
    runs = [(len([*same]), num) for num, same in groupby(rows)]
    return " + ".join(f"{count} x {num}" for count, num in runs)


def comm_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes over which the ranks wait for each other; none for a single rank."""
    if plan.mesh.world_size == 1:
        return ()
    return *(axis for axis in AXES if getattr(plan.mesh, axis) > 1), WORLD


def data_axis(plan: Plan) -> str:
    """Return the axis that the exchange of weights and gradients between data ranks counts for.

    It may span several axes at once: shards lie on context-parallel ranks, too, and replicas add up the same gradients.
    Then it counts for the first of them.
    """
    is_sharded = plan.sharding != "none" or any((each.sharding or "none") != "none" for each in plan.towers.values())
    order = ("dp_shard", "cp", "dp_replicate", "tp") if is_sharded else ("dp_replicate", "dp_shard", "cp")
    return next((axis for axis in order if getattr(plan.mesh, axis) > 1), WORLD)


def predicted_comm(plan: Plan) -> dict[str, float]:
    """Return the predicted seconds of a step that a rank waits, by axis; empty without a prediction.

    The time by which collectives slow down computing is not among them: a run measures it as forward and backward.
    """
    if plan.prediction is None:
        return {}
    seconds = dict.fromkeys(comm_axes(plan), 0.0)
    for term, value in plan.prediction.exposed.items():
        payload = term.partition(" on ")[0]
        axis = data_axis(plan) if payload in DATA_PAYLOADS else PAYLOAD_AXES.get(payload)
        if axis in seconds:
            seconds[axis] += value
    if "pp" in seconds:
        seconds["pp"] += plan.prediction.time.get("bubble", 0.0)
    return seconds
