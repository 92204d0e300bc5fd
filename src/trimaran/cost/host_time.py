"""The host's part of a step: how long it launches kernels, and how long the device waits for it.

The host launches kernels ahead of the device and waits for no result, so both work in parallel: a step takes as long as
the slower of the two, over the whole step. Nothing is gained or lost by where in the step the host is slow, because it
may be ahead by up to a step.
"""

from typing import NamedTuple

from trimaran.cost.job import Job
from trimaran.cost.roofline import DeviceRates

FORWARD_HOST_FRACTION = 0.4  # of a layer's launches and their host time; the rest is for backward
# Host and device run in parallel, but neither is always ahead: the total is the p-norm of both, with this p.
HOST_OVERLAP_POWER = 6
# Between the end of a kernel and the start of the next one, and the time until a kernel has filled the device: no
# other constant knows how many kernels there are. Kernels of a CUDA graph start 1.0 us apart on an H200
# (`launches` in benchmarks/h200_kernels.json).
KERNEL_GAP_SECONDS = 1e-6
MAX_GAP_FRACTION = 0.05  # of a step's compute; a larger micro-batch can gain no more than that


class HostSeconds(NamedTuple):
    """Host time to launch forward and backward of a micro-batch."""

    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def plus(self, other: "HostSeconds") -> "HostSeconds":
        return HostSeconds(self.forward + other.forward, self.backward + other.backward)


NO_HOST_SECONDS = HostSeconds(0.0, 0.0)


def host_wait(device_seconds: float, host_seconds: float) -> float:
    """Return how long the device waits for the host while it has `device_seconds` of work."""
    if not device_seconds:
        return host_seconds
    ratio = host_seconds / device_seconds
    return device_seconds * ((1 + ratio**HOST_OVERLAP_POWER) ** (1 / HOST_OVERLAP_POWER) - 1)


def kernel_gaps(num_launches: float, rates: DeviceRates) -> float:
    """Return the time between so many kernels on the device; 0 on a CPU."""
    return 0.0 if rates.generation == "cpu" else num_launches * KERNEL_GAP_SECONDS


def positions_to_hide_launches(job: Job, rates: DeviceRates, *, is_captured: bool) -> float:
    """Return how many positions a micro-batch needs until launching its kernels hardly matters.

    The device then computes as long as the host launches, and the gaps between kernels are a small fraction of it. It
    is assumed to reach its best rate, so these are rather too many.
    """
    profile, layers = job.stack.time, job.outline.layers
    host = profile.host.replay if is_captured else layers * profile.host.compiled + profile.host.micro_batch
    gaps = kernel_gaps(layers * profile.host.launches.compiled + profile.host.launches.micro_batch, rates)
    flops = job.outline.training_flops(job.seq_len) / job.outline.main.sample_positions(job.seq_len)[0]
    return max(rates.host_factor * host, gaps / MAX_GAP_FRACTION) * rates.matmul_flops / flops
