"""The parts of one optimizer step, from the cost model: seconds of each pass, message and collective, and the network.

The simulation decides when they run and what waits for what.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

from trimaran.core import RECOMPUTED_BY_OPERATOR, Mesh, Pipeline, Plan
from trimaran.cost import Job
from trimaran.cost.collective import ring_of, send_seconds
from trimaran.cost.gradient_traffic import TrafficPath, traffic_path_on, unit_seconds
from trimaran.cost.job import ELEMENT_BYTES
from trimaran.cost.simulate.pipeline_order import Order, pipeline_order
from trimaran.cost.stage_time import StageTime, rank_times_of, stage_inputs_on, stage_times_of
from trimaran.cost.step_time import COPIES, StepTime, rank_compute_of, step_time_of, with_joined_units
from trimaran.machine import Cluster
from trimaran.models import Opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """How nodes are wired.

    rails: network cards of a node. Card i of every node is on the same switches, and traffic between two devices goes
        through the card of the sender's rail. 0: one for each device.
    outermost: the axis whose neighbours are furthest apart. Our trainer places pipeline stages outermost, Llama 3 did
        so with data ranks.
    """

    rails: int = 0
    pod_nodes: int = 0  # nodes that reach each other at full bandwidth; 0: all of them
    oversubscription: float = 1.0  # how much less bandwidth leads out of a pod than its cards have
    outermost: Literal["pp", "dp"] = "pp"


FULL_BANDWIDTH = Fabric()


class Demands(NamedTuple):
    """What a plan asks of the network at full speed, in capacities: of a card, and of a pod's uplinks per device.

    Every rank does the same at the same time, so one rank of each pipeline stage stands for all of its kind. A demand
    is what all ranks of a kind use together. Above 1 it makes the transfer slower by that factor; transfers of
    different kinds that overlap share what is left (`fair_share`).

    ring_card, ring_uplink: of gathers and reductions of data ranks; 0 if a node, or a pod, holds all of them.
    send_card, send_uplink: of messages between stages in different nodes, and in different pods.
    """

    card: float  # of everything that leaves a node, if devices share cards
    ring_card: float
    ring_uplink: float
    send_card: float
    send_uplink: float
    ranks_per_pod: int  # pipeline ranks that one pod holds

    @property
    def ring_slowdown(self) -> float:
        return max(1.0, self.card * self.ring_card, self.ring_uplink)

    def send_slowdown(self, here: int, there: int) -> float:
        """Return the slowdown of messages between two pipeline ranks."""
        uplink = self.send_uplink if self.pod_of(here) != self.pod_of(there) else 0.0
        return max(1.0, self.card * self.send_card, uplink)

    def pod_of(self, rank: int) -> int:
        """Return the pod of a pipeline rank, among those of one pipeline."""
        return rank // self.ranks_per_pod


def demands_of(fabric: Fabric, cluster: Cluster, mesh: Mesh) -> Demands:
    """Return the demands of a mesh.

    Data ranks form rings with one member every `stride` devices. Of a ring with k members in a pod, one in k hops
    leaves it; the other rings of the pod do the same, so together they use 1/k of what their cards could send. With
    shards and replicas, the rings are those of shards: replicas reduce only a shard.
    """
    node, group = cluster.devices_per_node, mesh.tp * mesh.cp
    pod = min(cluster.world_size, (fabric.pod_nodes or cluster.num_nodes) * node)
    members = mesh.shards if mesh.dp_shard > 1 else mesh.data
    if fabric.outermost == "pp":
        stride, block = mesh.tp, mesh.world_size // mesh.pp  # devices of one pipeline rank
        ranks_per_pod = max(1, pod // block)
        sending = 1 / ranks_per_pod
    else:
        stride, members = group * mesh.pp, max(1, members // mesh.cp)
        ranks_per_pod = max(1, min(mesh.pp, pod // group))
        sending = group / pod
    has_pods = pod < cluster.world_size and fabric.oversubscription > 1
    leaves_pod, crosses_pods = members * stride > pod, mesh.pp > ranks_per_pod
    return Demands(
        card=node / min(node, fabric.rails or node),
        ring_card=float(members * stride > node),
        ring_uplink=fabric.oversubscription / max(1, pod // stride) if has_pods and leaves_pod else 0.0,
        send_card=float(mesh.world_size > node),
        send_uplink=fabric.oversubscription * sending if has_pods and crosses_pods else 0.0,
        ranks_per_pod=ranks_per_pod,
    )


def with_slower_network(cluster: Cluster, slowdown: float) -> Cluster:
    """Return the cluster with a slower outermost link."""
    if slowdown == 1.0 or cluster.num_nodes == 1:
        return cluster
    *inner, outer = cluster.levels
    reached = {name: rate / slowdown for name, rate in outer.reached.items()}
    return replace(cluster, links=(*inner, replace(outer, bandwidth=outer.bandwidth / slowdown, reached=reached)))


def fair_share(flows: list[dict[str, float]]) -> list[float]:
    """Return the speed of each flow, as a fraction of its full speed: max-min fair shares.

    A flow is its demand of each resource at full speed. All speeds grow together; when a resource is used up, the
    flows that use it stop growing.
    """
    speeds, growing = [0.0] * len(flows), set(range(len(flows)))
    left = {name: 1.0 for flow in flows for name in flow}  # of each resource, by flows that stopped growing
    while growing:
        wanted = {name: sum(flows[number].get(name, 0.0) for number in growing) for name in left}
        limits = {name: left[name] / demand for name, demand in wanted.items() if demand}
        speed = min(1.0, *limits.values()) if limits else 1.0
        full = {name for name, limit in limits.items() if limit <= speed * (1 + 1e-9)}
        stopped = {each for each in growing if speed == 1.0 or any(flows[each].get(name) for name in full)}
        for number in stopped:
            speeds[number] = speed
            for name, demand in flows[number].items():
                left[name] -= demand * speed
        growing -= stopped
    return speeds


# The zero-bubble schedule computes gradients of inputs and of weights apart. Both have as many matmuls.
WEIGHT_GRAD_FRACTION = 0.5
SLOWEST_RANK = "waiting for the slowest rank"  # the cost model's estimate of what is simulated here
DATA_TRAFFIC = ("all-gather of weights", "gradients", "computing slowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Seconds of one stage: passes of a micro-batch, and what its data ranks gather and reduce once per step."""

    forward: float
    backward: float
    gather: float = 0.0
    first_gather: float = 0.0  # that nothing can hide: weights of the first block
    reduce: float = 0.0
    last_reduce: float = 0.0  # the same: gradients of the last block

    def seconds(self, kind: str) -> float:
        """Return the time of a pass."""
        split = {"weight_grad": WEIGHT_GRAD_FRACTION, "input_grad": 1 - WEIGHT_GRAD_FRACTION}
        return self.forward if kind == "forward" else split.get(kind, 1.0) * self.backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What a step consists of."""

    order: Order
    stages: tuple[StageCost, ...]
    send: tuple[float, ...]  # seconds of a message from each stage to the next one, and of a gradient back
    overlap: float  # the fraction of a pass that can hide a collective
    update: float  # seconds of the optimizer, after all gradients are there
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
    path = traffic_path_on(job, shared, plan)
    stages = _pipeline_stages(job, shared, plan, time, path) if plan.mesh.pp > 1 else (_only_stage(plan, time),)
    return StepCosts(
        order=order,
        stages=stages,
        send=_sends(job, cluster, plan, order, demands),
        overlap=path.overlap_fraction,
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
    mesh = plan.mesh.model_copy(update={"pp": plan.num_stages})
    alone = plan.model_copy(update={"mesh": mesh, "pipeline": Pipeline(stages=plan.pipeline.stages)})
    return rank_times_of(stage_inputs_on(job, cluster, alone))


def _more_seconds(job: Job, cluster: Cluster, plan: Plan, time: StepTime) -> list[float]:
    """Return what the cost model adds to the passes of a micro-batch: sums of gradients, waits for the host."""
    slowest = stage_times_of(stage_inputs_on(job, cluster, plan)).slowest
    rounds, count = plan.num_stages // plan.mesh.pp, plan.grad_accum
    return [
        max(0.0, time.terms[term] / count - seconds) / rounds
        for term, seconds in (("forward", slowest.forward), ("backward", slowest.backward))
    ]


def _pipeline_stages(
    job: Job, cluster: Cluster, plan: Plan, time: StepTime, path: TrafficPath
) -> tuple[StageCost, ...]:
    """Return the stages of a pipeline: each as if a rank of its own held it.

    Once per step its data ranks gather weights before forward, and reduce gradients after backward.
    """
    more, rounds = _more_seconds(job, cluster, plan, time), plan.num_stages // plan.mesh.pp
    slowed = sum(seconds for what, seconds in time.exposed.items() if what.startswith(DATA_TRAFFIC[2])) / rounds
    stages = []
    for stage in _stage_times(job, cluster, plan):
        waits = sum(seconds for what, seconds in stage.waits.items() if not what.startswith("between stages"))
        share = _forward_share(plan)
        traffic = {}
        if plan.mesh.data > 1:
            units = (with_joined_units(job, plan, stage) if plan.sharding != "none" else stage).units
            pairs = [(unit.count, *unit_seconds(path, unit, unit.sharding or plan.sharding)) for unit in units]
            traffic = {
                "gather": sum(count * gather for count, gather, _ in pairs),
                "first_gather": pairs[0][1],
                "reduce": sum(count * reduce for count, _, reduce in pairs),
                "last_reduce": pairs[0][2] + slowed,
            }
        stages.append(StageCost(
            forward=stage.forward + share * waits + more[0],
            backward=stage.backward + (1 - share) * waits + more[1],
            **traffic,
        ))  # fmt: skip
    return tuple(stages)


def _forward_share(plan: Plan) -> float:
    """Return the fraction of the communication inside layers that forward does; recompute repeats it in backward."""
    again = {"full": 1.0}.get(plan.recompute, 0.0) if isinstance(plan.recompute, str) else 1 / plan.recompute
    if plan.mesh.tp > 1 and (plan.comm.regather or plan.recompute in RECOMPUTED_BY_OPERATOR):
        again = max(again, 0.5)  # sublayers gather their inputs again, but reduce their outputs once
    return 1 / (2 + again)


def _sends(job: Job, cluster: Cluster, plan: Plan, order: Order, demands: Demands) -> tuple[float, ...]:
    """Return the seconds of a message from each stage to the next one; 0 where a rank holds both."""
    if plan.mesh.pp == 1:
        return ()
    main, levels = job.outline.main, cluster.levels
    sent = ELEMENT_BYTES[plan.precision] * job.positions(main, plan) * main.hidden / plan.mesh.tp
    if isinstance(last := main.runs[-1][0], Opaque):
        sent = last.output_bytes * plan.micro_batch
    seconds = send_seconds(sent, ring_of(levels, plan.mesh.pp, max(1, levels[-1].devices // plan.mesh.pp)))
    pairs = pairwise(order.rank_of_stage)
    return tuple(0.0 if here == there else demands.send_slowdown(here, there) * seconds for here, there in pairs)
