"""The stepper of asynchronous training: gradients of one worker's batches, without a step that all ranks share."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimaran.core import Plan, TrainSection
from trimaran.data.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.nets.network import tower_of
from trimaran.parallel import RankMesh
from trimaran.parallel.axes.stage_map import TrainedParameters
from trimaran.parallel.optimizer.build_optimizer import optimizer_of
from trimaran.train.checkpointing.training_state import saved_settings
from trimaran.train.features.async_trainer import AsyncState
from trimaran.train.features.shard_server import (
    BatchCounter,
    ServerConnections,
    ServerRows,
    ShardServer,
    new_server_groups,
)
from trimaran.train.loss.objective import Objective
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.stepper import NO_REQUESTS, PlainStepper, end_lap_after_backward
from trimaran.train.steppers.update import Updater


class AsyncStepper(PlainStepper):
    """Computes gradients of batches with the weights of the servers. Evaluation and sampling are those of replicas.

    `counter` is on rank 0 only. `divisor` is what the summed loss of a batch is divided by before backward.
    """

    def __init__(
        self,
        network: Network,
        plan: Plan,
        ranks: RankMesh,
        updater: Updater,
        clock: StepClock,
        objective: Objective,
        *,
        server: ShardServer,
        connections: ServerConnections,
        counter: BatchCounter | None,
        make_state: Callable[[], AsyncState],
        divisor: float,
    ) -> None:
        super().__init__(network, plan, ranks, updater, clock, objective)
        self.server, self.connections, self.counter = server, connections, counter
        self._make_state, self._divisor = make_state, divisor
        self.num_workers, self.pause_every = plan.mesh.dp, plan.comm.async_sgd.pause_every

    def add_gradients(self, batch: StepBatch, report_progress: Callable[[], None]) -> Tensor:
        """Compute the gradient of the summed loss, divided by `divisor`, and return the summed loss, on the device."""
        total = torch.zeros((), device=self._device)
        for index in range(self._plan.grad_accum):
            report_progress()
            self._clock.time_waits()
            losses, balance = self._forward(batch.micro(index))
            self._clock.lap("forward")
            loss = (losses.total + balance) / self._divisor
            end_lap_after_backward(loss, self._clock)
            loss.backward()
            self._clock.lap("backward")
            total += losses.total.detach()
        return total

    def clear_gradients(self) -> None:
        """Clear the gradients of the worker's module."""
        self._network.module.zero_grad()

    def step(self, batch: StepBatch, *, requests: Sequence[int] = NO_REQUESTS) -> NoReturn:
        raise AssertionError("workers have no step in common: see `AsyncTrainer`")

    def update(self, lr: float) -> NoReturn:
        raise AssertionError("servers update the weights: see `ShardServer`")

    def state(self, train: TrainSection, *, without_base: bool = False) -> AsyncState:
        assert not without_base, "the planner refuses adapters"
        return self._make_state()


def build_stepper(context: StepperContext) -> AsyncStepper:
    """Return the stepper of a worker, with the server of this rank. Every rank must call it: it creates groups."""
    network, train, plan, ranks, clock = context.networks[0], context.train, context.plan, context.ranks, context.clock
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    requests, updates = new_server_groups()
    named = [(name, each) for name, each in network.module.named_parameters() if each.requires_grad]
    rows = [ServerRows(named, server=each, num_servers=num_ranks) for each in range(num_ranks)]
    mine = rows[rank]
    held = {nn.Parameter(each.view(each.parameter).detach().to("cpu", torch.float32, copy=True)): each.name
            for each in mine.shards}  # fmt: skip
    optimizer = optimizer_of(held, train, plan, network.towers)
    towers: dict[str, list[nn.Parameter]] = {tower: [] for tower in network.towers}
    for each, name in held.items():
        towers[tower_of(name, network.towers)].append(each)
    trained = TrainedParameters(towers)
    updater = Updater(optimizer, ranks, trained=trained, clip_norm=train.clip_norm, guard=context.guard)
    divisor = float(plan.micro_batch * plan.grad_accum)  # any number that all workers share would do
    server = ShardServer(mine, [*held], updater, train, plan.mesh, divisor=divisor, group=updates)
    counter = None
    if rank == 0:
        counter = BatchCounter(num_workers=num_ranks, staleness=plan.comm.async_sgd.staleness, check=server.check)
    return AsyncStepper(
        network,
        plan,
        ranks,
        updater,
        clock,
        context.objective,
        server=server,
        connections=ServerConnections(server, rows, rank=rank, counter=counter, group=requests),
        counter=counter,
        make_state=lambda: AsyncState(
            network.module, optimizer, server, counters=updater.counters, settings=saved_settings(train)
        ),
        divisor=divisor,
    )
