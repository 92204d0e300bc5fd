"""Blocks that keep less for backward and compute it again there."""

from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.attention.varlen  # its operator exists once it is imported
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,  # what `create_selective_checkpoint_contexts` returns has no public name
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.parallel.mesh import RankMesh
from trimaran.parallel.tower_plan import recompute_of, tower_of_blocks

aten, collective = torch.ops.aten, torch.ops._c10d_functional

# What selective recompute keeps. Attention costs the most for the least memory. Sums over ranks and exchanges cost
# the links; what they return is no larger than a block's own output. Gathered tensors are larger by the number of
# ranks, so they are gathered again.
KEPT: frozenset[Any] = frozenset(
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
# Of these it keeps every second, beginning with the second: the keys, the output of attention and one half of a gated
# feed-forward. A block's last product, which no backward needs, falls to the others.
HALVED: frozenset[Any] = frozenset(
    {aten.mm.default, aten.addmm.default, aten._scaled_mm.default, aten._grouped_mm.default}
)


def apply_recompute(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Let blocks compute again in backward what they need there. Parameter names do not change.

    A number k means every k-th block of a tower, from its first. This comes before compile, which then sees what is
    kept, and before FSDP, which gathers a block's weights before it is computed again.
    """
    by_tower: dict[str, list[nn.Module]] = {}
    for tower, block in tower_of_blocks(network):
        by_tower.setdefault(tower, []).append(block)
    for tower, blocks in by_tower.items():
        how = recompute_of(tower, plan)
        if how != "none":
            policy = "selective" if how == "selective" else "full"
            # A compiled block asks for each operator. torch 2.11 leaves what an autograd function computes unmarked by
            # a checkpoint that says nothing, and keeps it: all of our joint products, and those in fp8.
            options = {"context_fn": partial(_contexts, policy)} if plan.compile or policy == "selective" else {}
            for block in blocks[:: how if isinstance(how, int) else 1]:
                _recompute(block, options)


def _recompute(block: nn.Module, options: dict[str, Any]) -> None:
    """Change the block's forward in place: it keeps its input, and random numbers are the same the second time.

    Only `forward` is done again, and not what hooks around it do. The composable `checkpoint` of torch would do them
    again; and it sees no operators inside a compiled block, so that selective would become full without a word.
    """
    inner: Any = block.forward.__func__  # pyrefly: ignore[missing-attribute]

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _casts_anew(self):
            return checkpoint(inner, self, *args, use_reentrant=False, **options, **kwargs)

    block.forward = MethodType(forward, block)  # bound, so that a copy of the block has a copy of it


def _casts_anew(block: nn.Module) -> torch.autocast:
    """Return the autocast that is on, without its memory of weights it has cast.

    That memory would keep a copy of every weight until autocast ends, though nothing here is kept for backward.
    """
    device = next(block.parameters()).device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)


def _contexts(mode: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    policy = partial(_policy, {False: 0, True: 0}) if mode == "selective" else _nothing
    first, second = create_selective_checkpoint_contexts(policy)
    return first, _Again(policy, second.storage, False)  # torch before 2.13 asks the policy the second time too


class _Again(_CachedTorchDispatchMode):
    """The second time. torch wants every operator to come as often as the first time, kept or not.

    Experts that FSDP has sharded by themselves are gathered inside a block, and FSDP does that differently in backward.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in KEPT or func in HALVED:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    """Return that the operator's output is not kept, whatever it is."""
    return CheckpointPolicy.PREFER_RECOMPUTE


def _policy(
    products: dict[bool, int], context: SelectiveCheckpointContext, operator: Any, *_: Any, **__: Any
) -> CheckpointPolicy:
    """Return whether the operator's output is kept; `products` counts those so far, the first time and the second."""
    if operator in HALVED:
        products[context.is_recompute] += 1
    if operator in KEPT or (operator in HALVED and products[context.is_recompute] % 2 == 0):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
