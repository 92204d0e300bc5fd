"""The distribution of step times: many steps at once, in which nodes are not equally fast.

The passes of a rank have a fixed order, so the end of each pass is a maximum of earlier ends plus its own length. That
is computed for all replicas and many steps together, as arrays; messages and collectives take as long as the
event-driven simulation of one step found them to take under contention.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimaran.core import Mesh
from trimaran.cost.simulate.pipeline_order import Order, Pass
from trimaran.cost.simulate.step_costs import StepCosts
from trimaran.cost.simulate.step_simulation import Message, SimulatedStep, Track, input_of, message_of
from trimaran.machine import Cluster

# How much the time of the same work varies from node to node and from step to step: the standard deviation of its
# logarithm. llm-foundry's 13B takes 2 % longer on 16 nodes than on 2 (benchmarks/published), and the expected maxima of
# 16 and of 2 normal values differ by 1.2 standard deviations.
NODE_JITTER = 0.02 / 1.2
MAX_ARRAY = 1 << 16  # replicas and steps that are computed together

Array = NDArray[np.float64]
# Seconds of each stage's messages (`forward`, `backward`), gathers of `weights` and reductions of `gradients`, as they
# took under contention.
Transfers = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSample:
    """Seconds of simulated steps, in the order in which they were drawn."""

    seconds: Array

    @property
    def mean(self) -> float:
        return float(self.seconds.mean())

    def quantile(self, fraction: float) -> float:
        return float(np.quantile(self.seconds, fraction))


def sample_steps(costs: StepCosts, step: SimulatedStep, speeds: "NodeSpeeds", *, count: int, seed: int) -> StepSample:
    """Return the times of `count` steps like `step`. The same seed gives the same times.

    Transfers take their mean time under contention. What that mean misses is added: with equal nodes, every step takes
    as long as `step`.
    """
    random, stages = np.random.default_rng(seed), range(costs.order.num_stages)
    tracks: dict[str, Track] = {"forward": "send", "backward": "send", "weights": "gather", "gradients": "reduce"}
    transfers = {name: [step.mean_seconds(track, stage, name) for stage in stages] for name, track in tracks.items()}
    per_round = max(1, MAX_ARRAY // speeds.num_replicas)
    rounds = [
        _step_seconds(costs, transfers, speeds.draw(random, min(per_round, count - start)))
        for start in range(0, count, per_round)
    ]
    missed = step.seconds - _step_seconds(costs, transfers, [np.ones((1, 1))] * costs.ranks)[0]
    return StepSample(seconds=np.concatenate(rounds) + missed)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeeds:
    """Which nodes each pipeline rank of each replica runs on, and how much their speed varies.

    Replicas that share a node are as fast as it. A rank that spans nodes is as slow as the slowest of them.
    """

    ranks: int
    num_replicas: int
    nodes_per_rank: int
    jitter: float = NODE_JITTER

    def draw(self, random: np.random.Generator, count: int) -> list[Array]:
        """Return for each pipeline rank how much longer each replica takes in each of `count` steps."""
        shape = (self.nodes_per_rank, count, self.num_replicas)
        return [np.exp(self.jitter * random.standard_normal(shape)).max(axis=0) for _ in range(self.ranks)]


def node_speeds_of(cluster: Cluster, mesh: Mesh, jitter: float = NODE_JITTER) -> NodeSpeeds:
    """Return the nodes of a mesh whose tensor and context parallel ranks are neighbours."""
    group = mesh.tp * mesh.cp
    per_node = max(1, cluster.devices_per_node // group)
    return NodeSpeeds(
        ranks=mesh.pp,
        num_replicas=max(1, -(-mesh.dp // per_node)),
        nodes_per_rank=max(1, group // cluster.devices_per_node),
        jitter=jitter,
    )


def _step_seconds(costs: StepCosts, transfers: Transfers, factors: list[Array]) -> Array:
    """Return the seconds of each step; `factors` has for each rank an array of steps and replicas."""
    ends = _pass_ends(costs, transfers, factors)
    last = np.zeros(factors[0].shape[0])
    for stage, cost in enumerate(costs.stages):
        rank = costs.order.rank_of_stage[stage]
        final = next(each for each in reversed(costs.order.passes[rank]) if each.stage == stage)
        seconds = cost.seconds(final.kind) * factors[rank]
        done = ends[stage]
        # All replicas take part in a reduction: it starts when the last one does.
        reduced = (done - costs.overlap * seconds).max(axis=1) + transfers["gradients"][stage]
        last = np.maximum(last, np.maximum(reduced, done.max(axis=1) + cost.last_reduce))
    return last + costs.update


class _Mail:
    """Messages between stages, as arrays of times: computed, and received."""

    def __init__(self, order: Order, transfers: Transfers) -> None:
        self._order, self._transfers = order, transfers
        self._computed: dict[Message, Array] = {}
        self._received: dict[Message, tuple[Array, int]] = {}  # the time, and how often it will still be asked for

    def send(self, message: Message, at: Array) -> None:
        self._computed[message] = at

    def arrival(self, message: Message, receiver_free: Array, *, holds: bool) -> Array:
        """Return when a message arrives. It leaves when it is computed and, unless posted early, awaited.

        `holds`: the sender waits for it as well, so both will ask.
        """
        kind, stage, _ = message
        if message in self._computed:
            source = stage - 1 if kind == "forward" else stage + 1
            leaves = self._computed.pop(message)
            leaves = leaves if self._order.posts_early else np.maximum(leaves, receiver_free)
            self._received[message] = leaves + self._transfers[kind][source], 2 if holds else 1
        time, left = self._received.pop(message)
        if left > 1:
            self._received[message] = time, left - 1
        return time


def _pass_ends(costs: StepCosts, transfers: Transfers, factors: list[Array]) -> dict[int, Array]:
    """Return when the last pass of each stage ends."""
    order, zero = costs.order, np.zeros_like(factors[0])
    ends: dict[int, Array] = {}
    free = [zero] * costs.ranks  # when each rank ended its previous pass
    mail, holding = _Mail(order, transfers), set[Message]()
    held: list[Message | None] = [None] * costs.ranks
    # When the weights of each stage are there: of its first block, and all. A rank gathers stage by stage.
    first_weights, all_weights, so_far = list[float](), list[float](), [0.0] * costs.ranks
    for stage, cost in enumerate(costs.stages):
        rank, gather = order.rank_of_stage[stage], transfers["weights"][stage]
        share = cost.first_gather / cost.gather if cost.gather else 0.0
        first_weights.append(so_far[rank] + share * gather)
        so_far[rank] += gather
        all_weights.append(so_far[rank])
    for rank, work in run_order(order):
        start = free[rank]
        if needed := input_of(work, order.num_stages):
            start = np.maximum(start, mail.arrival(needed, free[rank], holds=needed in holding))
        if (waiting := held[rank]) is not None:
            receiver = free[order.rank_of_stage[waiting[1]]]
            start = np.maximum(start, mail.arrival(waiting, receiver, holds=True))
        is_first = work.kind == "forward" and work.micro_batch == 0
        if is_first:
            start = np.maximum(start, first_weights[work.stage])
        end = start + costs.stages[work.stage].seconds(work.kind) * factors[rank]
        end = np.maximum(end, all_weights[work.stage]) if is_first else end
        free[rank], held[rank], ends[work.stage] = end, None, end
        if message := message_of(work, order.num_stages):
            mail.send(message, end)
            if work.holds:
                held[rank] = message
                holding.add(message)
    return ends


def run_order(order: Order) -> list[tuple[int, Pass]]:
    """Return all passes in an order in which each comes after those that it waits for."""
    position, found, sent = [0] * len(order.passes), [], set[Message]()
    held: list[Message | None] = [None] * len(order.passes)

    def awaits(message: Message) -> bool:
        """Return whether the receiver of a message has come to the pass that needs it."""
        receiver = order.rank_of_stage[message[1]]
        at = position[receiver]
        return at == len(order.passes[receiver]) or input_of(order.passes[receiver][at], order.num_stages) == message

    received: set[Message] = set()
    total = sum(map(len, order.passes))
    while len(found) < total:
        before = len(found)
        for rank, passes in enumerate(order.passes):
            while position[rank] < len(passes):
                work = passes[position[rank]]
                needed, waiting = input_of(work, order.num_stages), held[rank]
                if needed and needed not in sent:
                    break
                if waiting and waiting not in received and not awaits(waiting):
                    break
                found.append((rank, work))
                if needed:
                    received.add(needed)
                message = message_of(work, order.num_stages)
                if message:
                    sent.add(message)
                held[rank] = message if work.holds else None
                position[rank] += 1
        assert len(found) > before, "a rank waits for a message that nobody sends"
    return found
