"""The predicted cost of a plan, term by term."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core.units import Bytes, Flops, Seconds


class Prediction(BaseModel):
    """Bytes and seconds of one rank and one optimizer step, with the names that the run reports.

    `peak_bytes` is the peak of one rank's tensors, as the framework would report it; `reserved_bytes` is what its
    allocator reserves for them. `device_bytes` adds the CUDA context and the collectives' buffers: what the device must
    have. `host_bytes` is pinned on one node. `error` is the expected relative half-width around `peak_bytes` and
    `step_seconds`.
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
    error: float = 0.3
    source: str = Field(default="", description="the source of the rates behind the seconds")
