"""Asynchronous SGD: workers take batches, read the servers' weights and send gradients; now and then all ranks meet."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trimaran.core import PHASES, SECONDS_DECIMALS, Plan, StepMetrics, TrainSection, UserError
from trimaran.data.data_kind import data_kind_of
from trimaran.data.feed import BatchFeed, DataShare
from trimaran.data.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.nets.network import tower_of
from trimaran.parallel import RankMesh
from trimaran.parallel.comm.json_exchange import all_gather_int64
from trimaran.parallel.mesh import TrainedParameters
from trimaran.parallel.optimizer.build_optimizer import optimizer_of
from trimaran.parallel.optimizer.optimizer_state import OptimizerState
from trimaran.parallel.tensor_regions import TensorIndex
from trimaran.parallel.tensor_shards import TensorShard
from trimaran.runs import Journal
from trimaran.runs.read.step_index import StepIndexer
from trimaran.train.agreement import FlagAllReduce, LoopExit, StepDecision
from trimaran.train.checkpointing.training_state import TrainingCounter, TrainingState, saved_settings
from trimaran.train.features.shard_server import (
    AppliedUpdate,
    Batch,
    BatchCounter,
    GradientFacts,
    Pause,
    ServerConnections,
    ServerRows,
    ShardServer,
    new_server_groups,
)
from trimaran.train.health.compilations import Compilations
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.loss.objective import Objective
from trimaran.train.metrics.meters import MemoryMeter
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.metrics.step_recorder import SlowDetails
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer
from trimaran.train.steppers.stepper import NO_REQUESTS, PlainStepper, end_lap_after_backward
from trimaran.train.steppers.update import Updater
from trimaran.train.trainer import StepSaver, Trainer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRecorder:
    """Records updates one after another, on the main thread of rank 0.

    A line is an update with the tokens of a global batch, as in synchronous training. Its phases are the mean over its
    batches of the seconds that the workers took. While no worker is idle, n workers do n batches in the time of one
    update on average, whoever is faster: so the mean is the wall-clock time of an update.
    """

    plan: Plan
    journal: Journal
    memory: MemoryMeter
    indexer: StepIndexer | None
    compilations: Compilations
    slow_details: SlowDetails = field(default_factory=SlowDetails)

    def record(self, updates: Sequence[AppliedUpdate]) -> None:
        for each in updates:
            self._record_one(each)

    def _record_one(self, update: AppliedUpdate) -> None:
        if update.refusal is not None:
            log.warning("step %d was refused: %s", update.step, update.refusal.reason)
            self.journal.event("skip", **update.refusal.as_dict())
        phases = {
            phase: round(sum(each.seconds[number] for each in update.batches) / len(update.batches), SECONDS_DECIMALS)
            for number, phase in enumerate(PHASES)
        }
        self.compilations.end_step(update.step - 1)
        if self.compilations.is_first(update.step):
            facts = {"seconds": sum(phases.values()), "phases": phases, "compile": self.compilations.summary()}
            self.journal.event("started", step=update.step, **facts)
        peak, memory = self.memory.read()
        seconds, prediction = max(sum(phases.values()), 1e-9), self.plan.prediction
        known = prediction is not None and prediction.mfu_is_known
        peak_flops = prediction.device_peak_flops * self.plan.mesh.world_size if prediction and known else 0.0
        details = {"memory": memory, "async_sgd": staleness_details(update)}
        metrics = StepMetrics(
            step=update.step,
            loss=update.loss,
            grad_norm=update.grad_norm,
            lr=update.lr,
            tokens=sum(each.tokens for each in update.batches),
            samples=self.plan.global_batch,
            step_seconds=seconds,
            mfu=prediction.flops_per_step / (seconds * peak_flops) if prediction and peak_flops else 0.0,
            peak_bytes=peak,
            phases=phases,
            time=update.time,
            details=self.slow_details.select(update.step, details | ({"skipped": True} if update.refused else {})),
        )
        self.journal.step(metrics)
        if self.indexer is not None:
            self.indexer.note_line()
        log.info("step %d  loss %.4f  %.0f tokens/s", metrics.step, update.loss, metrics.tokens_per_second)


def staleness_details(update: AppliedUpdate) -> dict[str, Any]:
    """Return the `async_sgd` field of a line: how stale the gradients were, and how many batches each worker did."""
    staleness = [each.staleness for each in update.batches]
    batches = Counter(str(each.worker) for each in update.batches)
    return {
        "staleness": sum(staleness) / len(staleness),
        "max_staleness": max(staleness),
        "batches": dict(sorted(batches.items())),
    }


class AsyncState(TrainingState):
    """The weights of a worker's module, and the optimizer states of this rank's server for the rows that it holds.

    During a pause the module of every worker has the weights of all servers.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        server: ShardServer,
        *,
        counters: Mapping[str, TrainingCounter],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__([module], optimizer, counters=counters, settings=settings)
        self._server = server
        self._rows = {each.name: each for each in server.rows.shards}
        named = [(shard.name, each) for shard, each in zip(server.rows.shards, server.parameters, strict=True)]
        self._moments = OptimizerState(optimizer, named)
        self._all: tuple[list[TensorShard], list[TensorShard]] | None = None

    def shards(self) -> list[TensorShard]:
        """See `CheckpointState.shards`. The list stays the same one until a tensor moves."""
        weights = super().shards()
        if self._all is None or self._all[0] is not weights:
            self._all = weights, [*weights, *self._placed(self._moments.shards())]
        return self._all[1]

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        return [*super().shards_from(index), *self._placed(self._moments.shards_from(index))]

    def restore(self, progress: Mapping[str, Any]) -> None:
        super().restore(progress)
        self._moments.settle()
        self._server.load_weights()

    def _placed(self, shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
        """Yield states with their place in the full tensor; counts of steps have none."""
        for shard in shards:
            row = self._rows[shard.key.split("/", 2)[2]]
            if shard.tensor.ndim and shard.tensor.shape == row.view(row.parameter).shape:
                shard = replace(shard, shape=tuple(row.parameter.shape), start=row.start)
            yield shard


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


NUM_FIRST_BATCHES = 2  # of each start: they may take longer, see `Section`


@dataclass(slots=True, kw_only=True)
class AsyncTrainer(Trainer):
    """Trains without a barrier in each step. `feed` returns the feed of batches of one worker, by their numbers.

    Between two pauses the ranks exchange nothing but the requests of `ServerConnections`. At a pause all updates are
    applied and all modules have the same weights: state is saved, held-out data are evaluated, and a stop is obeyed.
    """

    workers: AsyncStepper = field(init=False)
    lines: AsyncRecorder = field(init=False)
    batches_done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        assert isinstance(self.stepper, AsyncStepper), "the engine has no other stepper"
        self.workers = self.stepper
        self.lines = AsyncRecorder(
            plan=self.recorder.plan,
            journal=self.recorder.journal,
            memory=MemoryMeter(self.device),
            indexer=self.recorder.indexer,
            compilations=self.recorder.compilations,
        )

    def train(self, saver: StepSaver, start: int, *, pause_after: int | None = None) -> LoopExit:
        """See `Trainer.train`. It does not pause."""
        if start < self.recipe.train.steps and FlagAllReduce(bool(self.requests.stop)).wait():
            return LoopExit(step=start, reason="stop")  # requested while the parts were built
        feed, workers = self.feed(), self.workers
        on_version = workers.counter.set_version if workers.counter is not None else _tell_nobody
        workers.server.start(start, lambda number: feed.samples(number, [0]), on_version)
        workers.connections.start()
        self.clock.restart()
        loop_exit, done, segment = None, start, 0
        while loop_exit is None:
            segment += 1
            if workers.counter is not None:
                workers.counter.open(start=done, end=self._next_pause(done))
            done = self._run_segment(feed, segment)
            loop_exit = self._pause(done, saver)
        self.link.report_section("finish", done)
        workers.connections.close()
        workers.server.close()
        return loop_exit

    def _next_pause(self, done: int) -> int:
        """Return the step of the next pause: those of the plan, of evaluations, of checkpoints, and the last step."""
        train, every = self.recipe.train, self.recipe.checkpoint.every
        spacings = [self.workers.pause_every, train.evaluate.every, every if isinstance(every, int) else 0]
        return min([train.steps, *((done // each + 1) * each for each in spacings if each)])

    def _run_segment(self, feed: BatchFeed, segment: int) -> int:
        """Compute batches until the next pause; return its step, once all updates before it are applied."""
        while True:
            self._write_lines()
            pause = bool(self.requests.stop) or self.workers.server.refusal is not None
            taken = self.workers.connections.take(segment=segment, pause=pause)
            if isinstance(taken, Pause):
                self.workers.connections.pull(taken.step)
                self.clock.lap("comm")
                return taken.step
            self._compute(feed, taken)

    def _compute(self, feed: BatchFeed, taken: Batch) -> None:
        """Compute and send the gradient of one batch."""
        step = taken.number // self.workers.num_workers + 1
        section = "step" if self.batches_done >= NUM_FIRST_BATCHES else "first"
        self.clock.lap("comm")  # the wait for workers that are behind
        batch = load_batch(feed, taken.number).to(self.device)
        self.clock.lap("data")
        self.link.report_section(section, step)
        version = self.workers.connections.pull(taken.version)
        self.clock.lap("comm")
        self.reseed(taken.number)
        loss = float(self.workers.add_gradients(batch, lambda: self.link.report_section(section, step)))
        update = self.workers.connections.finish()
        seconds = self.clock.end_step()().phases
        facts = GradientFacts(
            update=update,
            batch=taken.number,
            worker=self.recorder.journal.rank,
            version=version,
            tokens=batch.num_valid,
            loss=loss,
            seconds=tuple(seconds.get(phase, 0.0) for phase in PHASES),
        )
        self.workers.connections.push(facts)  # its time is part of the next batch
        self.workers.clear_gradients()
        self.batches_done += 1
        self.link.report_section("data", step)

    def _pause(self, done: int, saver: StepSaver) -> LoopExit | None:
        """Save and evaluate what is due after `done` steps; return how the loop exits, or None if it continues."""
        self._write_lines()
        steps, evaluate = self.recipe.train.steps, self.recipe.train.evaluate.every
        requests = all_gather_int64(np.array([bool(self.requests.stop), saver.wants_save]))
        any_stops, any_saves = (bool(each) for each in requests.max(axis=0))
        refusal = self.workers.server.refusal
        if refusal is not None:
            return LoopExit(step=done, reason="numeric", refusal=refusal)
        if done == steps:
            return LoopExit(step=done, reason="done")
        if any_stops:
            return LoopExit(step=done, reason="stop")
        every = self.recipe.checkpoint.every
        is_turn = done % every == 0 if isinstance(every, int) and every else any_saves
        saver.after_step(done, StepDecision(save=is_turn and every != "off"))
        saver.wait_until_copied()
        self.clock.lap("checkpoint")
        if evaluate and done % evaluate == 0:
            if self.evaluator.run(step=done):
                return LoopExit(step=done, reason="stop")
            self.clock.restart()
        return None

    def _write_lines(self) -> None:
        updates = self.workers.server.take_applied()
        if self.recorder.journal.rank == 0:
            self.lines.record(updates)


def load_batch(feed: BatchFeed, number: int) -> StepBatch:
    """Return a batch by its number. It is read when it is taken: who takes which batch is not known before."""
    loaded = feed.load(number, lambda sample: None)
    arrays = {name: torch.from_numpy(each) for name, each in loaded.arrays.items()}
    samples = feed.samples(number, [0])
    return StepBatch(number, arrays, loaded.num_valid, samples, loaded.offsets, loaded.metrics, loaded.bad)


def _tell_nobody(version: int) -> None:
    """Do nothing: only rank 0 counts batches."""


class AsyncFeature(Feature):
    """Workers that take batches one by one and send gradients to servers; the engine `async` has their stepper."""

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        """Return a loader of batches by their numbers: n is rows n*b to n*b + b - 1 of the order, whoever takes it.

        b are the rows of one worker's part of a step, so that the rows of a step are the same as in synchronous
        training. Held-out data are split as usual.
        """
        if (kind := data_kind_of(context.recipe)) != "text":
            raise UserError("P095", f"engine async trains on text, not on {kind}: it does not limit bad samples",
                            where="plan.engine", fix="set plan.engine to torch")  # fmt: skip

        def load_for_any_worker(share: DataShare) -> TrainingData:
            return replace(load(share), training=load(replace(share, rank=0, dp=1)).training)

        return load_for_any_worker

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        return AsyncTrainer


FEATURE = AsyncFeature()
