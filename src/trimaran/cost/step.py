"""The cost of a plan: peak memory of a rank and seconds of a step, term by term."""

from trimaran.core import Flops, Plan, Prediction, Seconds
from trimaran.cost.job import Job
from trimaran.cost.peak_memory import Memory, peak_memory_of
from trimaran.cost.recompute_flops import repeated_flops
from trimaran.cost.roofline import rate_name, rates_of
from trimaran.cost.step_time import step_time_of
from trimaran.machine import Cluster, CpuRates
from trimaran.models import OutlineLayer

# Expected relative error of memory and time (half-width), by kind of cluster. On one H200, nine in ten steps of our
# trainer lie within it; on up to 16 nodes without a pipeline, nine in ten published runs of llm-foundry and nanotron.
# With nanotron's pipelines and on larger clusters only half do, for unknown reasons. The figures for CPUs and for
# anything unmeasured (other single devices, offload, MoE, adapters, several towers, opaque blocks) are assumed, and so
# is that for devices whose sustained rate nobody measured in full steps.
RELATIVE_ERROR = {"one": 0.08, "few": 0.15, "unmeasured": 0.25, "many": 0.35, "unknown rate": 0.4}
# The same for the time of a step on a CPU, if it is calibrated: of a dense decoder, of other networks and of weights in
# shards, and of layers that are split over ranks; and without calibration. The scatter of the calibration is added
# twice: nine in ten values spread about twice as far as the quartiles. From 16 runs on two Neoverse cores.
CPU_ERROR = {"dense": 0.2, "other": 0.4, "split": 0.8, "uncalibrated": 1.0}
CPU_MEMORY_ERROR = 0.5  # a process's memory contains torch itself; the same runs
MAX_FEW_NODES = 16
MEASURED_DEVICE = "H200"
# Devices of the steps that `roofline.SUSTAINED_FRACTION` was set by, and those with the same die and power.
STEADY_DEVICES = {"A100-40GB", "A100-80GB", "A800-80GB", "H100", "H800", "H200", "GB200"}
MAX_PINNED_FRACTION = 0.9  # of host memory; the system, data loaders and the page cache need the rest
# An allocator that finds no free block frees its cache and asks the driver again. Above the profile's
# `crowded_fraction`, each further 0.15 of the memory adds one step's length: nanotron's runs above 70 of 79 GiB.
FRACTION_PER_SLOWDOWN = 0.15


def predict_equal(job: Job, cluster: Cluster, plan: Plan) -> Prediction:
    """Return what one optimizer step of `plan` needs on each rank of `cluster`, whose devices are equal.

    The plan must be legal. If data ranks have different numbers of rows, those with the most decide.

    The memory terms add up to `peak_bytes`, the time terms to `step_seconds`. Tokens per second (positions of the last
    tower) and FLOPs are of the whole cluster. FLOPs count forward and backward of the model without any recompute.
    The time of a plan that does not fit is what it would take if it did.
    """
    memory, time = peak_memory_of(job, cluster, plan), step_time_of(job, cluster, plan)
    device, precision = cluster.device, rate_name(cluster.device, plan.precision)
    slowdown = allocator_slowdown(memory, cluster, job)
    terms = dict(time.terms)
    if slowdown:
        terms["allocator"] = Seconds(slowdown * sum(terms.values()))
    seconds = Seconds(sum(terms.values()))
    samples, positions = plan.global_batch, job.outline.main.sample_positions(job.seq_len)[0]
    flops = Flops(samples * job.outline.training_flops(job.seq_len))
    rates = rates_of(device, plan.precision, job.stack.time.sustained)
    peak_flops, sustained = device.peak(precision), rates.matmul_flops
    return Prediction(
        fits=memory.runs
        and memory.device <= device.memory_bytes
        and memory.host <= MAX_PINNED_FRACTION * cluster.host_bytes,
        peak_bytes=memory.peak,
        reserved_bytes=memory.reserved,
        device_bytes=memory.device,
        host_bytes=memory.host,
        disk_bytes=memory.disk,
        step_seconds=seconds,
        tokens_per_second=samples * positions / seconds,
        mfu=0.0 if device.no_peak else flops / (seconds * peak_flops * cluster.world_size),
        no_mfu=device.no_peak,
        flops_per_step=flops,
        device_peak_flops=peak_flops,
        repeated_flops=repeated_flops(job, plan),
        memory=memory.terms,
        time=terms,
        exposed=time.exposed,
        error=error_of(job, cluster, plan),
        memory_error=None if device.traits.has_own_memory else CPU_MEMORY_ERROR,
        source=f"{device.name} at a steady {sustained / 1e12:.3g} TFLOP/s: {device.note}",
        cluster=str(cluster),
    )


def allocator_slowdown(memory: Memory, cluster: Cluster, job: Job) -> float:
    """Return how much longer a nearly full device makes a step, as a fraction of it. A CPU has no caching allocator.

    A plan that does not fit has no allocator to retry: its time is that on a device that is large enough.
    """
    occupancy = memory.device / cluster.device.memory_bytes
    if not cluster.device.traits.has_own_memory or occupancy > 1:
        return 0.0
    return max(0.0, occupancy - job.stack.time.crowded_fraction) / FRACTION_PER_SLOWDOWN


def error_of(job: Job, cluster: Cluster, plan: Plan) -> float:
    """Return the expected relative error of a prediction (half-width)."""
    towers = job.outline.towers
    is_dense = all(
        isinstance(block, OutlineLayer) and block.experts is None for tower in towers for block, _ in tower.runs
    )
    if cluster.device.traits.shares_cores:
        is_usual = is_dense and len(towers) == 1 and not job.outline.adapter
        kind = "dense" if is_usual and plan.sharding != "parameters" else "other"
        splits_layers = plan.mesh.tp * plan.mesh.pp * plan.mesh.cp * plan.mesh.ep > 1
        return _cpu_error(cluster.device.cpu_rates, "split" if splits_layers else kind)
    known_rates = {*cluster.device.reached, *dict(cluster.device.fitted)}
    if cluster.device.name not in STEADY_DEVICES and "bf16" not in known_rates:
        return RELATIVE_ERROR["unknown rate"]
    if cluster.num_nodes > MAX_FEW_NODES or plan.mesh.pp > 1:
        return RELATIVE_ERROR["many"]
    if not is_dense or len(towers) > 1 or plan.offload != "none" or job.outline.adapter:
        return RELATIVE_ERROR["unmeasured"]
    if cluster.world_size > 1:
        return RELATIVE_ERROR["few"]
    return RELATIVE_ERROR["one" if cluster.device.name == MEASURED_DEVICE else "few"]


def _cpu_error(rates: CpuRates | None, kind: str) -> float:
    """Return the expected relative error of a step's time on a CPU."""
    if rates is None:
        return CPU_ERROR["uncalibrated"]
    return min(CPU_ERROR["uncalibrated"], CPU_ERROR[kind] + 2 * rates.scatter)
