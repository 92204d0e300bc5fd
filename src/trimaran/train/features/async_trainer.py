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

from trimaran.core import PHASES, SECONDS_DECIMALS, StepMetrics, TrainSection, UserError
from trimaran.data import BatchFeed, DataShare, StepBatch, data_kind_of
from trimaran.nets import tower_of
from trimaran.parallel import OptimizerState, TensorIndex, TensorShard, TrainedParameters, all_gather_int64
from trimaran.parallel.optimizer.build_optimizer import optimizer_of
from trimaran.train.agreement import FlagAllReduce, LoopExit, StepDecision
from trimaran.train.checkpointing.training_state import TrainingCounter, TrainingState, saved_settings
from trimaran.train.features.shard_server import (
    Batch,
    BatchCounter,
    GradientFacts,
    Pause,
    ServerConnections,
    ServerRows,
    ShardServer,
    new_server_groups,
)
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.metrics.meters import MemoryMeter, utilisation
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer
from trimaran.train.steppers.stepper import NO_REQUESTS, PlainStepper, end_lap_after_backward
from trimaran.train.steppers.update import Updater
from trimaran.train.trainer import StepSaver, Trainer

log = logging.getLogger(__name__)


class AsyncState(TrainingState):
    """A worker's weights and the optimizer states of its server. In a pause all workers have all weights."""

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

    `server` is this rank's, for its rows of the weights. `counter` is on rank 0 only.
    """

    def __init__(self, context: StepperContext) -> None:
        """Create the server of this rank, and process groups: every rank must call it."""
        network, train, plan, ranks = context.networks[0], context.train, context.plan, context.ranks
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        requests, updates = new_server_groups()
        named = [(name, each) for name, each in network.module.named_parameters() if each.requires_grad]
        rows = [ServerRows(named, server=each, num_servers=num_ranks) for each in range(num_ranks)]
        held = {nn.Parameter(each.view(each.parameter).detach().to("cpu", torch.float32, copy=True)): each.name
                for each in rows[rank].shards}  # fmt: skip
        self._optimizer = optimizer_of(held, train, plan, network.towers)
        towers: dict[str, list[nn.Parameter]] = {tower: [] for tower in network.towers}
        for each, name in held.items():
            towers[tower_of(name, network.towers)].append(each)
        trained = TrainedParameters(towers)
        updater = Updater(self._optimizer, ranks, trained=trained, clip_norm=train.clip_norm, guard=context.guard)
        # By which the summed loss of a batch is divided: any number that all workers share would do.
        self._divisor = float(plan.micro_batch * plan.grad_accum)
        self.server = ShardServer(rows[rank], [*held], updater, train, plan.mesh, divisor=self._divisor, group=updates)
        self.counter, check, staleness = None, self.server.check, plan.comm.async_sgd.staleness
        if rank == 0:
            self.counter = BatchCounter(num_workers=num_ranks, staleness=staleness, check=check)
        super().__init__(context, updater)
        self.connections = ServerConnections(self.server, rows, rank=rank, counter=self.counter, group=requests)
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
        self._network.module.zero_grad()

    def step(self, batch: StepBatch, *, requests: Sequence[int] = NO_REQUESTS) -> NoReturn:
        raise AssertionError("workers have no step in common: see `AsyncTrainer`")

    def update(self, lr: float) -> NoReturn:
        raise AssertionError("servers update the weights: see `ShardServer`")

    def state(self, train: TrainSection, *, without_base: bool = False) -> AsyncState:
        assert not without_base, "the planner refuses adapters"
        module, settings = self._network.module, saved_settings(train)
        return AsyncState(module, self._optimizer, self.server, counters=self.updater.counters, settings=settings)


build_stepper = AsyncStepper


NUM_FIRST_BATCHES = 2  # of each start: they may take longer, see `Section`


@dataclass(slots=True, kw_only=True)
class AsyncTrainer(Trainer):
    """Trains without a barrier in each step. `feed` returns the feed of batches of one worker, by their numbers.

    Between two pauses the ranks exchange only the requests of `ServerConnections`. At a pause all updates are applied
    and all modules have the same weights. Only then is state saved, held-out data evaluated, and a stop obeyed.
    """

    workers: AsyncStepper = field(init=False)
    memory: MemoryMeter = field(init=False)
    batches_done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        assert isinstance(self.stepper, AsyncStepper), "the engine has no other stepper"
        self.workers, self.memory = self.stepper, MemoryMeter(self.device)

    def train(self, saver: StepSaver, start: int, *, pause_after: int | None = None) -> LoopExit:
        """See `Trainer.train`. It does not pause."""
        if start < self.recipe.train.steps and FlagAllReduce(bool(self.requests.stop)).wait():
            return LoopExit(step=start, reason="stop")  # requested while the parts were built
        feed, workers = self.feed(), self.workers
        on_version = workers.counter.set_version if workers.counter is not None else lambda version: None
        workers.server.start(start, lambda number: feed.samples(number, [0]), on_version)
        workers.connections.start()
        self.clock.restart()
        loop_exit, done, segment = None, start, 0
        while loop_exit is None:
            segment += 1
            if workers.counter is not None:
                train, every = self.recipe.train, self.recipe.checkpoint.every
                spacings = [self.workers.pause_every, train.evaluate.every, every if isinstance(every, int) else 0]
                end = min([train.steps, *((done // each + 1) * each for each in spacings if each)])
                workers.counter.open(start=done, end=end)
            while True:
                self._write_lines()
                pause = bool(self.requests.stop) or workers.server.refusal is not None
                taken = workers.connections.take(segment=segment, pause=pause)
                if isinstance(taken, Pause):
                    break
                self._compute(feed, taken)
            done = taken.step
            workers.connections.pull(done)  # all updates before the pause are applied then
            self.clock.lap("comm")
            loop_exit = self._pause(done, saver)
        self.link.report_section("finish", done)
        workers.connections.close()
        workers.server.close()
        return loop_exit

    def _compute(self, feed: BatchFeed, taken: Batch) -> None:
        step = taken.number // self.workers.num_workers + 1
        section = "step" if self.batches_done >= NUM_FIRST_BATCHES else "first"
        self.clock.lap("comm")  # the wait for workers that are behind
        loaded = feed.load(taken.number, lambda sample: None)  # only now: who takes it was not known before
        arrays = {name: torch.from_numpy(each) for name, each in loaded.arrays.items()}
        samples = feed.samples(taken.number, [0])
        rest = loaded.offsets, loaded.metrics, loaded.bad
        batch = StepBatch(taken.number, arrays, loaded.num_valid, samples, *rest).to(self.device)
        self.clock.lap("data")
        self.link.report_section(section, step)
        version = self.workers.connections.pull(taken.version)
        self.clock.lap("comm")
        self.reseed(taken.number)
        loss = float(self.workers.add_gradients(batch, lambda: self.link.report_section(section, step)))
        update = self.workers.connections.finish()
        phases, worker = self.clock.end_step()().phases, self.recorder.journal.rank
        seconds = tuple(phases.get(phase, 0.0) for phase in PHASES)
        facts = GradientFacts(update, taken.number, worker, version, batch.num_valid, loss, seconds)
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
        """Write the lines of the applied updates: each has the tokens of a global batch.

        Its phases are the mean over its batches of the seconds that the workers took. While no worker is idle, n
        workers do n batches in the time of one update on average, so the mean is the wall-clock time of an update.
        """
        journal, plan, compilations = self.recorder.journal, self.recorder.plan, self.recorder.compilations
        for update in self.workers.server.take_applied():
            if journal.rank != 0:
                continue
            if update.refusal is not None:
                log.warning("step %d was refused: %s", update.step, update.refusal.reason)
                journal.event("skip", **update.refusal.as_dict())
            num, each_rank = len(update.batches), zip(*(each.seconds for each in update.batches), strict=True)
            means = (round(sum(seconds) / num, SECONDS_DECIMALS) for seconds in each_rank)
            phases = dict(zip(PHASES, means, strict=True))
            compilations.end_step(update.step - 1)
            if compilations.is_first(update.step):
                facts = {"seconds": sum(phases.values()), "phases": phases, "compile": compilations.summary()}
                journal.event("started", step=update.step, **facts)
            peak, memory = self.memory.read()
            staleness = [each.staleness for each in update.batches]
            batches = Counter(str(each.worker) for each in update.batches)
            facts = {"staleness": sum(staleness) / num, "max_staleness": max(staleness),
                     "batches": dict(sorted(batches.items()))}  # fmt: skip
            details = {"memory": memory, "async_sgd": facts} | ({"skipped": True} if update.refused else {})
            seconds = max(sum(phases.values()), 1e-9)
            metrics = StepMetrics(
                step=update.step,
                loss=update.loss,
                grad_norm=update.grad_norm,
                lr=update.lr,
                tokens=sum(each.tokens for each in update.batches),
                samples=plan.global_batch,
                step_seconds=seconds,
                mfu=utilisation(plan, seconds),
                peak_bytes=peak,
                phases=phases,
                time=update.time,
                details=self.recorder.slow_details.select(update.step, details),
            )
            self.recorder.write(metrics)


class AsyncFeature(Feature):
    """Workers that take batches one by one and send gradients to servers; the engine `async` has their stepper."""

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        """Return a loader of batches by their numbers: n is rows n*b to n*b + b - 1 of the order, whoever takes it.

        b is the number of rows of one worker's part of a step. So the rows of a step are the same as in synchronous
        training. Held-out data are split as usual.
        """
        if (kind := data_kind_of(context.recipe)) != "text":
            raise UserError("P095.engine-async-trains", where="plan.engine", kind=kind)

        def load_for_any_worker(share: DataShare) -> TrainingData:
            return replace(load(share), training=load(replace(share, rank=0, dp=1)).training)

        return load_for_any_worker

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        return AsyncTrainer


FEATURE = AsyncFeature()
