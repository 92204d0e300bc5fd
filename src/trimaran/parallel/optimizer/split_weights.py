"""Splits weights into two 16-bit halves, sums their gradients in fp32, and reads and writes them as fp32."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.local_shards import full_tensor
from trimaran.parallel.joint_layers import matmul_weights
from trimaran.parallel.tensor_shards import goes_to_disk

if TYPE_CHECKING:
    from trimaran.parallel.disk_store import DiskStore

HALF_BF16_STEP = 0x8000  # half the distance between two bf16 values, in bits of fp32
HALF_BYTES = 2
CHUNK_VALUES = 2**24  # values that are joined or split at once: bounds the temporary memory


def split_fp32(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper half of fp32 `values` as bf16, and the lower half as int16. `join_fp32` restores every bit.

    The upper half is the nearest bf16; of two equally near ones, the larger in magnitude. (A cast takes the even one;
    there is no other difference.) Values beyond the largest bf16 by half a step or more have an infinite upper half, as
    with a cast. All bits come back, also those of Inf and NaN; only the upper half of a NaN may not be NaN.
    """
    bits = values.view(torch.int32)
    upper = ((bits + HALF_BF16_STEP) >> 16).to(torch.int16)
    return upper.view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


def join_fp32(upper: Tensor, lower: Tensor) -> Tensor:
    """Return the fp32 values that `split_fp32` split.

    A lower half with its sign bit set is half a step or more: then the upper half was rounded away from zero.
    """
    # A little-endian fp32 is the two 16-bit words side by side, so no wider temporary is needed.
    words = torch.stack([lower, upper.view(torch.int16) + (lower >> 15)], dim=-1)
    return words.view(torch.float32).squeeze(-1)


def split_weights(networks: Sequence[Network], plan: Plan) -> "SplitWeights":
    """Make some matrices their own bf16 upper half, in place, and return their lower halves.

    Call it after the weights are initialised and before anything computes with them. Nothing is split if the plan does
    not say so. The sum of the gradients of several micro-batches is fp32.
    """
    if not plan.splits_weights:
        return NO_SPLIT_WEIGHTS
    lower_halves: dict[Tensor, Tensor] = {}
    matrices = [each for network in networks for each in matmul_weights(network)]
    store = _store_of_halves(matrices, plan)
    for parameter in matrices:
        parameter.data, lower = split_fp32(parameter.detach())
        if store is not None and goes_to_disk(lower.nbytes):
            lower = store.allocate(lower.shape, lower.dtype).copy_(lower)
            store.release()
        if plan.grad_accum > 1:
            parameter.grad_dtype = None  # any dtype
            parameter.register_post_accumulate_grad_hook(_widen_gradient)
        lower_halves[parameter] = lower
    return SplitWeights(lower_halves)


def _store_of_halves(matrices: Sequence[Tensor], plan: Plan) -> "DiskStore | None":
    """Return a file for the lower halves; None if they stay on the device."""
    if not plan.offloads_to_disk:
        return None
    from trimaran.parallel.disk_store import DiskStore, padded  # noqa: PLC0415  few plans offload to a disk

    sizes = [HALF_BYTES * each.numel() for each in matrices]
    return DiskStore(Path(plan.disk.path), sum(padded(size) for size in sizes if goes_to_disk(size)))


def _widen_gradient(parameter: Tensor) -> None:
    """Make the gradient of the first micro-batch fp32; torch adds those of the others to it."""
    assert parameter.grad is not None
    parameter.grad = parameter.grad.float()


@dataclass(frozen=True, slots=True, eq=False)
class SplitWeights:
    """The lower halves of split weights, by the parameter that is the upper half. The optimizer owns and updates them.

    Whoever needs weights in fp32 asks here: checkpoints, exports and metrics. Other parameters are whole weights. Joint
    projections are not part of it, see `parallel.joint_layers`.
    """

    lower_halves: Mapping[Tensor, Tensor]

    def weight(self, parameter: Tensor) -> "SplitWeight | None":
        """Return both halves of a parameter as an fp32 tensor; None if it is not split."""
        lower = self.lower_halves.get(parameter)
        return None if lower is None else SplitWeight(parameter.detach(), lower)

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """Return the whole weight, unsharded, on the CPU. A collective for sharded parameters."""
        split = self.weight(parameter)
        return full_tensor(parameter) if split is None else split.joined()


NO_SPLIT_WEIGHTS = SplitWeights({})


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
