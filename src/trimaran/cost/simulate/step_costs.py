"""The parts of one optimizer step, from the cost model: seconds of each pass, message and collective.

The simulation decides when they run and what waits for what.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from trimaran.core import Pipeline, Plan
from trimaran.core.plan import RECOMPUTED_BY_OPERATOR
from trimaran.cost import Job
from trimaran.cost.collective import ring_of, send_seconds
from trimaran.cost.gradient_traffic import TrafficPath, traffic_path_of, unit_seconds
from trimaran.cost.roofline import rates_of
from trimaran.cost.simulate.fabric import FULL_BANDWIDTH, Demands, Fabric, demands_of, with_slower_network
from trimaran.cost.simulate.pipeline_order import Order, pipeline_order
from trimaran.cost.stage_time import StageTime, rank_times_of, stage_inputs_of, stage_times_of
from trimaran.cost.step_time import COPIES, StepTime, rank_compute_of, step_time_of, with_joined_units
from trimaran.machine import Cluster
from trimaran.models import Opaque

# The zero-bubble schedule computes gradients of inputs and of weights apart. Both have as many matmuls.
WEIGHT_GRAD_FRACTION = 0.5
SLOWEST_RANK = "waiting for the slowest rank"  # the cost model's estimate of what is simulated here
DATA_TRAFFIC = ("all-gather of weights", "gradients", "computing slowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one stage: passes of a micro-batch, and what its data ranks gather and reduce once per step.

    first_gather, last_reduce: the parts that nothing can hide: weights of the first block, gradients of the last.
    """

    forward: float
    backward: float
    gather: float = 0.0
    first_gather: float = 0.0
    reduce: float = 0.0
    last_reduce: float = 0.0

    def seconds(self, kind: str) -> float:
        """Return the time of a pass."""
        match kind:
            case "forward":
                return self.forward
            case "weight_grad":
                return WEIGHT_GRAD_FRACTION * self.backward
            case "input_grad":
                return (1 - WEIGHT_GRAD_FRACTION) * self.backward
        return self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step consists of.

    send: seconds of a message from each stage to the next one; a gradient to the previous stage takes as long.
    overlap: the fraction of a pass that can hide a collective.
    update: seconds of the optimizer, after all gradients are there.
    """

    order: Order
    stages: tuple[StageCost, ...]
    send: tuple[float, ...]
    overlap: float
    update: float
    demands: Demands

    @property
    def ranks(self) -> int:
        return len(self.order.passes)


def step_costs_of(job: Job, cluster: Cluster, plan: Plan, fabric: Fabric = FULL_BANDWIDTH) -> StepCosts:
    """Return the parts of a step of `plan`, with the bandwidth that concurrent groups leave to each other."""
    demands = demands_of(fabric, cluster, plan.mesh)
    shared = with_slower_network(cluster, demands.ring_slowdown)
    time = step_time_of(job, shared, plan)
    order = pipeline_order(
        plan.pipeline.schedule, ranks=plan.mesh.pp, num_stages=plan.num_stages, micro_batches=plan.grad_accum
    )
    stages = _pipeline_stages(job, shared, plan, time) if plan.mesh.pp > 1 else (_only_stage(plan, time),)
    return StepCosts(
        order=order,
        stages=stages,
        send=_sends(job, cluster, plan, order, demands),
        overlap=_overlap(job, shared, plan),
        update=time.terms["optimizer"] + time.terms.get("offload", 0.0) + time.exposed.get(COPIES, 0.0),
        demands=demands,
    )


def _only_stage(plan: Plan, time: StepTime) -> StageCost:
    """Return a step without a pipeline. The cost model knows what overlaps; only its exposed collectives remain."""
    count, share = plan.grad_accum, _forward_share(plan)
    gathers = inside = after = 0.0
    for what, seconds in time.exposed.items():
        if what.startswith(DATA_TRAFFIC[0]):
            gathers += seconds
        elif what.startswith(DATA_TRAFFIC):
            after += seconds
        elif what not in (SLOWEST_RANK, COPIES):  # copies are part of `update`
            inside += seconds
    return StageCost(
        forward=(time.terms["forward"] + share * inside + gathers) / count,
        backward=(time.terms["backward"] + (1 - share) * inside) / count,
        last_reduce=after,
    )


def stage_compute_of(job: Job, cluster: Cluster, plan: Plan) -> tuple[tuple[float, float], ...]:
    """Return the seconds of a micro-batch's forward and backward in each stage, without any communication."""
    if plan.mesh.pp == 1:
        terms, count = rank_compute_of(job, cluster, plan, 0), plan.grad_accum
        return ((terms["forward"] / count, terms["backward"] / count),)
    time = step_time_of(job, cluster, plan)
    more = _more_seconds(job, cluster, plan, time)
    return tuple((stage.forward + more[0], stage.backward + more[1]) for stage in _stage_times(job, cluster, plan))


def with_other_compute(costs: StepCosts, changes: Sequence[tuple[float, float]], *, update: float = 0.0) -> StepCosts:
    """Return the step with passes that take so much longer (or, below 0, shorter): forward and backward by stage.

    `update` is how much longer the optimizer takes. Communication stays as it is.
    """
    stages = tuple(
        replace(stage, forward=max(0.0, stage.forward + forward), backward=max(0.0, stage.backward + backward))
        for stage, (forward, backward) in zip(costs.stages, changes, strict=True)
    )
    return replace(costs, stages=stages, update=max(0.0, costs.update + update))


def _stage_times(job: Job, cluster: Cluster, plan: Plan) -> list[StageTime]:
    """Return the time of each stage of a pipeline, as if a rank of its own held it."""
    rates = rates_of(cluster.device, plan.precision, job.stack.time.sustained)
    mesh = plan.mesh.model_copy(update={"pp": plan.num_stages})
    alone = plan.model_copy(update={"mesh": mesh, "pipeline": Pipeline(stages=plan.pipeline.stages)})
    return rank_times_of(stage_inputs_of(job, rates, cluster.levels, alone))


def _more_seconds(job: Job, cluster: Cluster, plan: Plan, time: StepTime) -> list[float]:
    """Return what the cost model adds to the passes of a micro-batch: sums of gradients, waits for the host."""
    rates = rates_of(cluster.device, plan.precision, job.stack.time.sustained)
    slowest = stage_times_of(stage_inputs_of(job, rates, cluster.levels, plan)).slowest
    rounds, count = plan.num_stages // plan.mesh.pp, plan.grad_accum
    return [
        max(0.0, time.terms[term] / count - seconds) / rounds
        for term, seconds in (("forward", slowest.forward), ("backward", slowest.backward))
    ]


def _pipeline_stages(job: Job, cluster: Cluster, plan: Plan, time: StepTime) -> tuple[StageCost, ...]:
    """Return the stages of a pipeline: each as if a rank of its own held it."""
    rates = rates_of(cluster.device, plan.precision, job.stack.time.sustained)
    path = traffic_path_of(cluster.levels, plan, rates, job)
    more, rounds = _more_seconds(job, cluster, plan, time), plan.num_stages // plan.mesh.pp
    slowed = sum(seconds for what, seconds in time.exposed.items() if what.startswith(DATA_TRAFFIC[2])) / rounds
    stages = []
    for stage in _stage_times(job, cluster, plan):
        waits = sum(seconds for what, seconds in stage.waits.items() if not what.startswith("between stages"))
        share = _forward_share(plan)
        traffic = _data_traffic(job, plan, stage, path) if plan.mesh.data > 1 else {}
        if traffic:
            traffic["last_reduce"] += slowed
        stages.append(StageCost(
            forward=stage.forward + share * waits + more[0],
            backward=stage.backward + (1 - share) * waits + more[1],
            **traffic,
        ))  # fmt: skip
    return tuple(stages)


def _data_traffic(job: Job, plan: Plan, stage: StageTime, path: TrafficPath) -> dict[str, float]:
    """Return what the data ranks of a stage send once per step: weights before forward, gradients after backward."""
    units = (with_joined_units(job, plan, stage) if plan.sharding != "none" else stage).units
    pairs = [(unit.count, *unit_seconds(path, unit, unit.sharding or plan.sharding)) for unit in units]
    gather, reduce = (sum(count * each[index] for count, *each in pairs) for index in (0, 1))
    _, first_gather, last_reduce = pairs[0]
    return {"gather": gather, "first_gather": first_gather, "reduce": reduce, "last_reduce": last_reduce}


def _forward_share(plan: Plan) -> float:
    """Return the fraction of the communication inside layers that forward does; recompute repeats it in backward."""
    again = {"full": 1.0}.get(plan.recompute, 0.0) if isinstance(plan.recompute, str) else 1 / plan.recompute
    if plan.mesh.tp > 1 and (plan.comm.regather or plan.recompute in RECOMPUTED_BY_OPERATOR):
        again = max(again, 0.5)  # sublayers gather their inputs again, but reduce their outputs once
    return 1 / (2 + again)


def _overlap(job: Job, cluster: Cluster, plan: Plan) -> float:
    rates = rates_of(cluster.device, plan.precision, job.stack.time.sustained)
    return traffic_path_of(cluster.levels, plan, rates, job).overlap_fraction


def _sends(job: Job, cluster: Cluster, plan: Plan, order: Order, demands: Demands) -> tuple[float, ...]:
    """Return the seconds of a message from each stage to the next one; 0 where a rank holds both."""
    if plan.mesh.pp == 1:
        return ()
    main, levels = job.outline.main, cluster.levels
    element_bytes = rates_of(cluster.device, plan.precision).element_bytes
    sent = element_bytes * job.positions(main, plan) * main.hidden / plan.mesh.tp
    blocks = [block for block, _ in main.runs]
    if isinstance(blocks[-1], Opaque):
        sent = blocks[-1].output_bytes * plan.micro_batch
    seconds = send_seconds(sent, ring_of(levels, plan.mesh.pp, max(1, levels[-1].devices // plan.mesh.pp)))
    owners = order.rank_of_stage
    return tuple(
        0.0 if here == there else demands.send_slowdown(here, there) * seconds for here, there in pairwise(owners)
    )
