"""The checkpoint state of asynchronous training: the usual names, so that any other plan can load it."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trimaran.parallel.optimizer.optimizer_state import OptimizerState
from trimaran.parallel.tensor_regions import TensorIndex
from trimaran.parallel.tensor_shards import TensorShard
from trimaran.train.checkpointing.training_state import TrainingCounter, TrainingState
from trimaran.train.features.async_sgd.shard_server import ShardServer


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
