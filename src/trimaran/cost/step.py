"""The cost of a plan: memory of a rank and seconds of a step, term by term, also on several kinds of devices."""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Bytes, Flops, KindPrediction, Mesh, Plan, Prediction, Seconds, deal_rows
from trimaran.cost.block_time import repeated_flops
from trimaran.cost.job import Job
from trimaran.cost.peak_memory import Memory, peak_memory_of, stage_memory_of
from trimaran.cost.roofline import rate_name, rates_for
from trimaran.cost.stage_time import StageTime, StageTimes
from trimaran.cost.step_time import StepTime, pipeline_times_of, step_time_of, step_time_with
from trimaran.machine import Cluster
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
    terms = _with_slowdown(time, memory, cluster, job)
    seconds = Seconds(sum(terms.values()))
    samples, positions = plan.global_batch, job.outline.main.sample_positions(job.seq_len)[0]
    flops = Flops(samples * job.outline.training_flops(job.seq_len))
    peak_flops, sustained = device.peak(precision), rates_for(job, cluster, plan).matmul_flops
    return Prediction(
        fits=_fits(memory, cluster),
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


def _fits(memory: Memory, cluster: Cluster) -> bool:
    is_small = memory.device <= cluster.device.memory_bytes
    return memory.runs and is_small and memory.host <= MAX_PINNED_FRACTION * cluster.host_bytes


def _with_slowdown(time: StepTime, memory: Memory, cluster: Cluster, job: Job) -> dict[str, Seconds]:
    """Return the terms of a step with the time of a nearly full allocator."""
    slowdown = allocator_slowdown(memory, cluster, job)
    more = {"allocator": Seconds(slowdown * sum(time.terms.values()))} if slowdown else {}
    return dict(time.terms) | more


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
    blocks = [block for tower in towers for block, _ in tower.runs]
    is_dense = all(isinstance(block, OutlineLayer) and block.experts is None for block in blocks)
    if cluster.device.traits.shares_cores:
        is_usual = is_dense and len(towers) == 1 and not job.outline.adapter
        kind = "dense" if is_usual and plan.sharding != "parameters" else "other"
        splits_layers = plan.mesh.tp * plan.mesh.pp * plan.mesh.cp * plan.mesh.ep > 1
        if (rates := cluster.device.cpu_rates) is None:
            return CPU_ERROR["uncalibrated"]
        return min(CPU_ERROR["uncalibrated"], CPU_ERROR["split" if splits_layers else kind] + 2 * rates.scatter)
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


TOO_LONG = float("inf")  # the seconds of rows that do not fit into memory


class Kind(NamedTuple):
    """One kind of device: a cluster of it alone, its ranks, and the data ranks and pipeline ranks among them."""

    cluster: Cluster
    ranks: range
    data_ranks: range
    pp_ranks: range


class KindCost(NamedTuple):
    """A kind with the plan of its ranks, the memory of the fullest of them, and how long they are busy in a step."""

    kind: Kind
    plan: Plan
    memory: Memory
    time: StepTime
    busy_seconds: float

    @property
    def fits(self) -> bool:
        return _fits(self.memory, self.kind.cluster)


def predict(job: Job, cluster: Cluster, plan: Plan) -> Prediction:
    """Return what one optimizer step of `plan` needs; see `predict_equal`. The plan must be legal.

    With several kinds of devices, each kind is priced as if the whole cluster had its device. Times are those of the
    slowest kind and memory is that of the fullest; `kinds` has all of them. Rows that are yet to be measured are dealt
    by this cost model.
    """
    if not cluster.groups:
        return predict_equal(job, cluster, plan)
    if plan.micro_batches == "measured":
        rows = rows_by_cost(job, cluster, plan, total=plan.rows_at_once) or (plan.micro_batch,) * plan.mesh.dp
        plan = with_rows(plan, rows)
    costs = kind_costs(job, cluster, plan)
    slowest = max(costs, key=lambda cost: cost.busy_seconds)
    fullest = max(costs, key=lambda cost: cost.memory.device / cost.kind.cluster.device.memory_bytes)
    base = predict_equal(job, slowest.kind.cluster, slowest.plan)
    terms = _with_slowdown(slowest.time, slowest.memory, slowest.kind.cluster, job)
    seconds = sum(terms.values())
    samples, positions = plan.global_batch, job.outline.main.sample_positions(job.seq_len)[0]
    flops = Flops(samples * job.outline.training_flops(job.seq_len))
    devices = [(cost.kind.cluster.device, len(cost.kind.ranks)) for cost in costs]
    peak = sum(device.peak(rate_name(device, plan.precision)) * count for device, count in devices)
    return base.model_copy(update={
        "fits": all(cost.fits for cost in costs),
        "peak_bytes": fullest.memory.peak,
        "reserved_bytes": fullest.memory.reserved,
        "device_bytes": fullest.memory.device,
        "host_bytes": max(cost.memory.host for cost in costs),
        "memory": fullest.memory.terms,
        "step_seconds": Seconds(seconds),
        "time": terms,
        "exposed": slowest.time.exposed,
        "tokens_per_second": samples * positions / seconds,
        "flops_per_step": flops,
        "device_peak_flops": Flops(peak / cluster.world_size),
        "mfu": 0.0 if base.no_mfu else flops / (seconds * peak),
        "repeated_flops": repeated_flops(job, plan),
        "error": max(error_of(job, cost.kind.cluster, plan) for cost in costs),
        "cluster": str(cluster),
        "kinds": tuple(_kind_prediction(cost, job) for cost in costs),
    })  # fmt: skip


def with_rows(plan: Plan, rows: tuple[int, ...]) -> Plan:
    """Return the plan with these rows of each data rank; equal ones are its `micro_batch`."""
    is_equal = len(set(rows)) == 1
    return plan.model_copy(update={"micro_batches": () if is_equal else rows, "micro_batch": max(rows)})


def rows_by_cost(job: Job, cluster: Cluster, plan: Plan, *, total: int) -> tuple[int, ...] | None:
    """Return the rows of each data rank, `total` together, with which a step is shortest; None if they do not fit."""
    kinds = kinds_of(cluster, plan.mesh)
    known: dict[tuple[int, int], float] = {}

    def seconds(kind: int, rows: int) -> float:
        if (kind, rows) not in known:
            cost = _data_cost(job, kinds[kind], _equal_rows(plan, rows))
            known[kind, rows] = cost.busy_seconds if cost.fits else TOO_LONG
        return known[kind, rows]

    touching = [[number for number, kind in enumerate(kinds) if rank in kind.data_ranks]
                for rank in range(plan.mesh.dp)]  # fmt: skip
    rows = deal_rows(total, [lambda rows, here=here: max(seconds(kind, rows) for kind in here) for here in touching])
    if rows is None or any(seconds(kind, num) == TOO_LONG for num, here in zip(rows, touching, strict=True)
                           for kind in here):  # fmt: skip
        return None
    return rows


@lru_cache(maxsize=4096)
def _places(ranks: range, world_size: int, inner: int, pp: int) -> tuple[range, range]:
    """Return the data ranks and the pipeline ranks that some ranks belong to. Stages are the outermost axis."""
    block = world_size // pp
    first, last = ranks.start, ranks.stop - 1
    pp_ranks = range(first // block, last // block + 1)
    if len(pp_ranks) > 1:
        return range(block // inner), pp_ranks
    return range(first % block // inner, last % block // inner + 1), pp_ranks


def kinds_of(cluster: Cluster, mesh: Mesh) -> list[Kind]:
    """Return the kinds of devices of a cluster with groups, and where their ranks are in the mesh."""
    inner = mesh.tp * mesh.cp
    pairs = zip(cluster.groups, cluster.group_ranks, strict=True)
    return [Kind(cluster.only(group), ranks, *_places(ranks, cluster.world_size, inner, mesh.pp))
            for group, ranks in pairs]  # fmt: skip


def kind_costs(job: Job, cluster: Cluster, plan: Plan) -> list[KindCost]:
    """Return the cost of each kind. In a pipeline every kind has the time of the slowest rank, for which all wait."""
    kinds, rows = kinds_of(cluster, plan.mesh), plan.rows_by_rank
    plans = [_equal_rows(plan, max(rows[each] for each in kind.data_ranks) if rows else plan.micro_batch)
             for kind in kinds]  # fmt: skip
    if plan.mesh.pp == 1:
        return [_data_cost(job, kind, own) for kind, own in zip(kinds, plans, strict=True)]
    by_kind = [pipeline_times_of(job, kind.cluster, own) for kind, own in zip(kinds, plans, strict=True)]
    slowest = [max(_stages(kinds, by_kind, pp_rank), key=lambda stage: stage.seconds)
               for pp_rank in range(plan.mesh.pp)]  # fmt: skip
    times = StageTimes(
        max(slowest, key=lambda stage: stage.seconds),
        max(slowest, key=lambda stage: stage.part.parameters),
        sum(stage.seconds for stage in slowest),
    )
    costs = []
    for kind, own, stages in zip(kinds, plans, by_kind, strict=True):
        memory = max((stage_memory_of(job, kind.cluster, own, each) for each in kind.pp_ranks),
                     key=lambda memory: memory.device)  # fmt: skip
        busy = plan.grad_accum * max(stages[each].seconds for each in kind.pp_ranks)
        costs.append(KindCost(kind, own, memory, step_time_with(job, kind.cluster, own, times), busy))
    return costs


class StageLoad(NamedTuple):
    """A pipeline rank: the seconds of its micro-batch, and the part of its device's memory that it needs."""

    seconds: float
    occupancy: float


def stage_loads(job: Job, cluster: Cluster, plan: Plan) -> list[StageLoad]:
    """Return the load of each pipeline rank on the kinds of devices that it is on."""
    kinds = kinds_of(cluster, plan.mesh)
    by_kind = [pipeline_times_of(job, kind.cluster, plan) for kind in kinds]
    loads = []
    for pp_rank in range(plan.mesh.pp):
        seconds = max(stage.seconds for stage in _stages(kinds, by_kind, pp_rank))
        clusters = [kind.cluster for kind in kinds if pp_rank in kind.pp_ranks]
        occupancy = max(stage_memory_of(job, each, plan, pp_rank).device / each.device.memory_bytes
                        for each in clusters)  # fmt: skip
        loads.append(StageLoad(seconds, occupancy))
    return loads


def _stages(kinds: list[Kind], by_kind: list[list[StageTime]], pp_rank: int) -> Iterator[StageTime]:
    return (stages[pp_rank] for kind, stages in zip(kinds, by_kind, strict=True) if pp_rank in kind.pp_ranks)


def _data_cost(job: Job, kind: Kind, plan: Plan) -> KindCost:
    """Return the cost of a kind without a pipeline, if all data ranks had as many rows as its own."""
    memory, time = peak_memory_of(job, kind.cluster, plan), step_time_of(job, kind.cluster, plan)
    slowdown = allocator_slowdown(memory, kind.cluster, job)
    return KindCost(kind, plan, memory, time, (1 + slowdown) * sum(time.terms.values()))


def _equal_rows(plan: Plan, rows: int) -> Plan:
    return plan.model_copy(update={"micro_batch": rows, "micro_batches": ()})


def _kind_prediction(cost: KindCost, job: Job) -> KindPrediction:
    kind, device = cost.kind, cost.kind.cluster.device
    parts = [stage.part for stage in pipeline_times_of(job, kind.cluster, cost.plan)]
    layers = [sum(group.count for group in parts[each].layer_groups) for each in kind.pp_ranks]
    return KindPrediction(
        device=device.name,
        ranks=len(kind.ranks),
        rows=cost.plan.micro_batch,
        layers=(min(layers), max(layers)),
        busy_seconds=Seconds(cost.busy_seconds),
        device_bytes=cost.memory.device,
        memory_bytes=Bytes(device.memory_bytes),
    )
