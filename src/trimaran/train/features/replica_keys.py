"""The checkpoint keys of replicas that train alone: what each has for itself, and their shared outer state."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from trimaran.nets.local_shards import local_slices
from trimaran.parallel.comm.outer_step import OuterState, OuterTensor
from trimaran.parallel.tensor_regions import TensorIndex
from trimaran.parallel.tensor_shards import TensorShard
from trimaran.train.checkpointing.training_state import OUTER_PREFIX, REPLICA_PREFIX, ShardKeys

log = logging.getLogger(__name__)


class ReplicaKeys(ShardKeys):
    """Names the shards of this rank's replica.

    Replica 0 has the usual keys, so that any other plan can load them. What another replica has for itself is under
    `replica-N/`: optimizer states, error feedback, and the weights if they still differ after a synchronisation. A
    replica that a checkpoint does not have starts from the state of replica 0.
    """

    def __init__(self, outer: OuterState) -> None:
        self._prefix = f"{REPLICA_PREFIX}{outer.replica}/" if outer.replica > 0 else ""
        self._own: tuple[str, ...] = ("optimizer/", f"{OUTER_PREFIX}error/")
        if outer.local.weights_stay_local:
            self._own += ("model/",)

    def named(self, shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
        return (replace(shard, key=self.key(shard)) for shard in shards)

    def index_seen(self, index: TensorIndex) -> TensorIndex:
        """Return the index with this replica's own tensors in place of those of replica 0."""
        if not self._prefix:
            return index
        own = {key.removeprefix(self._prefix): each for key, each in index.items() if key.startswith(self._prefix)}
        return {key: each for key, each in index.items() if not key.startswith(REPLICA_PREFIX)} | own

    def found(self, shards: Iterable[TensorShard], index: TensorIndex) -> list[TensorShard]:
        """Return the shards under this replica's keys where the checkpoint has them, else under those of replica 0."""
        keyed = [(shard, self.key(shard)) for shard in shards]
        if self._prefix and not any(key in index for shard, key in keyed if key != shard.key):
            log.warning("the checkpoint has no state of %s: it starts from that of the first", self._prefix[:-1])
        return [replace(shard, key=key) if key in index else shard for shard, key in keyed]

    def key(self, shard: TensorShard) -> str:
        """Return the key to save a shard under."""
        is_own = shard.key.startswith(self._own) and not shard.frozen
        return f"{self._prefix}{shard.key}" if is_own else shard.key


class OuterShards:
    """The outer state as part of a checkpoint: the last synchronised weights, the outer momentum, the error feedback.

    Their keys are `outer/weights/NAME`, `outer/momentum/NAME` and `outer/error/NAME`. See `StatePart`.
    """

    def __init__(self, outer: OuterState, keys: ReplicaKeys) -> None:
        self._outer, self._keys = outer, keys
        self._loaded: set[str] = set()

    def shards(self) -> Iterator[TensorShard]:
        return self._keys.named(map(_outer_shard, self._outer.tensors()))

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        """Return the outer state that the checkpoint has; `restore` starts the rest over."""
        shards = [shard for shard in self.shards() if shard.key in index]
        self._loaded = {shard.key for shard in shards}
        return shards

    def restore(self) -> None:
        self._outer.restore(lambda each: self._keys.key(_outer_shard(each)) in self._loaded)


def _outer_shard(each: OuterTensor) -> TensorShard:
    start = tuple(part.start for part in local_slices(each.parameter))
    key = f"{OUTER_PREFIX}{each.kind}/{each.name}"
    return TensorShard(key=key, tensor=each.tensor, shape=tuple(each.parameter.shape), start=start)
