"""Splits weights into two 16-bit halves, sums their gradients in fp32, and reads and writes them as fp32."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trimaran.core import Plan
from trimaran.nets import Network, full_tensor
from trimaran.parallel.joint_layers import matmul_weights
from trimaran.parallel.tensor_shards import SplitWeight, goes_to_disk, split_fp32

HALF_BYTES = 2


def split_weights(networks: Sequence[Network], plan: Plan) -> "SplitWeights":
    """Make some matrices their own bf16 upper half, in place, and return their lower halves.

    Call it after the weights are initialised and before anything computes with them. Nothing is split if the plan does
    not say so. The sum of the gradients of several micro-batches is fp32.
    """
    if not plan.splits_weights:
        return NO_SPLIT_WEIGHTS
    lower_halves: dict[Tensor, Tensor] = {}
    matrices = [each for network in networks for each in matmul_weights(network)]
    store = None
    if plan.offloads_to_disk:
        from trimaran.parallel.disk_store import DiskStore, padded  # noqa: PLC0415  few plans offload to a disk

        sizes = [HALF_BYTES * each.numel() for each in matrices]
        store = DiskStore(Path(plan.disk.path), sum(padded(size) for size in sizes if goes_to_disk(size)))
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

    def weight(self, parameter: Tensor) -> SplitWeight | None:
        """Return both halves of a parameter as an fp32 tensor; None if it is not split."""
        lower = self.lower_halves.get(parameter)
        return None if lower is None else SplitWeight(parameter.detach(), lower)

    def full_tensor(self, parameter: Tensor) -> Tensor:
        """Return the whole weight, unsharded, on the CPU. A collective for sharded parameters."""
        split = self.weight(parameter)
        return full_tensor(parameter) if split is None else split.joined()


NO_SPLIT_WEIGHTS = SplitWeights({})
