"""How replicas compress the gradients that they send: the field `plan.comm.compression`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_serializer, model_validator

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
