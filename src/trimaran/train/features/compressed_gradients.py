"""Compression of what ranks send in place of their gradients."""

from collections.abc import Sequence

from torch import Tensor

from trimaran.data.step_batch import StepBatch
from trimaran.parallel.comm.compression import Compressor, compressor_of
from trimaran.train.features.feedback_state import FeedbackState
from trimaran.train.metrics.host_copy import copy_to_host_async
from trimaran.train.steppers.feature import Feature, ReadDetails, UpdateContext, UpdatePart


class CompressedGradients(UpdatePart):
    """Tells the compressor which step begins and whether its update was refused; saves the error feedback."""

    def __init__(self, compressor: Compressor, seed: int) -> None:
        compressor.begin_run(seed)
        self.compressor = compressor
        self.state = (FeedbackState(compressor),)

    def begin_step(self, batch: StepBatch, loss_scale: float) -> None:
        self.compressor.begin_step(batch.step, loss_scale)

    def after_update(self, step: int, refused: Tensor) -> ReadDetails:
        """Return the measured error of the compressed sum, if there is one."""
        self.compressor.settle(refused)
        if self.compressor.error is None:
            return dict
        error = copy_to_host_async(self.compressor.error.reshape(1))
        return lambda: {"compression_error": float(error()[0])}


class CompressionFeature(Feature):
    """Gradients that are sent in fewer bits, with error feedback."""

    def update_parts(self, context: UpdateContext) -> Sequence[UpdatePart]:
        compressor = compressor_of(context.networks[0].module)
        return () if compressor is None else (CompressedGradients(compressor, context.train.seed),)


FEATURE = CompressionFeature()
