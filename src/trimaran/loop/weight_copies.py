"""Copies of a model that follow it: averages of its weights (EMA), and target networks."""

import copy
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trimaran.core import UserError
from trimaran.nets.local_shards import local_part

WHERE = "loop.copy_of(model)"


class CopyMaker:
    """Makes copies of a model that are sharded as it is. Must be created before the model is sharded.

    FSDP cannot copy a sharded model. `shard` shards a module in place, or does nothing.
    """

    def __init__(self, model: nn.Module, shard: Callable[[nn.Module], None], *, is_sharded: bool) -> None:
        self._model, self._shard, self._is_sharded = model, shard, is_sharded
        self._layout, self._failure = _without_values(model) if is_sharded else (model, "")

    def make(self, device: torch.device) -> nn.Module:
        """Return a copy with the model's weights and buffers, in eval mode, without gradients."""
        if self._layout is None:
            raise UserError("P137", f"this model cannot be copied: {self._failure}", where=WHERE,
                            fix="let copy.deepcopy work on its modules, for instance with a __deepcopy__")  # fmt: skip
        made = copy.deepcopy(self._layout)
        made.requires_grad_(False).eval()
        if self._is_sharded:
            self._shard(made)
            made.to_empty(device=device)
        copy_weights(self._model, made, decay=0.0)
        return made


@torch.no_grad()
def copy_weights(model: nn.Module, follower: nn.Module, *, decay: float) -> None:
    """Move the weights of a copy towards the model's: `decay` is how much of their difference is left.

    Buffers are copied. Each rank updates its shards, without communication.
    """
    for module in (*model.modules(), *follower.modules()):
        if isinstance(module, FSDPModule):
            module.reshard()  # gathered weights would be outdated, or in place of the shards
    sources, targets = ([local_part(each) for each in module.parameters()] for module in (model, follower))
    if decay == 0 or not targets:
        _copy_each(sources, targets)
    else:
        torch._foreach_lerp_(targets, sources, 1 - decay)
    _copy_each(list(model.buffers()), list(follower.buffers()))


def refuse_deepcopy(model: nn.Module) -> None:
    """Let `copy.deepcopy` of a sharded model, or of a block of it, end in an error that names the way."""
    for each in model.modules():
        if isinstance(each, FSDPModule):
            vars(each)["__deepcopy__"] = _refuse


def _refuse(memo: Any) -> NoReturn:
    raise UserError("P137", "a sharded model cannot be copied by copy.deepcopy, which AveragedModel and other averages "
                    "of weights call", where="copy.deepcopy(model)", fix="average = loop.copy_of(model), and "
                    "loop.update_copy(average, decay=0.999) after loop.step(), or use sharding='none'")  # fmt: skip


def _copy_each(sources: list[Tensor], targets: list[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _without_values(model: nn.Module) -> tuple[nn.Module | None, str]:
    """Return a copy whose parameters have no values, or None and why the model cannot be copied."""
    empty: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(each, device="meta"), requires_grad=False)
        for each in model.parameters()
    }
    try:
        return copy.deepcopy(model, empty), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
