"""The state of training that a checkpoint holds: parameters, buffers, optimizer states and counters, by name."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from trimaran.core import TrainSection, UserError
from trimaran.nets import is_dtensor, is_fsdp_module, local_part, local_slices
from trimaran.parallel import OptimizerState, TensorIndex, TensorShard, release_pages, split_weights_of

log = logging.getLogger(__name__)

OUTER_PREFIX, REPLICA_PREFIX, FEEDBACK_PREFIX = "outer/", "replica-", "compression/"
MAY_BE_UNUSED = OUTER_PREFIX, REPLICA_PREFIX, FEEDBACK_PREFIX  # prefixes of states that another plan does not have


class TrainingCounter(Protocol):
    """An object with state that JSON can hold, such as the loss scale or the guard."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class StatePart(Protocol):
    """Tensors that a feature adds to the state; the methods are those of `CheckpointState`."""

    def shards(self) -> Iterable[TensorShard]: ...

    def shards_from(self, index: TensorIndex) -> Iterable[TensorShard]: ...

    def restore(self) -> None:
        """Complete the part once all shards of the state are filled."""


class ShardKeys:
    """The keys under which a checkpoint holds the weights and optimizer states of this rank: their own names."""

    def named(self, shards: Iterable[TensorShard]) -> Iterable[TensorShard]:
        """Return the shards with the keys to save them under."""
        return shards

    def index_seen(self, index: TensorIndex) -> TensorIndex:
        """Return the index as this rank reads it."""
        return index

    def found(self, shards: Iterable[TensorShard], index: TensorIndex) -> Iterable[TensorShard]:
        """Return the shards with the keys under which the checkpoint of this index has them."""
        return shards


def saved_settings(train: TrainSection) -> dict[str, Any]:
    """Return the settings that are saved with the state, since the result depends on them."""
    return {"seed": train.seed, "global_batch": train.global_batch}


class TrainingState:
    """The state of sharded modules and their optimizer; see `checkpoint.tensor_shards.CheckpointState`.

    Must be created before the first forward: later FSDP may show unsharded weights in place of the shards.
    Parameters with the same name, such as the copies of a tied embedding on two stages, are the same tensor. `settings`
    are saved with the state: the result depends on them, and no step changes them.
    `without_base`: frozen parameters, the base of an adapter, are not part of the state. They are read from where the
    base is, and a digest of it is saved. `keys` and `parts` come from the features of the plan.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        *,
        counters: Mapping[str, TrainingCounter],
        settings: Mapping[str, Any],
        without_base: bool = False,
        keys: ShardKeys | None = None,
        parts: Sequence[StatePart] = (),
    ) -> None:
        self._keys, self._parts = keys or ShardKeys(), parts
        self._modules, self._counters, self._settings = modules, counters, settings
        every = [pair for module in modules for pair in module.named_parameters()]
        self._parameters = [(name, each) for name, each in every if each.requires_grad or not without_base]
        self._base = [(name, each) for name, each in every if without_base and not each.requires_grad]
        self._buffers = [pair for module in modules for pair in persistent_buffers(module)]
        self._optimizer = OptimizerState(optimizer, self._parameters)
        self._split = split_weights_of(optimizer)
        self._shards: list[TensorShard] = []
        self._addresses: list[int] = []

    def shards(self) -> list[TensorShard]:
        """See `CheckpointState.shards`. The list is made again if a tensor has moved: FSDP does that at the start."""
        if not self._shards or self._addresses != [*self._data_pointers()]:
            own = self._keys.named([*self._module_shards(), *self._optimizer.shards()])
            self._shards = [*own, *(shard for part in self._parts for shard in part.shards())]
            self._addresses = [*self._data_pointers()]
        return self._shards

    def checked_shards(self) -> list[TensorShard]:
        """Return `shards` and the base of an adapter: what must not change unless an update changes it."""
        return [*self.shards(), *self.base_shards()]

    def base_shards(self) -> list[TensorShard]:
        """Return what this rank holds of the base of an adapter, which is not saved."""
        base = [(f"model/{name}", each) for name, each in self._base if local_part(each).numel()]
        return [local_shard(key, each, frozen=True) for key, each in base]

    def shards_from(self, index: TensorIndex) -> list[TensorShard]:
        seen = self._keys.index_seen(index)
        own = self._keys.found([*self._module_shards(), *self._optimizer.shards_from(seen)], index)
        shards = [*own, *(shard for part in self._parts for shard in part.shards_from(index))]
        used = {shard.key for shard in shards}
        if unused := [key for key in index if key.startswith(FEEDBACK_PREFIX) and key not in used]:
            log.warning("the error feedback of %d tensors of this checkpoint is not used", len(unused))
        return shards

    def gather(self) -> None:
        self._optimizer.wait()

    def progress(self) -> dict[str, Any]:
        return progress_of(self._settings, self._counters)

    def restore(self, progress: Mapping[str, Any]) -> None:
        self._optimizer.settle()
        release_pages()
        for module in (each for root in self._modules for each in root.modules()):
            if is_fsdp_module(module):
                module.reshard()  # an evaluation may have left gathered weights, which are now outdated
        for part in self._parts:
            part.restore()
        restore_counters(progress, self._counters)

    def _module_shards(self) -> Iterator[TensorShard]:
        for name, each in self._parameters:
            if local_part(each).numel():
                shard = local_shard(f"model/{name}", each, frozen=not each.requires_grad)
                yield replace(shard, tensor=self._split.weight(each) or shard.tensor)
        for name, each in self._buffers:
            yield replace(local_shard(f"model/{name}", each, frozen=False), changed_by_forward=True)

    def _data_pointers(self) -> Iterator[int]:
        for tensor in (*(each for _, each in self._parameters), *self._optimizer.tensors()):
            # `to_local` is an autograd function, too slow to call at every step.
            yield (tensor._local_tensor if is_dtensor(tensor) else tensor).data_ptr()


def progress_of(settings: Mapping[str, Any], counters: Mapping[str, TrainingCounter]) -> dict[str, Any]:
    return {**settings, **{name: counter.state() for name, counter in counters.items()}}


def restore_counters(progress: Mapping[str, Any], counters: Mapping[str, TrainingCounter]) -> None:
    """Restore every counter. One that was not saved, such as the loss scale of a new fp16 plan, starts over."""
    for name, counter in counters.items():
        if name in progress:
            try:
                counter.restore(progress[name])
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
                raise UserError(
                    "K007.checkpoint-cannot-restored",
                    where=f"manifest.json: progress.{name}",
                    name=name,
                    ascii=ascii(progress[name])[:80],
                ) from None


def local_shard(key: str, tensor: Tensor, *, frozen: bool) -> TensorShard:
    local, here = local_part(tensor), local_slices(tensor)
    assert tuple(local.shape) == tuple(each.stop - each.start for each in here), f"{key} has an unknown sharding"
    start = tuple(each.start for each in here)
    return TensorShard(key=key, tensor=local, shape=tuple(tensor.shape), start=start, frozen=frozen)


def persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in root.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
