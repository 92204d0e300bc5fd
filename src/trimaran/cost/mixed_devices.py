"""The cost of a plan on any cluster, also on one with several kinds of devices, of which the slowest decides.

Each kind is priced as if the whole cluster had its device. A step takes as long as that of the slowest kind, with the
rows or layers that its ranks have, and a plan must fit on every kind.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from trimaran.core import Bytes, Flops, Mesh, Plan, Prediction, Seconds
from trimaran.core.deal_rows import deal_rows
from trimaran.core.plan import KindPrediction
from trimaran.cost.job import Job
from trimaran.cost.peak_memory import Memory, peak_memory_of, stage_memory_of
from trimaran.cost.recompute_flops import repeated_flops
from trimaran.cost.roofline import rate_name
from trimaran.cost.stage_time import StageTime, StageTimes
from trimaran.cost.step import MAX_PINNED_FRACTION, allocator_slowdown, error_of, predict_equal
from trimaran.cost.step_time import StepTime, pipeline_times_of, step_time_of, step_time_with
from trimaran.machine import Cluster

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
        cluster = self.kind.cluster
        is_small = self.memory.device <= cluster.device.memory_bytes
        return self.memory.runs and is_small and self.memory.host <= MAX_PINNED_FRACTION * cluster.host_bytes

    @property
    def occupancy(self) -> float:
        return self.memory.device / self.kind.cluster.device.memory_bytes


def predict(job: Job, cluster: Cluster, plan: Plan) -> Prediction:
    """Return what one optimizer step of `plan` needs; see `predict_equal`. The plan must be legal.

    With several kinds of devices, times are those of the slowest kind and memory is that of the fullest; `kinds` has
    all of them. Rows that are yet to be measured are dealt by this cost model.
    """
    if not cluster.groups:
        return predict_equal(job, cluster, plan)
    if plan.micro_batches == "measured":
        rows = rows_by_cost(job, cluster, plan, total=plan.rows_at_once) or (plan.micro_batch,) * plan.mesh.dp
        plan = with_rows(plan, rows)
    costs = kind_costs(job, cluster, plan)
    slowest = max(costs, key=lambda cost: cost.busy_seconds)
    fullest = max(costs, key=lambda cost: cost.occupancy)
    base = predict_equal(job, slowest.kind.cluster, slowest.plan)
    terms, seconds = _with_slowdown(slowest, job)
    samples, positions = plan.global_batch, job.outline.main.sample_positions(job.seq_len)[0]
    flops = Flops(samples * job.outline.training_flops(job.seq_len))
    peak = sum(_peak_flops(cost, plan) * len(cost.kind.ranks) for cost in costs)
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


def _with_slowdown(cost: KindCost, job: Job) -> tuple[dict[str, Seconds], float]:
    """Return the terms of a kind's step and their sum, with the time of a nearly full allocator."""
    terms = dict(cost.time.terms)
    if slowdown := allocator_slowdown(cost.memory, cost.kind.cluster, job):
        terms["allocator"] = Seconds(slowdown * sum(terms.values()))
    return terms, sum(terms.values())


def _peak_flops(cost: KindCost, plan: Plan) -> float:
    device = cost.kind.cluster.device
    return device.peak(rate_name(device, plan.precision))


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
