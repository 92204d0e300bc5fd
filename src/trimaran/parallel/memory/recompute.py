"""Activation checkpointing of blocks: full, or selective by operator."""

from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,  # the return type of `create_selective_checkpoint_contexts` is private
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.nets.adapters.lora_linear import LoraLinear
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import recompute_of, tower_of_blocks

aten, collective = torch.ops.aten, torch.ops._c10d_functional

# Outputs that selective recompute saves. Attention saves the most compute for the least memory. All-reduce,
# reduce-scatter and all-to-all save communication; their outputs are no larger than a block's output. All-gathered
# tensors are larger by the number of ranks, so they are recomputed.
SAVED_OPS: frozenset[Any] = frozenset(
    {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.torch_attn._varlen_attn.default,
        collective.reduce_scatter_tensor.default,
        collective.all_reduce.default,
        collective.all_to_all_single.default,
    }
)
# Every second output of these is saved, starting with the second: the keys, the attention output projection and one
# half of a gated feed-forward. A block's last matmul, whose output no backward needs, is not saved. The two matmuls of
# an adapter do not count: they are cheap to recompute, and the output of the second is as wide as the layer's own.
ALTERNATELY_SAVED_OPS: frozenset[Any] = frozenset(
    {aten.mm.default, aten.addmm.default, aten._scaled_mm.default, aten._grouped_mm.default}
)


def apply_recompute(network: Network, plan: Plan, ranks: RankMesh | None) -> None:
    """Recompute activations of blocks in backward. Parameter names do not change.

    A number k means every k-th block of a tower, starting with the first. Runs before compile, which then sees the
    policy, and before FSDP, which unshards a block's weights before its recompute.
    """
    by_tower: dict[str, list[nn.Module]] = {}
    for tower, block in tower_of_blocks(network):
        by_tower.setdefault(tower, []).append(block)
    for tower, blocks in by_tower.items():
        how = recompute_of(tower, plan)
        if how != "none":
            policy = "selective" if how == "selective" else "full"
            # A compiled block applies the policy to each operator. Without a policy, torch 2.11 does not mark the
            # outputs of autograd functions and saves them: all joint projections and fp8 matmuls.
            contexts = {_rank(block): partial(_contexts, policy, _rank(block)) for block in blocks}
            for block in blocks[:: how if isinstance(how, int) else 1]:
                options = {"context_fn": contexts[_rank(block)]} if plan.compile or policy == "selective" else {}
                _recompute(block, options)


def _recompute(block: nn.Module, options: dict[str, Any]) -> None:
    """Checkpoint the block's forward in place. It saves the input; random numbers are equal in the recompute.

    Only `forward` is recomputed, not the hooks around it. torch's composable `checkpoint` would run the hooks again,
    and it does not see operators inside a compiled block, so selective would silently become full.
    """
    inner: Any = block.forward.__func__  # pyrefly: ignore[missing-attribute]

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _uncached_autocast(self):
            return checkpoint(inner, self, *args, use_reentrant=False, **options, **kwargs)

    block.forward = MethodType(forward, block)  # bound, so a copy of the block gets its own forward


def _uncached_autocast(block: nn.Module) -> torch.autocast:
    """Return the current autocast without its weight cache.

    The cache would hold a cast copy of every weight until autocast ends, although no activation is saved here.
    """
    device = next(block.parameters()).device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def _rank(block: nn.Module) -> int:
    """Return the rank of the adapters in the block; 0 if it has none."""
    return next((len(each.lora_A) for each in block.modules() if isinstance(each, LoraLinear)), 0)


def _contexts(mode: str, rank: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    policy = partial(_policy, {False: 0, True: 0}, rank) if mode == "selective" else _save_nothing
    first, second = create_selective_checkpoint_contexts(policy)
    return first, _RecomputeDispatchMode(policy, second.storage, False)  # torch before 2.13 also calls the policy here


class _RecomputeDispatchMode(_CachedTorchDispatchMode):
    """The dispatch mode of the recompute, which ignores operators that are never saved.

    torch requires every operator to run as often as in forward. But FSDP unshards experts inside a block, and runs
    other operators for that in backward.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPS or func in ALTERNATELY_SAVED_OPS:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _save_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    """Recompute every operator."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(
    matmuls: dict[bool, int], rank: int, context: SelectiveCheckpointContext, operator: Any, *args: Any, **_: Any
) -> CheckpointPolicy:
    """Return whether to save the operator's output. `matmuls` counts matmuls so far, in forward and in recompute.

    A matmul with a dimension of `rank` is an adapter's.
    """
    counts = operator in ALTERNATELY_SAVED_OPS and not (operator is aten.mm.default and rank in args[1].shape)
    matmuls[context.is_recompute] += counts
    if operator in SAVED_OPS or (counts and matmuls[context.is_recompute] % 2 == 0):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
