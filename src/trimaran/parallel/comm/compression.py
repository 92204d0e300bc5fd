"""Gradients that travel smaller than they are. What is lost on the way changes the course."""

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

# torch 2.13 gave it this name and warns of the old one.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
RANK = 4  # of PowerSGD's factors
FIRST_STEPS = 10  # that PowerSGD sends whole: early gradients change too fast to be tracked
SHARE = 0.01  # of the gradient's values that top-k sends


def apply_compression(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Let DDP send compressed buckets. A legal plan compresses only what DDP reduces."""
    if plan.comm.compression != "none" and ranks.data.size() > 1:
        state, hook = COMPRESSION[plan.comm.compression](ranks.data.get_group())
        network.module.register_comm_hook(state, hook)  # pyrefly: ignore[not-callable]


def bucket_mb(plan: Plan, device_type: str) -> int:
    """Return the size of DDP's buckets. PowerSGD over gloo wants a single one: its steps must not interleave."""
    return 2**20 if plan.comm.compression == "powersgd" and device_type == "cpu" else plan.comm.bucket_mb


Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def _half(dtype: torch.dtype) -> Callable[[dist.ProcessGroup], tuple[Any, Hook]]:
    """Return a hook that sends half as many bytes. torch's own for bf16 refuses every backend but nccl."""

    def hook(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        small = buffer.div(group.size()).to(dtype)  # divided first, so that the sum stays in range
        summed = dist.all_reduce(small, group=group, async_op=True)
        return summed.get_future().then(lambda done: buffer.copy_(done.value()[0]))

    return lambda group: (group, hook)


def _shielded(hook: Hook) -> Hook:
    """Return `hook` without a trace of bad gradients in what it keeps for later steps, where they would stay for ever.

    A rank's gradient that is not finite is sent as zeros and is not finite again on that rank when it arrives, so that
    the norm, which all ranks share, tells.
    """

    def shielded(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # DDP looks at the parameters' names
        buffer = bucket.buffer()
        poison = buffer.sum() * 0
        buffer.nan_to_num_(0.0, 0.0, 0.0)
        return hook(state, bucket).then(lambda done: done.value().add_(poison))

    return shielded


def _powersgd(group: dist.ProcessGroup) -> tuple[Any, Hook]:
    state = PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=FIRST_STEPS)
    return state, _shielded(powerSGD_hook)


class TopK:
    """Sends the largest values of each bucket and keeps the rest for the next step (error feedback).

    Values and their places are gathered and added up by place: the ranks chose different ones.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.kept: dict[int, Tensor] = {}

    def send(self, bucket: dist.GradBucket) -> Future[Tensor]:
        gradient, number, size = bucket.buffer(), bucket.index(), self.group.size()
        kept = self.kept.get(number)
        if kept is None or kept.shape != gradient.shape:  # DDP makes its buckets anew after the first step
            kept = torch.zeros_like(gradient)
        total = gradient + kept
        places = total.abs().topk(max(1, int(SHARE * total.numel()))).indices
        values = total[places]
        total[places] = 0
        self.kept[number] = total
        letter = torch.cat([values, places.to(torch.int32).view(torch.float32)])
        coordinator = letter.new_empty(size * letter.numel())
        sent = gather_single(coordinator, letter, group=self.group, async_op=True)

        def add_up(_: Future[Any]) -> Tensor:
            gradient.zero_()
            for their_values, their_places in coordinator.view(size, 2, -1):
                gradient.index_add_(0, their_places.view(torch.int32).long(), their_values)
            return gradient.div_(size)

        return sent.get_future().then(add_up)


def _topk(group: dist.ProcessGroup) -> tuple[Any, Hook]:
    return TopK(group), _shielded(lambda state, bucket: state.send(bucket))


COMPRESSION: dict[str, Callable[[dist.ProcessGroup], tuple[Any, Hook]]] = {
    "fp16": _half(torch.float16),
    "bf16": _half(torch.bfloat16),
    "powersgd": _powersgd,
    "topk": _topk,
}
