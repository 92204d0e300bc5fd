"""Time of offloading: copies between device and host, and the optimizer update on either."""

from trimaran.core import Plan
from trimaran.cost.activation_memory import saved_on_rank
from trimaran.cost.job import Job, frees_weights, memory_inputs_of, splits_weights
from trimaran.cost.stage_time import StageTime
from trimaran.cost.states import CHUNK_VALUES, owned_weight_bytes, states_of, streamed_bytes
from trimaran.machine import Cluster

# Fraction of PCIe's bandwidth that a copy reaches while matmuls run, and each of two copies in opposite directions:
# 50 and 46 of 63 GB/s in full steps on one H200. A copy alone reaches 55.
COPY_EFFICIENCY, TWO_WAY_EFFICIENCY = 0.80, 0.73
# How much a copy slows down the matmuls that run at the same time, as a fraction of its own time: an fp32 decoder that
# hides 0.26 s of copies took 0.595 s per step instead of 0.557 (tests/gpu/test_memory.py, one H200).
COPY_SLOWDOWN = 0.15
# Most bytes per second that one process's optimizer reads and writes on the host: 1.2B parameters in 1.06 s on 16
# cores.
HOST_UPDATE_BANDWIDTH = 46e9
# Bytes that torch's update moves per parameter, by the bytes of its moments. AdamW reads 16 and writes 12, clipping
# reads 8 and writes 4; smaller moments need operators of their own. Measured on one H200.
UPDATE_BYTES = {8.0: 40, 4.0: 110, 2.03: 240}
# The same for our kernel, without the moments: it reads weight and gradient and writes the weight. Split weights have
# 16-bit gradients. The sum of squared gradients takes as long as 3.4 more bytes in either width (one H200). Whole fp32
# weights take as long as 6.4 more (11 rehearsed ranks of several kinds of plans on one H200).
KERNEL_UPDATE_BYTES = {"fp32": 12 + 3.4 + 6.4, "split": 10 + 3.4}
# What the moments add, by their bytes: they are read and written. 8-bit moments are compute-bound (block maxima, search
# in the code book): 1.5B parameters took 18.9 ms on one H200.
KERNEL_MOMENT_BYTES = {8.0: 16, 4.0: 8, 2.03: 40}
# Fraction of memory bandwidth that torch's update reaches, and our kernel (one H200). A CPU core's bandwidth is
# measured.
UPDATE_EFFICIENCY = {"cuda": 0.72, "cpu": 1.0}
KERNEL_EFFICIENCY = 0.82
READ_AHEAD = 2  # chunks that are read from disk ahead, as in `parallel/optimizer/state_streaming.py`


def update_seconds(job: Job, cluster: Cluster, plan: Plan, num_owned: float) -> float:
    """Return how long a rank takes to update `num_owned` parameters, on its device or on its host."""
    kind, moved = cluster.device.kind, UPDATE_BYTES[job.state_bytes] * num_owned
    if not cluster.device.traits.has_own_memory:
        return moved / (cluster.device.memory_bandwidth * UPDATE_EFFICIENCY[kind])
    if plan.offload == "parameters":
        return host_update_seconds(moved, cluster)
    if job.stack.time.update == "torch" or not plan.engine_traits.updates_by_kernel:
        return moved / (cluster.device.memory_bandwidth * UPDATE_EFFICIENCY[kind])
    how = "split" if splits_weights(job, plan) else "fp32"
    per_parameter = KERNEL_UPDATE_BYTES[how] + KERNEL_MOMENT_BYTES[job.state_bytes]
    return per_parameter * num_owned / (cluster.device.memory_bandwidth * KERNEL_EFFICIENCY)


def least_offloads(job: Job, cluster: Cluster) -> dict[str, float]:
    """Return a lower bound of the time that each kind of offload adds: some rank owns at least an even share."""
    if not cluster.device.traits.has_own_memory:
        return dict.fromkeys(("none", "activations", "optimizer", "parameters"), 0.0)
    num_owned = job.outline.trained_parameters / cluster.world_size
    states = job.state_bytes * num_owned / _bandwidths(cluster)[1]
    update = host_update_seconds(UPDATE_BYTES[job.state_bytes] * num_owned, cluster)
    on_device = UPDATE_BYTES[job.state_bytes] * num_owned / cluster.device.memory_bandwidth
    return {"none": 0.0, "activations": 0.0, "optimizer": max(0.0, states - 2 * on_device), "parameters": update}


def _bandwidths(cluster: Cluster) -> tuple[float, float]:
    """Return the bytes per second of a copy between a rank and its host: one way, and each of two ways at once."""
    pcie, memory = cluster.device.pcie_bandwidth, cluster.host_bandwidth / cluster.devices_per_node
    return min(COPY_EFFICIENCY * pcie, memory), min(TWO_WAY_EFFICIENCY * pcie, memory / 2)


def offload_seconds(
    job: Job, cluster: Cluster, plan: Plan, stage: StageTime, *, num_owned: float, update: float
) -> float:
    """Return the seconds of a step that offloading adds; 0 on a CPU, except to disk.

    Optimizer states are copied both ways while the update runs. Activations are copied out in forward and back in
    backward. Weights are copied in for each gather, and gradients out as they are produced.
    The ranks of a node share its memory bandwidth.
    """
    if plan.offloads_to_disk:
        on_disk = states_of(memory_inputs_of(job, cluster, plan), stage.part).disk
        # Two chunks are read before the first is updated. Writes of the last chunks go on in the next forward, except
        # those of parameters, which the forward reads. The ranks of a node share the disk.
        chunk = min(CHUNK_VALUES * streamed_bytes(job, plan), on_disk)
        alone = READ_AHEAD * chunk * (2 if plan.offload == "parameters" else 1) / 2
        waits = max(0.0, (on_disk + alone) * cluster.devices_per_node / cluster.disk.both - update)
        if plan.offload != "parameters":
            return waits
        once = owned_weight_bytes(job, plan, stage.part) * cluster.devices_per_node / cluster.disk.read
        count, is_freed = plan.grad_accum, frees_weights(plan, plan.sharding)
        forward, backward = (count * once, count * once) if is_freed else (once, 0.0)
        return waits + _slowdown(forward, count * stage.forward) + _slowdown(backward, count * stage.backward)
    if plan.offload == "none" or not cluster.device.traits.has_own_memory:
        return 0.0
    copies, both = _bandwidths(cluster)
    if plan.offload == "optimizer":
        return max(0.0, job.state_bytes * num_owned / both - update)
    if plan.offload == "activations":
        moved = saved_on_rank(memory_inputs_of(job, cluster, plan), stage.part, gathered=0).layers
        return plan.grad_accum * (_slowdown(moved / copies, stage.forward) + _slowdown(moved / copies, stage.backward))
    gathers = plan.grad_accum if frees_weights(plan, plan.sharding) else 1
    weights = owned_weight_bytes(job, plan, stage.part)
    backward = _slowdown(max(weights, 4 * num_owned) / both, stage.backward)
    return gathers * (_slowdown(weights / copies, stage.forward) + backward)


def _slowdown(copying: float, computing: float) -> float:
    """Return how much longer compute takes with copies at the same time."""
    return max(0.0, copying - computing) + COPY_SLOWDOWN * min(copying, computing)


def host_update_seconds(num_bytes: float, cluster: Cluster) -> float:
    """Return how long the host takes to update what one rank owns. The ranks of a node share its memory bandwidth."""
    return num_bytes / min(HOST_UPDATE_BANDWIDTH, cluster.host_bandwidth / cluster.devices_per_node)
