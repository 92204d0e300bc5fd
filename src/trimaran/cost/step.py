"""What a plan costs: the bytes of a rank at its fullest and the seconds of a step, term by term."""

from trimaran.core import Flops, Plan, Prediction, Seconds
from trimaran.cost.job import Job
from trimaran.cost.peak_memory import Memory, memory_of
from trimaran.cost.recompute_flops import repeated_flops
from trimaran.cost.roofline import rate_name, rates_of
from trimaran.cost.step_time import seconds_of
from trimaran.hardware import Cluster
from trimaran.models import OutlineLayer

# Half-width to expect around bytes and seconds. Within it lie, on one H200, nine in ten steps of our trainer; on up to
# 16 nodes without a pipeline, nine in ten of llm-foundry's and nanotron's published runs. Of nanotron's pipelines and
# larger clusters only half do: what the others waited for is not known. What nobody measured (other devices alone,
# offload, mixtures, several towers, blocks of which only totals are known) is assumed, and so are shared cores.
ERROR = {"one": 0.08, "few": 0.15, "unmeasured": 0.25, "many": 0.35, "cpu": 0.2}
FEW_NODES = 16
MEASURED = "H200"
HOST_SHARE = 0.9  # of a node's memory, what may be pinned: the system, loaders and files in cache need the rest
# An allocator that finds no room frees what it keeps and asks the driver, time and again. Above what is `crowded` each
# 0.15 of the memory more adds a step's length, up to two: nanotron's runs above 70 of 79 GiB.
CROWDED_STEP, MOST_CROWDED = 0.15, 2.0


def predict(job: Job, cluster: Cluster, plan: Plan) -> Prediction:
    """Return what one optimizer step of `plan` needs on each rank of `cluster`. The plan must be legal.

    The memory terms add up to `peak_bytes`, the time terms to `step_seconds`. Tokens a second (positions of the last
    tower) and flops are of the whole cluster; flops count the arithmetic of the model, forward and backward, and
    nothing that is done twice.
    """
    memory, time = memory_of(job, cluster, plan), seconds_of(job, cluster, plan)
    device, precision = cluster.device, rate_name(cluster.device, plan.precision)
    crowding = crowding_share(memory, cluster, job)
    terms = dict(time.terms)
    if crowding:
        terms["allocator"] = Seconds(crowding * sum(terms.values()))
    seconds = Seconds(sum(terms.values()))
    samples, positions = plan.global_batch, job.outline.main.places(job.seq_len)[0]
    flops = Flops(samples * job.outline.training_flops(job.seq_len))
    peak_flops, steady = device.peak(precision), rates_of(device, plan.precision).products
    return Prediction(
        fits=memory.runs and memory.device <= device.memory_bytes and memory.host <= HOST_SHARE * cluster.host_bytes,
        peak_bytes=memory.peak,
        reserved_bytes=memory.reserved,
        device_bytes=memory.device,
        host_bytes=memory.host,
        step_seconds=seconds,
        tokens_per_second=samples * positions / seconds,
        mfu=flops / (seconds * peak_flops * cluster.world_size),
        flops_per_step=flops,
        device_peak_flops=peak_flops,
        repeated_flops=repeated_flops(job, plan),
        memory=memory.terms,
        time=terms,
        exposed=time.exposed,
        error=error_of(job, cluster, plan),
        source=f"{device.name} at a steady {steady / 1e12:.3g} TFLOP/s: {device.note}",
    )


def crowding_share(memory: Memory, cluster: Cluster, job: Job) -> float:
    """Return how much longer a step takes, of its length, because a device is nearly full; a CPU has no allocator."""
    if cluster.device.kind == "cpu":
        return 0.0
    occupancy = memory.device / cluster.device.memory_bytes
    return min(MOST_CROWDED, max(0.0, occupancy - job.stack.time.crowded) / CROWDED_STEP)


def error_of(job: Job, cluster: Cluster, plan: Plan) -> float:
    """Return the relative half-width to expect around a prediction."""
    if cluster.device.kind == "cpu":
        return ERROR["cpu"]
    if cluster.num_nodes > FEW_NODES or plan.mesh.pp > 1:
        return ERROR["many"]
    towers = job.outline.towers
    plain = all(
        isinstance(block, OutlineLayer) and block.experts is None for tower in towers for block, _ in tower.runs
    )
    if not plain or len(towers) > 1 or plan.offload != "none":
        return ERROR["unmeasured"]
    if cluster.world_size > 1:
        return ERROR["few"]
    return ERROR["one" if cluster.device.name == MEASURED else "few"]
