"""Asynchronous SGD as a feature: which batches a worker loads, and how it trains."""

from dataclasses import replace

from trimaran.core import UserError
from trimaran.data.data_kind import data_kind_of
from trimaran.data.feed import DataShare
from trimaran.train.features.async_sgd.async_trainer import AsyncTrainer
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.steppers.feature import Feature, Load, LoadContext, MakeTrainer


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
