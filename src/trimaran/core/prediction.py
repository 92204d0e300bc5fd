"""What a plan is expected to cost, term by term."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core.units import Bytes, Flops, Seconds


class Prediction(BaseModel):
    """Bytes and seconds of one rank and one optimizer step, in the vocabulary that the run reports in.

    `error` is the relative half-width to expect around `peak_bytes` and `step_seconds`.
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
    memory: Annotated[dict[str, Bytes], Field(description="peak bytes of one rank by term")]
    time: Annotated[dict[str, Seconds], Field(description="seconds of one step by term")]
    error: float = 0.3
    source: str = Field(default="", description="where the rates behind the seconds come from")
