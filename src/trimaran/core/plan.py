"""The noun in the middle: how the work is split, as an immutable value."""

import math
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core.prediction import Prediction

Degree = Annotated[int, Field(ge=1, le=65536)]
Axis = Literal["dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"]
AXES: tuple[Axis, ...] = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")


class Mesh(BaseModel):
    """How ranks are split. Experts live inside the data-parallel ranks, so `ep` is not a factor of the world size."""

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
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        split = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        return " x ".join(split) or "one device"


class Pipeline(BaseModel):
    """How layers become stages. `stages` lists the layers of each stage; empty means split by cost."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    stages: tuple[int, ...] = ()


class Comm(BaseModel):
    """How gradients travel."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket_mb: Annotated[int, Field(ge=1, le=4096)] = 25
    compression: Literal["none", "fp16", "bf16", "powersgd", "topk"] = "none"
    local_steps: Annotated[int, Field(ge=1)] = 1


class Plan(BaseModel):
    """One way to run a recipe on a cluster. Batch, accumulation and degrees are set here and nowhere else.

    A recipe's `plan:` is this same type: what a person pinned is its `model_fields_set`, the planner fills in the rest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mesh: Mesh = Mesh()
    sharding: Literal["none", "optimizer", "gradients", "parameters"] = "none"
    pipeline: Pipeline = Pipeline()
    micro_batch: Annotated[int, Field(ge=1)] = 1
    grad_accum: Annotated[int, Field(ge=1)] = 1
    precision: Literal["fp32", "bf16", "fp16", "fp8"] = "fp32"
    recompute: Literal["none", "selective", "full"] | Annotated[int, Field(ge=1)] = "none"
    offload: Literal["none", "optimizer", "parameters", "activations"] = "none"
    compile: bool = False
    comm: Comm = Comm()
    engine: Literal["torch", "deepspeed"] = "torch"
    prediction: Annotated[Prediction | None, Field(exclude=True)] = None

    @property
    def global_batch(self) -> int:
        return self.mesh.dp * self.micro_batch * self.grad_accum

    def __str__(self) -> str:
        batch = f"micro-batch {self.micro_batch} x accumulation {self.grad_accum} x {self.mesh.dp} data ranks"
        extras = [f"shard {self.sharding}"] if self.sharding != "none" else []
        extras += [f"recompute {self.recompute}"] if self.recompute != "none" else []
        extras += ["compiled"] if self.compile else []
        return ", ".join([str(self.mesh), self.precision, batch, *extras])
