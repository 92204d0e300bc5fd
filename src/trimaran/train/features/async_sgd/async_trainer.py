"""The training loop of asynchronous workers: take a batch, read the weights, send the gradient; now and then pause."""

from dataclasses import dataclass, field

import numpy as np
import torch

from trimaran.core import PHASES
from trimaran.data.feed import BatchFeed
from trimaran.data.step_batch import StepBatch
from trimaran.parallel.comm.json_exchange import all_gather_int64
from trimaran.train.agreement import FlagAllReduce, LoopExit, StepDecision
from trimaran.train.features.async_sgd.async_recorder import AsyncRecorder
from trimaran.train.features.async_sgd.async_stepper import AsyncStepper
from trimaran.train.features.async_sgd.batch_counter import Batch, Pause
from trimaran.train.features.async_sgd.shard_server import GradientFacts
from trimaran.train.metrics.meters import MemoryMeter
from trimaran.train.trainer import StepSaver, Trainer

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
