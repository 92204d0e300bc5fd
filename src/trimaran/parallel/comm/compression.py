"""Gradient compression for DDP. Lossy: it changes the training trajectory."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.mesh import RankMesh

# The name since torch 2.13, which warns about the old one.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
POWERSGD_RANK = 4  # of PowerSGD's factors
POWERSGD_WARMUP_STEPS = 10  # uncompressed steps: early gradients change too fast for low-rank tracking
TOPK_FRACTION = 0.01  # of the gradient values that top-k sends


def apply_compression(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Register DDP's communication hook that compresses buckets. A legal plan compresses only with DDP."""
    if plan.comm.compression != "none" and ranks.data.size() > 1:
        state, hook = COMPRESSION[plan.comm.compression](ranks.data.get_group())
        network.module.register_comm_hook(state, hook)  # pyrefly: ignore[not-callable]


def bucket_mb(plan: Plan, device_type: str) -> int:
    """Return the size of DDP's buckets. PowerSGD over gloo needs one bucket: its collectives must not interleave."""
    return 2**20 if plan.comm.compression == "powersgd" and device_type == "cpu" else plan.comm.bucket_mb


Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def _cast_hook(dtype: torch.dtype) -> Callable[[dist.ProcessGroup], tuple[Any, Hook]]:
    """Return a hook that all-reduces in a 16-bit dtype. torch's bf16 hook supports only NCCL."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        small = buffer.div(group.size()).to(dtype)  # divide first, so the sum stays in range
        summed = dist.all_reduce(small, group=group, async_op=True)
        return summed.get_future().then(lambda done: buffer.copy_(done.value()[0]))

    return lambda group: (group, hook)


def _guard_nonfinite(hook: Hook) -> Hook:
    """Return `hook` with protection of its state: a NaN or Inf in the error feedback would never go away.

    A non-finite gradient is sent as zeros. The result is made non-finite again on that rank, so the global gradient
    norm shows it on all ranks.
    """

    def guarded(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # DDP checks the parameter names
        buffer = bucket.buffer()
        poison = buffer.sum() * 0
        buffer.nan_to_num_(0.0, 0.0, 0.0)
        return hook(state, bucket).then(lambda done: done.value().add_(poison))

    return guarded


def _powersgd(group: dist.ProcessGroup) -> tuple[Any, Hook]:
    state = PowerSGDState(group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_WARMUP_STEPS)
    return state, _guard_nonfinite(powerSGD_hook)


class TopKCompression:
    """Sends the largest values of each bucket and keeps the rest for the next step (error feedback).

    Ranks choose different values, so values and indices are all-gathered and then added by index.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.residuals: dict[int, Tensor] = {}

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradient, number, size = bucket.buffer(), bucket.index(), self.group.size()
        residual = self.residuals.get(number)
        if residual is None or residual.shape != gradient.shape:  # DDP rebuilds its buckets after the first step
            residual = torch.zeros_like(gradient)
        total = gradient + residual
        indices = total.abs().topk(max(1, int(TOPK_FRACTION * total.numel()))).indices
        values = total[indices]
        total[indices] = 0
        self.residuals[number] = total
        packed = torch.cat([values, indices.to(torch.int32).view(torch.float32)])
        gathered = packed.new_empty(size * packed.numel())
        work = gather_single(gathered, packed, group=self.group, async_op=True)

        def average(_: Future[Any]) -> Tensor:
            gradient.zero_()
            for rank_values, rank_indices in gathered.view(size, 2, -1):
                gradient.index_add_(0, rank_indices.view(torch.int32).long(), rank_values)
            return gradient.div_(size)

        return work.get_future().then(average)


def _topk(group: dist.ProcessGroup) -> tuple[Any, Hook]:
    return TopKCompression(group), _guard_nonfinite(lambda state, bucket: state.send(bucket))


COMPRESSION: dict[str, Callable[[dist.ProcessGroup], tuple[Any, Hook]]] = {
    "fp16": _cast_hook(torch.float16),
    "bf16": _cast_hook(torch.bfloat16),
    "powersgd": _powersgd,
    "topk": _topk,
}
