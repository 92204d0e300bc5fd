"""The predicted cost of a plan, term by term."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from trimaran.core.units import Bytes, Flops, Seconds


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
