"""What training must keep to go on exactly: weights, buffers, the optimizer's states and a few numbers, by name."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trimaran.checkpoint.tensor_regions import Index
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import Plan, TrainSection
from trimaran.nets.local_shards import local_part, local_slices
from trimaran.optim.optimizer_state import OptimizerState
from trimaran.optim.split_weights import split_weights_of

log = logging.getLogger(__name__)


class Counter(Protocol):
    """Something that counts as training goes on, and says so in plain data."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


def facts_of(train: TrainSection) -> dict[str, Any]:
    return {"seed": train.seed, "global_batch": train.global_batch}


def forgotten(plan: Plan) -> list[str]:
    """Return what a plan would need to go on bit by bit, and no checkpoint has: it is different on every rank."""
    found = []
    if plan.comm.compression in ("topk", "powersgd"):
        found.append(f"what {plan.comm.compression} has held back of the gradients")
    if plan.comm.local_steps > 1:
        found.append("what each replica's moments have of its own")
    return found


class TrainingState:
    """The state of modules that are split already, and of their optimizer; see `checkpoint.pieces.State`.

    Comes before the first forward: later FSDP may show whole weights in the place of the shards that are trained.
    Parameters with the same name, such as the copies of a tied embedding on two stages, are the same tensor. `facts`
    are kept beside: what the course depends on and no step changes. What it `forgets` is said when it is restored.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizer: Optimizer,
        *,
        counters: Mapping[str, Counter],
        facts: Mapping[str, Any],
        forgets: Sequence[str] = (),
    ) -> None:
        self._modules, self._counters, self._facts, self._forgets = modules, counters, facts, forgets
        self._parameters = [pair for module in modules for pair in module.named_parameters()]
        self._buffers = [pair for module in modules for pair in persistent_buffers(module)]
        self._optimizer = OptimizerState(optimizer, self._parameters)
        self._pieces: list[TensorShard] = []
        self._addresses: list[int] = []

    def pieces(self) -> list[TensorShard]:
        """See `State.pieces`. The list is made once, and again when a tensor has moved: FSDP does that at the start."""
        if not self._pieces or self._addresses != [*self._where()]:
            self._pieces = [*self._of_modules(), *self._optimizer.pieces()]
            self._addresses = [*self._where()]
        return self._pieces

    def pieces_from(self, index: Index) -> list[TensorShard]:
        return [*self._of_modules(), *self._optimizer.pieces_from(index)]

    def gather(self) -> None:
        self._optimizer.wait()

    def progress(self) -> dict[str, Any]:
        return progress_of(self._facts, self._counters)

    def restore(self, progress: Mapping[str, Any]) -> None:
        self._optimizer.settle()
        for module in (each for root in self._modules for each in root.modules()):
            if isinstance(module, FSDPModule):
                module.reshard()  # an evaluation may have left weights gathered, which are of another step now
        restore_counters(progress, self._counters)
        for what in self._forgets:
            log.warning("%s is not kept and begins anew", what)

    def _of_modules(self) -> Iterator[TensorShard]:
        for name, each in self._parameters:
            if local_part(each).numel():
                piece = piece_of(f"model/{name}", each, frozen=not each.requires_grad)
                yield replace(piece, tensor=split_weights_of(each) or piece.tensor)
        for name, each in self._buffers:
            yield replace(piece_of(f"model/{name}", each, frozen=False), fluid=True)

    def _where(self) -> Iterator[int]:
        """Yield where every tensor is in memory."""
        for tensor in (*(each for _, each in self._parameters), *self._optimizer.tensors()):
            # `to_local` is a function of autograd, too slow for something that is asked at every step.
            yield (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).data_ptr()


def progress_of(facts: Mapping[str, Any], counters: Mapping[str, Counter]) -> dict[str, Any]:
    """Return what is kept beside the tensors."""
    return {**facts, **{name: counter.state() for name, counter in counters.items()}}


def restore_counters(progress: Mapping[str, Any], counters: Mapping[str, Counter]) -> None:
    """Let every counter go on. One that was not there then, such as the scale of a plan in fp16, begins anew."""
    for name, counter in counters.items():
        if name in progress:
            counter.restore(progress[name])


def piece_of(key: str, tensor: Tensor, *, frozen: bool) -> TensorShard:
    """Return this rank's part of a parameter or a buffer."""
    local, here = local_part(tensor), local_slices(tensor)
    assert tuple(local.shape) == tuple(each.stop - each.start for each in here), f"{key} is split in an unknown way"
    start = tuple(each.start for each in here)
    return TensorShard(key=key, tensor=local, shape=tuple(tensor.shape), start=start, frozen=frozen)


def persistent_buffers(root: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that belong to a state dict, by name."""
    for path, module in root.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer
