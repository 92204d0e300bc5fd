"""Offload to a disk: the bytes of the files and of the buffers in front of them, and the time of reads and writes."""

import math

from trimaran.core import Plan
from trimaran.cost.job import Job, frees_weights, splits_weights
from trimaran.machine import Cluster

CHUNK_VALUES = 2**23  # values of a parameter that are updated at once, as in `parallel/optimizer/adamw.py`
NUM_HOST_SLOTS, NUM_DEVICE_BUFFERS, READ_AHEAD = 4, 3, 2  # as in `parallel/optimizer/disk_streaming.py`
READ_SLOT_BYTES = 8 * (16 << 20)  # pinned memory to read weights through, as in `parallel/disk/disk_weights.py`
MASTER_BYTES, HALF_BYTES = 4, 2


def streamed_bytes(job: Job, plan: Plan) -> float:
    """Return the bytes per parameter that an update reads from disk, and writes: moments, and weights in fp32 or half.

    The upper halves of split weights are on the device.
    """
    if plan.offload == "parameters":
        return job.state_bytes + MASTER_BYTES
    return job.state_bytes + (HALF_BYTES if splits_weights(job, plan) else 0)


def slot_bytes(job: Job, plan: Plan, num_owned: float) -> float:
    """Return the host memory in front of the files of a rank. Pinned memory comes in powers of two."""
    chunk = min(CHUNK_VALUES, num_owned) * streamed_bytes(job, plan)
    slots = NUM_HOST_SLOTS * (2 ** math.ceil(math.log2(max(1.0, chunk))))
    return slots + (READ_SLOT_BYTES if plan.offload == "parameters" else 0)


def device_buffer_bytes(job: Job, plan: Plan, num_owned: float) -> float:
    """Return the device memory in which chunks are updated; none if the host updates them."""
    if plan.offload == "parameters":
        return 0.0
    return NUM_DEVICE_BUFFERS * min(CHUNK_VALUES, num_owned) * streamed_bytes(job, plan)


def disk_update_seconds(job: Job, cluster: Cluster, plan: Plan, disk_bytes: float) -> float:
    """Return how long a rank reads and writes what it has on disk in an update. The ranks of a node share the disk.

    Two chunks are read before the first is updated. Writes of the last chunks go on in the next forward, except those
    of parameters, which the forward reads.
    """
    chunk = min(CHUNK_VALUES * streamed_bytes(job, plan), disk_bytes)
    alone = READ_AHEAD * chunk * (2 if plan.offload == "parameters" else 1) / 2
    return (disk_bytes + alone) * cluster.devices_per_node / cluster.disk.both


def disk_gather_seconds(cluster: Cluster, plan: Plan, weight_bytes: float) -> tuple[float, float]:
    """Return how long the weights are read in all forwards of a step, and in all backwards."""
    once = weight_bytes * cluster.devices_per_node / cluster.disk.read
    if frees_weights(plan, plan.sharding):
        return plan.grad_accum * once, plan.grad_accum * once
    return once, 0.0
