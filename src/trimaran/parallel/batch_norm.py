"""BatchNorm statistics when a batch is split over ranks and micro-batches."""

import copy
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as AnyBatchNorm  # the base class of BatchNorm1d, 2d and 3d

from trimaran.core import DEVICE_TRAITS, UserError

BATCH_NORM = ("local", "sync", "frozen")


def apply_batch_norm(model: nn.Module, how: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Change the BatchNorm layers of `model` in place. Names of parameters and buffers do not change.

    `local` does not change them: each rank normalises by its own micro-batch. `sync` uses the statistics of the
    micro-batch over all ranks. `frozen` normalises by the running statistics and never updates them; scale and shift
    are still trained. Runs before parameters are sharded.
    """
    for name, layer in model.named_modules():
        if not isinstance(layer, AnyBatchNorm):
            continue
        if how == "frozen":
            if layer.running_mean is None:
                raise UserError("P043.batchnorm-layer", where="prepare(batch_norm=...)", name=name)
            layer.eval()
            layer.train = MethodType(lambda layer, mode=True: layer, layer)  # stays in eval mode
        elif how == "sync" and group.size() > 1:
            # torch's SyncBatchNorm does not run on a CPU. Both classes have the same state as the original layer.
            layer.__class__ = DeviceBatchNorm if DEVICE_TRAITS[device.type].has_kernels else GroupBatchNorm
            layer.process_group = group  # pyrefly: ignore[bad-argument-type]


class PaddedRows(Protocol):
    """Whether the rows of this rank, or of any rank, are copies that must not count in the statistics."""

    is_padding: bool
    any_padding: bool


def leave_out_padding(model: nn.Module, padded: PaddedRows) -> None:
    """Leave the copied rows of ranks without rows out of the statistics of all ranks."""
    for layer in model.modules():
        if isinstance(layer, GroupBatchNorm):
            layer.padded = padded


def batch_norm_warning(model: nn.Module, *, num_ranks: int, num_micro_batches: int) -> str | None:
    """Return a warning about BatchNorm with several ranks or micro-batches, and what to do; None if all is well."""
    layers = [each for each in model.modules() if isinstance(each, AnyBatchNorm) and each.training]
    local = [each for each in layers if not isinstance(each, nn.SyncBatchNorm | GroupBatchNorm)]
    if layers and num_micro_batches > 1:
        return (
            f"this model trains BatchNorm, and a step has {num_micro_batches} micro-batches per rank: each is "
            "normalised by its own rows and updates the running statistics. Use one micro-batch per step, "
            "prepare(..., batch_norm='frozen'), or GroupNorm in the model."
        )
    if local and num_ranks > 1:
        return (
            f"this model trains BatchNorm on {num_ranks} ranks: each normalises by its own rows, so its running "
            "statistics are not those of the batch. Use prepare(..., batch_norm='sync') or batch_norm='frozen'."
        )
    return None


class GroupBatchNorm(AnyBatchNorm):
    """BatchNorm over the rows of all ranks of `process_group`: SyncBatchNorm for the CPU."""

    process_group: dist.ProcessGroup
    padded: PaddedRows | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "GroupBatchNorm":
        """Copy everything but the ranks, which a copy shares."""
        shared = {key: vars(self).get(key) for key in ("process_group", "padded") if key in vars(self)}
        copied = memo[id(self)] = type(self).__new__(type(self))
        own = {key: value for key, value in vars(self).items() if key not in shared}
        vars(copied).update(copy.deepcopy(own, memo) | shared)
        return copied

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        dims = [dim for dim in range(input.ndim) if dim != 1]
        shape = [-1 if dim == 1 else 1 for dim in range(input.ndim)]
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        weight = 0.0 if self.padded is not None and self.padded.is_padding else 1.0
        here = x.new_tensor([x.numel() / x.shape[1]])
        sums = _SumOverRanks.apply(torch.cat([x.sum(dims), here]) * weight, self.process_group)
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(shape)
        # Two passes, as on one device: the mean of squares minus the squared mean would lose precision.
        variance = _SumOverRanks.apply(centred.square().sum(dims) * weight, self.process_group) / count
        self._track(mean.detach(), variance.detach() * count / (count - 1))
        out = centred * (variance + self.eps).rsqrt().view(shape)
        if self.affine:
            out = out * self.weight.view(shape)
            out = out if self.bias is None else out + self.bias.view(shape)
        return out.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics; without a momentum they are the mean over all batches."""
        if not self.track_running_stats:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        weight = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        for running, now in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.add_((now - running) * weight)

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.ndim >= 2, "dim 1 must be the features"


class DeviceBatchNorm(GroupBatchNorm, nn.SyncBatchNorm):
    """torch's SyncBatchNorm, which counts the rows of all ranks; the same arithmetic as on CPUs if some are copies."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.padded is not None and self.padded.any_padding:
            return GroupBatchNorm.forward(self, input)
        return nn.SyncBatchNorm.forward(self, input)


class _SumOverRanks(torch.autograd.Function):
    """All-reduce (sum) in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(mine, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = mine.clone()
    dist.all_reduce(total, group=group)
    return total
