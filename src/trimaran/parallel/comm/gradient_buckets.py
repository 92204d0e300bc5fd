"""Sums the gradients of replicas after backward, in a few large all-reduces.

DDP reduces gradients while backward computes the next ones, with hooks that run on the host. A backward that is
replayed as a CUDA graph runs no hooks. So gradients are added up in flat buckets, which are reduced after backward.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 256 << 20


class GradientBuckets:
    """Holds the gradients of replicated parameters as slices of flat buckets. Every rank has the same parameters."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._group, self._buckets, self._slices = group, list[Tensor](), list[tuple[nn.Parameter, Tensor]]()
        # Buckets of one dtype and device, the last parameters first: backward reaches them first.
        buckets: list[list[nn.Parameter]] = []
        open_buckets: dict[object, list[nn.Parameter]] = {}
        for each in reversed(parameters):
            kind = each.dtype, each.device
            bucket = open_buckets.get(kind)
            if bucket is None or sum(other.nbytes for other in bucket) + each.nbytes > bucket_bytes:
                bucket = open_buckets[kind] = []
                buckets.append(bucket)
            bucket.append(each)
        for same_kind in buckets:
            sizes = [each.numel() for each in same_kind]
            flat = torch.zeros(sum(sizes), dtype=same_kind[0].dtype, device=same_kind[0].device)
            self._buckets.append(flat)
            slices = flat.split(sizes)
            self._slices += [(each, part.view(each.shape)) for each, part in zip(same_kind, slices, strict=True)]

    def assign(self) -> None:
        """Make the slices the gradients of the parameters, so that backward adds to them."""
        for parameter, gradient in self._slices:
            parameter.grad = gradient

    def begin_step(self) -> None:
        self.assign()
        torch._foreach_zero_(self._buckets)

    def reduce(self) -> None:
        """Average the gradients over all replicas."""
        for parameter, gradient in self._slices:
            if parameter.grad is None or parameter.grad.data_ptr() != gradient.data_ptr():
                raise RuntimeError("a gradient of this step is not in its bucket, so that it would not be reduced")
        for bucket in self._buckets:
            dist.all_reduce(bucket, group=self._group)
        torch._foreach_div_(self._buckets, self._group.size())


def buckets_of(module: nn.Module, group: dist.ProcessGroup) -> GradientBuckets:
    return GradientBuckets([each for each in module.parameters() if each.requires_grad], group)
