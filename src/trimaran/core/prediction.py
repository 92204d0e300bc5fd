"""What a plan is expected to cost, term by term."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core.units import Bytes, Flops, Seconds


class Prediction(BaseModel):
    """Bytes and seconds of one rank and one optimizer step, in the vocabulary that the run reports in.

    `peak_bytes` is what the tensors of one rank hold at most, as the software that runs the plan would report it;
    `reserved_bytes` what its allocator takes for them. `device_bytes` adds the driver's context and the collectives'
    buffers: what the device must have. `host_bytes` is pinned on one node. `error` is the relative half-width to expect
    around `peak_bytes` and `step_seconds`.
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
    repeated_flops: Annotated[Flops, Field(description="of a step, what recompute computes again")] = Flops(0.0)
    memory: Annotated[dict[str, Bytes], Field(description="peak bytes of one rank by term")]
    time: Annotated[dict[str, Seconds], Field(description="seconds of one step by term")]
    exposed: Annotated[dict[str, Seconds], Field(description="the seconds of `comm` by what travels, and where")] = {}
    device_bytes: Bytes = Bytes(0)
    host_bytes: Bytes = Bytes(0)
    error: float = 0.3
    source: str = Field(default="", description="where the rates behind the seconds come from")
