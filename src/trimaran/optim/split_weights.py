"""Splits weights into two 16-bit halves, sums their gradients in fp32, and reads and writes them as fp32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.optim.split_bf16 import join_fp32, split_fp32
from trimaran.parallel.matmul_weights import matmul_weights
from trimaran.parallel.memory.disk_store import DiskStore, goes_to_disk, padded

HALF_BYTES = 2
CHUNK_VALUES = 2**24  # values that are joined or split at once: bounds the temporary memory


def split_weights(networks: Sequence[Network], plan: Plan) -> dict[nn.Parameter, Tensor]:
    """Make some matrices their own bf16 upper half, in place, and return the int16 lower half of each.

    Call it after the weights are initialised and before anything computes with them. Returns nothing if the plan does
    not split weights. The sum of the gradients of several micro-batches is fp32. A split parameter has a method
    `gather_full` that returns it in fp32, see `nets.hf_weights.full_tensor`.
    """
    lower_halves: dict[nn.Parameter, Tensor] = {}
    if not plan.splits_weights:
        return lower_halves
    matrices = [each for network in networks for each in matmul_weights(network)]
    store = _store_of_halves(matrices, plan)
    for parameter in matrices:
        upper, lower = split_fp32(parameter.detach())
        if store is not None and goes_to_disk(lower.nbytes):
            lower = store.allocate(lower.shape, lower.dtype).copy_(lower)
            store.release()
        parameter.data = upper
        # A weak reference, since a parameter that refers to itself would outlive its network.
        _set_attributes(parameter, low=lower, gather_full=partial(_joined, ref(parameter)))
        if plan.grad_accum > 1:
            parameter.grad_dtype = None  # any dtype
            parameter.register_post_accumulate_grad_hook(_widen_gradient)
        lower_halves[parameter] = lower
    return lower_halves


def _store_of_halves(matrices: Sequence[Tensor], plan: Plan) -> DiskStore | None:
    """Return a file for the lower halves; None if they stay on the device."""
    if not plan.offloads_to_disk:
        return None
    sizes = [HALF_BYTES * each.numel() for each in matrices]
    return DiskStore(Path(plan.disk.path), sum(padded(size) for size in sizes if goes_to_disk(size)))


def split_weight_of(parameter: Tensor) -> "SplitWeight | None":
    """Return both halves of a parameter that `split_weights` has split; None for any other."""
    lower = getattr(parameter, "low", None)
    return None if lower is None else SplitWeight(parameter.detach(), lower)


def _joined(parameter: ref[nn.Parameter]) -> Tensor:
    held = parameter()
    assert held is not None, "the caller holds the parameter"
    split = split_weight_of(held)
    assert split is not None
    return split.joined()


@dataclass(frozen=True, slots=True)
class SplitWeight:
    """A view of an fp32 tensor that is stored as two halves; see `checkpoint.tensor_shards.TensorLike`."""

    upper: Tensor
    lower: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.upper.shape

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def ndim(self) -> int:
        return self.upper.ndim

    @property
    def nbytes(self) -> int:
        return self.numel() * self.element_size()

    @property
    def is_cuda(self) -> bool:
        return self.upper.is_cuda

    def numel(self) -> int:
        return self.upper.numel()

    def element_size(self) -> int:
        return torch.float32.itemsize

    def __getitem__(self, window: Any, /) -> Self:
        return type(self)(self.upper[window], self.lower[window])

    @torch.no_grad()
    def copy_(self, values: Tensor) -> None:
        for upper, lower, chunk in _in_chunks(self.upper, self.lower, values):
            halves = split_fp32(chunk.to(upper.device, torch.float32))
            upper.copy_(halves[0])
            lower.copy_(halves[1])

    @torch.no_grad()
    def copy_to(self, target: Tensor, *, non_blocking: bool) -> None:
        for upper, lower, chunk in _in_chunks(self.upper, self.lower, target):
            chunk.copy_(join_fp32(upper, lower.to(upper.device)), non_blocking=non_blocking)  # may be on disk

    def joined(self) -> Tensor:
        """Return the fp32 values on the CPU."""
        values = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(values, non_blocking=False)
        return values


def _in_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same chunk of each of several tensors of one shape; full rows if any is not contiguous."""
    if all(each.is_contiguous() for each in tensors):
        return zip(*(each.view(-1).split(CHUNK_VALUES) for each in tensors), strict=True)
    rows = max(1, CHUNK_VALUES * len(tensors[0]) // max(1, tensors[0].numel()))
    return zip(*(each.split(rows) for each in tensors), strict=True)


def _widen_gradient(parameter: Tensor) -> None:
    """Make the gradient of the first micro-batch fp32; torch adds those of the others to it."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.float()


def _set_attributes(parameter: Tensor, **attributes: object) -> None:
    for name, value in attributes.items():
        setattr(parameter, name, value)
