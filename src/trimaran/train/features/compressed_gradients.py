"""The error feedback of compressed gradients as part of a checkpoint.

Each rank's residual and velocity is one row of a tensor [ranks, *parameter]. Gradients are averaged over the ranks, so
a run with another number of ranks keeps everything that was not sent if the mean of the rows stays the same: saved row
`r` goes to rank `r` modulo the new number, multiplied by new / saved ranks. Several rows of one rank are added.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from trimaran.data import StepBatch
from trimaran.parallel import Compressor, TensorIndex, TensorShard, compressor_of
from trimaran.train.checkpointing.training_state import FEEDBACK_PREFIX
from trimaran.train.metrics.router_stats import copy_to_host_async
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import Feature, ReadDetails, UpdatePart

SHARED = "factor"  # the same on all ranks


class FeedbackState:
    """Saves and restores what a compressor remembers; see `StatePart`."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor
        self._rows: list[tuple[Tensor, list[Tensor], float]] = []  # sums that `restore` writes

    def shards(self) -> Iterator[TensorShard]:
        ranks, rank = self._compressor.state.size, self._compressor.state.rank
        for state, tensors in self._compressor.feedback().items():
            for name, each in tensors.accepted.items():
                key, shape = f"{FEEDBACK_PREFIX}{state}/{name}", tuple(each.shape)
                if state == SHARED:
                    yield TensorShard(key=key, tensor=each, shape=shape, start=(0,) * each.ndim)
                else:
                    start = (rank, *(0,) * each.ndim)
                    yield TensorShard(key=key, tensor=each.unsqueeze(0), shape=(ranks, *shape), start=start)

    def shards_from(self, index: TensorIndex) -> Iterator[TensorShard]:
        """Yield the shards to fill. What the checkpoint lacks, or has with another rank of factors, starts over."""
        self._rows = []
        for shard in self.shards():
            saved = index.get(shard.key)
            first = 0 if shard.key.startswith(f"{FEEDBACK_PREFIX}{SHARED}/") else 1  # dim that must be the same
            if saved is None or saved.meta.shape[first:] != shard.shape[first:]:
                continue
            if saved.meta.shape == shard.shape:
                yield shard
                continue
            # The saved rows that this rank takes over, each a copy in host memory.
            assert isinstance(shard.tensor, Tensor)
            ranks, rank = shard.shape[0], shard.start[0]
            rows = []
            for row in range(rank, saved.meta.shape[0], ranks):
                rows.append(torch.empty(shard.tensor.shape))
                yield TensorShard(key=shard.key, tensor=rows[-1], shape=saved.meta.shape, start=(row, *shard.start[1:]))
            self._rows.append((shard.tensor, rows, ranks / saved.meta.shape[0]))

    def restore(self) -> None:
        """Write what the filled shards of another number of ranks add up to."""
        for target, rows, factor in self._rows:
            target.zero_()
            for each in rows:
                target.add_(each.to(target.device), alpha=factor)
        self._rows = []
        for tensors in self._compressor.feedback().values():
            tensors.discard()


class CompressedGradients(UpdatePart):
    """Tells the compressor which step begins and whether its update was refused; saves the error feedback."""

    def __init__(self, compressor: Compressor, seed: int) -> None:
        compressor.state.seed = seed
        self.compressor = compressor
        self.state = (FeedbackState(compressor),)

    def begin_step(self, batch: StepBatch, loss_scale: float) -> None:
        self.compressor.begin_step(batch.step, loss_scale)

    def after_update(self, step: int, refused: Tensor) -> ReadDetails:
        self.compressor.settle(refused)
        if self.compressor.error is None:
            return dict
        error = copy_to_host_async(self.compressor.error.reshape(1))
        return lambda: {"compression_error": float(error()[0])}


class CompressionFeature(Feature):
    """Gradients that are sent in fewer bits, with error feedback."""

    def update_parts(self, context: StepperContext) -> Sequence[UpdatePart]:
        compressor = compressor_of(context.networks[0].module)
        return () if compressor is None else (CompressedGradients(compressor, context.train.seed),)


FEATURE = CompressionFeature()
