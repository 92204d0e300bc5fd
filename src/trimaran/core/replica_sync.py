"""How replicas that do not average all gradients at every step train: local steps, compression, asynchronous SGD.

With local steps replicas train alone for some steps, then synchronise (local SGD, DiLoCo, Streaming DiLoCo,
SparseLoCo). What a plan says about it, when which part of the model is synchronised, and how many bytes that takes.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_serializer, model_validator

SPARSE_BLOCK = 4096  # values of a block of which the largest are sent: an index has 12 bits
SPARSE_VALUE_BITS = 12 + 2  # the index in the block, and one of four levels
SPARSE_LEVEL_BYTES = 8  # the magnitudes of a block's two levels, in fp32
INT8_BLOCK = 256  # values that share a scale
SCALE_BYTES = 4
MAX_READ_DELAY = 16

NumSteps = Annotated[int, Field(ge=1, le=10**6)]
CompressionKind = Literal["none", "fp16", "bf16", "int8", "1bit", "topk", "powersgd"]
LayerKind = Literal["embed", "attention", "mlp", "head"]
Fraction = Annotated[float, Field(gt=0, le=1)]

# The fields of each kind, with their defaults. `layers` and `check_every` are fields of all kinds.
KIND_FIELDS: Mapping[CompressionKind, Mapping[str, Any]] = {
    "none": {},
    "fp16": {},
    "bf16": {},
    "int8": {"block": 256, "error_feedback": False},
    "1bit": {"block": 256, "warmup_steps": 10, "error_feedback": True},
    "topk": {"ratio": 0.01, "warmup_steps": 0, "momentum": 0.0, "error_feedback": True},
    "powersgd": {"rank": 4, "warmup_steps": 10, "error_feedback": True},
}
SHARED_FIELDS = {"layers": (), "check_every": 50}
FP32_BYTES = 4
INDEX_BYTES = 4  # of a value that top-k sends
MATRIX_SIDE = 4096  # of the square weights that the bytes of PowerSGD are counted for


class OuterOptimizer(BaseModel):
    """What replicas do with the outer gradient: the last synchronised weights less the local ones, averaged.

    `average` sets the weights to their mean over the replicas (local SGD). `sgd` and `nesterov` (DiLoCo) update the
    last synchronised weights. Without `lr` and `momentum`, `nesterov` uses 0.7 and 0.9, as DiLoCo does, and `sgd` 1.0
    and 0. With `offload` the outer state, in fp32, is in host memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    optimizer: Literal["average", "sgd", "nesterov"] = "average"
    lr: Annotated[float | None, Field(gt=0, le=100, allow_inf_nan=False)] = None
    momentum: Annotated[float | None, Field(ge=0, lt=1)] = None
    offload: bool = False

    @property
    def resolved_lr(self) -> float:
        return (0.7 if self.optimizer == "nesterov" else 1.0) if self.lr is None else self.lr

    @property
    def resolved_momentum(self) -> float:
        return (0.9 if self.optimizer == "nesterov" else 0.0) if self.momentum is None else self.momentum


class LocalSteps(BaseModel):
    """How replicas train alone for `steps` steps and then synchronise; optimizer moments are never exchanged.

    With `fragments` the layers are split into that many parts, which are synchronised one after another within the
    `steps`. The exchange of a part begins `overlap_steps` steps before its result is used; the new weights are then
    `mixing` parts local and the rest synchronised. `compression` is of the outer gradients. `sparse` sends the fraction
    `density` of the largest values of each block, in 2 bits, and keeps the rest for later: `error_decay` is what
    remains of it at the next synchronisation, in place of outer momentum. With `elastic` replicas may be lost and join
    again, and the others go on.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: NumSteps = 1
    outer: OuterOptimizer = OuterOptimizer()
    fragments: Annotated[int, Field(ge=1, le=65536)] = 1
    overlap_steps: Annotated[int, Field(ge=0, le=10**6)] = 0
    mixing: Annotated[float, Field(ge=0, lt=1)] = 0.5
    compression: Literal["none", "bf16", "int8", "sparse"] = "none"
    density: Annotated[float, Field(gt=0, le=1)] = 1 / 64
    error_decay: Annotated[float, Field(ge=0, le=1)] = 0.95
    elastic: bool = False

    @property
    def is_on(self) -> bool:
        """Whether replicas train alone. A plain average after every step is synchronous training: gradients are."""
        return self.steps > 1 or self.outer.optimizer != "average" or self.compression != "none"

    @property
    def keeps_outer_weights(self) -> bool:
        """Whether replicas store the last synchronised weights. A plain average does not need them."""
        return self.outer.optimizer != "average" or self.compression != "none"

    @property
    def weights_stay_local(self) -> bool:
        """Whether replicas still have different weights right after a synchronisation."""
        return self.fragments > 1 or (self.overlap_steps > 0 and self.mixing > 0)

    @property
    def read_delay(self) -> int:
        """After how many steps the sums of all ranks are read: on a slow link they take several steps to arrive."""
        return min(self.steps, MAX_READ_DELAY)

    def fragments_due(self, step: int) -> list[int]:
        """Return the fragments whose new weights are in use after `step` steps; the last one at multiples of `steps`.

        `step` counts the steps of the run, so that all replicas agree whenever they started.
        """
        position = step % self.steps or self.steps
        ends = ((number + 1) * self.steps // self.fragments for number in range(self.fragments))
        return [number for number, end in enumerate(ends) if end == position] if step > 0 else []

    @property
    def kept_per_block(self) -> int:
        """Values of a block that `sparse` sends: a multiple of 4, because four levels are a byte."""
        return max(4, min(SPARSE_BLOCK, round(self.density * SPARSE_BLOCK / 4) * 4))


def _form_of(value: object) -> str:
    return "LocalSteps" if isinstance(value, Mapping | LocalSteps) else "number"


# A number alone averages weights every so many steps. With the tags a mistake is reported for one form only.
LocalStepsField = Annotated[
    Annotated[NumSteps, Tag("number")] | Annotated[LocalSteps, Tag("LocalSteps")], Discriminator(_form_of)
]


def synchronisation_bytes(local: LocalSteps, num_values: float, num_replicas: int) -> float:
    """Return the bytes that a rank sends to synchronise `num_values` values once with the other replicas.

    An all-reduce, and a quantised one in two halves, sends each value 2(n-1)/n times. Each replica selects other values
    of a sparse gradient, so these are all-gathered.
    """
    if num_replicas == 1:
        return 0.0
    if local.compression == "sparse":
        blocks = math.ceil(num_values / SPARSE_BLOCK)
        return (num_replicas - 1) * blocks * (local.kept_per_block * SPARSE_VALUE_BITS / 8 + SPARSE_LEVEL_BYTES)
    value_bytes = {"none": 4.0, "bf16": 2.0, "int8": 1 + SCALE_BYTES / INT8_BLOCK}[local.compression]
    return 2 * (num_replicas - 1) / num_replicas * value_bytes * num_values


def exposed_outer_seconds(local: LocalSteps, sync_seconds: float, step_seconds: float) -> float:
    """Return the seconds per step that training waits for outer exchanges.

    `sync_seconds` is the time to exchange the whole model once, `step_seconds` that of a step without it. The exchange
    of a fragment hides behind `overlap_steps` steps.
    """
    of_fragment = sync_seconds / local.fragments
    return local.fragments * max(0.0, of_fragment - local.overlap_steps * step_seconds) / local.steps


class Compression(BaseModel):
    """How a gradient is compressed before it is sent. A kind has only some of the fields; the others are None.

    `ratio` is the fraction of values that top-k sends, `rank` that of PowerSGD's factors, `block` the number of values
    that share a scale. Gradients are sent uncompressed in the first `warmup_steps` of a run. With `error_feedback`,
    what a rank did not send is added to its next gradient. `momentum` makes top-k add up an exponential mean of the
    gradients in place of the gradients. `layers` are the kinds of layers whose gradients are compressed; all if empty.
    Every `check_every`-th step measures the error of the compressed sum; 0 measures none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: CompressionKind
    ratio: Fraction | None = None
    rank: Annotated[int, Field(ge=1, le=1024)] | None = None
    warmup_steps: Annotated[int, Field(ge=0, le=10**9)] | None = None
    block: Annotated[int, Field(ge=32, le=65536, multiple_of=8)] | None = None
    momentum: Annotated[float, Field(ge=0, lt=1)] | None = None
    error_feedback: bool | None = None
    layers: tuple[LayerKind, ...] = ()
    check_every: Annotated[int, Field(ge=0, le=10**9)] = 50

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, tree: Any) -> Any:
        if not isinstance(tree, Mapping) or str(tree.get("kind")) not in KIND_FIELDS:
            return tree
        own = KIND_FIELDS[tree["kind"]]
        given = {name: value for name, value in tree.items() if value is not None}
        if foreign := [name for name in given if name in FIELDS_OF_SOME_KIND and name not in own]:
            takes = ", ".join([*own, *SHARED_FIELDS]) if tree["kind"] != "none" else "none"
            raise ValueError(f"{tree['kind']} has no {' and no '.join(foreign)}; its fields are {takes}")
        return {**own, **given}

    @model_serializer(mode="wrap")
    def _without_none(self, serialize: Any) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if value is not None}

    @property
    def keeps_residual(self) -> bool:
        """Whether each rank keeps what it has not sent."""
        return bool(self.error_feedback)

    @property
    def is_gathered(self) -> bool:
        """Whether every rank receives what every other one sends, in place of a sum."""
        return self.kind in ("1bit", "topk")


FIELDS_OF_SOME_KIND = {name for fields in KIND_FIELDS.values() for name in fields}


def _form(value: Any) -> str:
    return "Compression" if isinstance(value, Mapping | Compression) else "word"


def _shortest(value: CompressionKind | Compression) -> CompressionKind | Compression:
    """Return a mapping that only repeats defaults as the plain word, so that equal plans compare equal."""
    is_default = isinstance(value, Compression) and value == Compression(kind=value.kind)
    return value.kind if isinstance(value, Compression) and is_default else value


CompressionField = Annotated[
    Annotated[CompressionKind, Tag("word")] | Annotated[Compression, Tag("Compression")],
    Discriminator(_form),
    AfterValidator(_shortest),
]
"""A kind, or a mapping with its settings."""


def settings_of(value: CompressionKind | Compression) -> Compression:
    """Return the settings of a field: those of a plain word are the defaults of its kind."""
    return value if isinstance(value, Compression) else Compression(kind=cast(CompressionKind, value))


def compressed_bytes(value: CompressionKind | Compression, num_values: float) -> float:
    """Return the bytes that a rank sends in place of a gradient of `num_values` values in fp32.

    If `is_gathered`, each rank sends them to every other rank. Otherwise they are the size of the all-reduce that moves
    as much: int8 is exchanged and gathered, which is one, and PowerSGD all-reduces its factors. Those are counted for
    square weights of `MATRIX_SIDE`. Assumes that all layers are compressed, and that the warm-up is over.
    """
    settings = settings_of(value)
    scales = FP32_BYTES / settings.block if settings.block else 0.0
    per_value = {
        "none": float(FP32_BYTES),
        "fp16": 2.0,
        "bf16": 2.0,
        "int8": 1 + scales,
        "1bit": 1 / 8 + scales,
        "topk": (FP32_BYTES + INDEX_BYTES) * (settings.ratio or 0.0),
        "powersgd": 2 * FP32_BYTES * (settings.rank or 0) / MATRIX_SIDE,
    }
    return num_values * min(FP32_BYTES, per_value[settings.kind])


class AsyncSgd(BaseModel):
    """How far workers of `engine: async` may run ahead of each other, and how often all of them pause.

    No gradient is applied more than `staleness` updates after the weights that it was computed from; 0 is synchronous
    training. Every `pause_every` updates all workers wait for each other: only then can the state be saved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    staleness: Annotated[int, Field(ge=0, le=1000)] = 4
    pause_every: Annotated[int, Field(ge=1, le=10**6)] = 50
