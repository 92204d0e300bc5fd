"""How long what is kept on the host takes to come and go, and how long the host updates what it keeps."""

from trimaran.core import Plan
from trimaran.cost.activation_memory import kept_on
from trimaran.cost.job import Job, frees_weights, splits_weights
from trimaran.cost.memory_inputs import memory_inputs_of
from trimaran.cost.stage_time import StageTime
from trimaran.hardware import Cluster

# Of PCIe's rate, what a copy reaches beside products, and each of two in both directions at once: 50 and 46 of 63 GB/s
# in whole steps of one H200; alone a copy reaches 55.
COPY_SHARE, BOTH_WAYS_SHARE = 0.80, 0.73
# What a copy takes from the products beside it, of its own time: a decoder in fp32 that hides 0.26 s of copies took
# 0.595 s a step instead of 0.557 (tests/gpu/test_memory.py, one H200).
STOLEN_SHARE = 0.15
# What one process's optimizer streams of the host's memory, at most: 1.2 billion parameters in 1.06 s on 16 cores.
HOST_UPDATE_BANDWIDTH = 46e9
# Bytes that an update moves for each parameter, by those of its moments: AdamW reads 16 and writes 12, clipping reads 8
# and writes 4; smaller moments are read and written by operators of their own. Measured on one H200.
UPDATE_BYTES = {8.0: 40, 4.0: 110, 2.03: 240}
# Our kernel reads weight and gradient and writes the weight, and moments both ways; a weight in two halves has a 16-bit
# gradient. To sum the squares of the gradients takes as long as 3.4 bytes more, whatever their width (one H200).
KERNEL_BYTES = {"whole": 12 + 3.4, "halves": 10 + 3.4}
# By the bytes of the moments, what they add: read and written, but in eight bits it is arithmetic that takes the time
# (blocks, their largest, a search in the code book): 1.5 billion parameters of one H200 took 18.9 ms.
MOMENT_BYTES = {8.0: 16, 4.0: 8, 2.03: 40}
# Of the memory's bandwidth, what an update reaches (one H200); a core streams what is measured.
UPDATE_SHARE = {"cuda": 0.72, "cpu": 1.0}
KERNEL_SHARE = 0.82


def update_seconds(job: Job, cluster: Cluster, plan: Plan, owned: float) -> float:
    """Return how long a rank updates so many parameters, where they are: on its device, or on its host."""
    kind, moved = cluster.device.kind, UPDATE_BYTES[job.state_bytes] * owned
    if kind == "cpu":
        return moved / (cluster.device.memory_bandwidth * UPDATE_SHARE[kind])
    if plan.offload == "parameters":
        return host_update_seconds(moved, cluster)
    if job.stack.time.update == "torch" or plan.engine == "deepspeed":
        return moved / (cluster.device.memory_bandwidth * UPDATE_SHARE[kind])
    each = KERNEL_BYTES["halves" if splits_weights(job, plan) else "whole"] + MOMENT_BYTES[job.state_bytes]
    return each * owned / (cluster.device.memory_bandwidth * KERNEL_SHARE)


def least_offloads(job: Job, cluster: Cluster) -> dict[str, float]:
    """Return the seconds that a step takes at least for what is offloaded: no rank owns less than an even share."""
    if cluster.device.kind == "cpu":
        return dict.fromkeys(("none", "activations", "optimizer", "parameters"), 0.0)
    owned = job.outline.trained_parameters / cluster.world_size
    states = job.state_bytes * owned / _bandwidths(cluster)[1]
    update = host_update_seconds(UPDATE_BYTES[job.state_bytes] * owned, cluster)
    here = UPDATE_BYTES[job.state_bytes] * owned / cluster.device.memory_bandwidth
    return {"none": 0.0, "activations": 0.0, "optimizer": max(0.0, states - 2 * here), "parameters": update}


def _bandwidths(cluster: Cluster) -> tuple[float, float]:
    """Return the bytes a second that one rank copies to or from its host, and each way where both go at once."""
    wire, memory = cluster.device.pcie_bandwidth, cluster.host_bandwidth / cluster.devices_per_node
    return min(COPY_SHARE * wire, memory), min(BOTH_WAYS_SHARE * wire, memory / 2)


def offload_seconds(job: Job, cluster: Cluster, plan: Plan, pace: StageTime, *, owned: float, update: float) -> float:
    """Return the seconds of a step in which a rank waits for its host and nothing else; none on a CPU.

    States come and go while the update runs. Activations go in forward and come back in backward. Weights come for each
    gather, and gradients go as they are made. The ranks of a node share its memory's bandwidth.
    """
    if plan.offload == "none" or cluster.device.kind == "cpu":
        return 0.0
    copies, both = _bandwidths(cluster)
    if plan.offload == "optimizer":
        return max(0.0, job.state_bytes * owned / both - update)
    if plan.offload == "activations":
        moved = kept_on(memory_inputs_of(job, cluster, plan), pace.part, gathered=0).layers
        return plan.grad_accum * (_beside(moved / copies, pace.forward) + _beside(moved / copies, pace.backward))
    gathers = plan.grad_accum if frees_weights(plan, plan.sharding) else 1
    return gathers * (_beside(4 * owned / copies, pace.forward) + _beside(4 * owned / both, pace.backward))


def _beside(copying: float, computing: float) -> float:
    """Return how much longer computing takes with copies beside it."""
    return max(0.0, copying - computing) + STOLEN_SHARE * min(copying, computing)


def host_update_seconds(num_bytes: float, cluster: Cluster) -> float:
    """Return how long a host updates what one of its ranks owns; the ranks of a node share its memory."""
    return num_bytes / min(HOST_UPDATE_BANDWIDTH, cluster.host_bandwidth / cluster.devices_per_node)
