"""The checkpoint keys of replicas that train alone: what each has for itself, and their shared outer state."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from trimaran.checkpoint.tensor_regions import TensorIndex
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.nets.local_shards import local_slices
from trimaran.parallel.comm.outer_step import OuterState, OuterTensor

log = logging.getLogger(__name__)

OUTER_PREFIX = "outer/"
REPLICA_PREFIX = "replica-"


class ReplicaKeys:
    """Names the shards of this rank's replica; changes nothing without an outer step.

    Replica 0 has the usual keys, so that any other plan can load them. What another replica has for itself is under
    `replica-N/`: optimizer states, error feedback, and the weights if they still differ after a synchronisation. A
    replica that a checkpoint does not have starts from the state of replica 0. The last synchronised weights and the
    outer momentum are `outer/weights/NAME` and `outer/momentum/NAME`.
    """

    def __init__(self, outer_step: OuterState | None) -> None:
        self._outer_step = outer_step
        is_other = outer_step is not None and outer_step.replica > 0
        self._prefix = f"{REPLICA_PREFIX}{outer_step.replica}/" if outer_step is not None and is_other else ""
        self._own: tuple[str, ...] = ("optimizer/", f"{OUTER_PREFIX}error/")
        if outer_step is not None and outer_step.local.weights_stay_local:
            self._own += ("model/",)
        self._loaded: set[str] = set()

    def named(self, shards: Iterable[TensorShard]) -> Iterator[TensorShard]:
        """Yield the shards with the keys that they are saved under."""
        return (replace(shard, key=self._key(shard)) for shard in shards)

    def outer_shards(self) -> Iterator[TensorShard]:
        """Yield the outer state."""
        return self.named(map(_outer_shard, self._outer_step.tensors() if self._outer_step else ()))

    def index_seen(self, index: TensorIndex) -> TensorIndex:
        """Return the index with this replica's own tensors in place of those of replica 0."""
        if not self._prefix:
            return index
        own = {key.removeprefix(self._prefix): each for key, each in index.items() if key.startswith(self._prefix)}
        return {key: each for key, each in index.items() if not key.startswith(REPLICA_PREFIX)} | own

    def found(self, shards: Iterable[TensorShard], index: TensorIndex) -> list[TensorShard]:
        """Return the shards with the keys that the checkpoint has them under: this replica's, or those of replica 0."""
        keyed = [(shard, self._key(shard)) for shard in shards]
        if self._prefix and not any(key in index for shard, key in keyed if key != shard.key):
            log.warning("the checkpoint has no state of %s: it starts from that of the first", self._prefix[:-1])
        return [replace(shard, key=key) if key in index else shard for shard, key in keyed]

    def outer_shards_in(self, index: TensorIndex) -> list[TensorShard]:
        """Return the outer state that the checkpoint has; `restore` starts the rest over."""
        shards = [shard for shard in self.outer_shards() if shard.key in index]
        self._loaded = {shard.key for shard in shards}
        return shards

    def restore(self) -> None:
        """Bring the outer step up to date, after all shards are filled."""
        if self._outer_step is not None:
            self._outer_step.restore(lambda each: self._key(_outer_shard(each)) in self._loaded)

    def _key(self, shard: TensorShard) -> str:
        is_own = shard.key.startswith(self._own) and not shard.frozen
        return f"{self._prefix}{shard.key}" if is_own else shard.key


def _outer_shard(each: OuterTensor) -> TensorShard:
    start = tuple(part.start for part in local_slices(each.parameter))
    key = f"{OUTER_PREFIX}{each.kind}/{each.name}"
    return TensorShard(key=key, tensor=each.tensor, shape=tuple(each.parameter.shape), start=start)
