"""The parts of a rank that are different with `engine: async`."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

from trimaran.core import Recipe, UserError
from trimaran.data.data_kind import data_kind_of
from trimaran.data.feed import BatchFeed, DataShare
from trimaran.nets import Network
from trimaran.train.async_sgd.async_recorder import AsyncRecorder
from trimaran.train.async_sgd.async_stepper import AsyncStepper
from trimaran.train.async_sgd.async_trainer import AsyncTrainer
from trimaran.train.inputs.training_data import TrainingData, load_training_data
from trimaran.train.metrics.meters import MemoryMeter
from trimaran.train.trainer import Trainer


def without_steps(trainer: Trainer, feed_from: Callable[[], BatchFeed]) -> AsyncTrainer:
    """Return the trainer of asynchronous workers, with the parts of the usual one."""
    stepper, recorder = trainer.stepper, trainer.recorder
    assert isinstance(stepper, AsyncStepper), "the engine has no other stepper"
    lines = AsyncRecorder(
        plan=recorder.plan,
        journal=recorder.journal,
        memory=MemoryMeter(trainer.device),
        indexer=recorder.indexer,
        compilations=recorder.compilations,
    )
    parts = {each.name: getattr(trainer, each.name) for each in fields(trainer)}
    return AsyncTrainer(**parts, workers=stepper, feed_from=feed_from, lines=lines, rank=recorder.journal.rank)


def share_batches(
    training_data: TrainingData, recipe: Recipe, network: Network, share: DataShare, *, cache: Path
) -> TrainingData:
    """Return the training data for `engine: async`: batch n is rows n*b to n*b + b - 1 of the order, whoever takes it.

    b are the rows of one worker's part of a step, so that the rows of a step are the same as in synchronous training.
    Held-out data are split as usual.
    """
    if (kind := data_kind_of(recipe)) != "text":
        raise UserError("P095", f"engine async trains on text, not on {kind}: it does not limit bad samples",
                        where="plan.engine", fix="set plan.engine to torch")  # fmt: skip
    any_worker = load_training_data(recipe, network, replace(share, rank=0, dp=1), cache=cache)
    return replace(training_data, training=any_worker.training)
