"""Activation checkpointing of blocks: full, or by operator."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
import torch.nn.attention.varlen  # registers its operator
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    _CachedTorchDispatchMode,  # the return type of `create_selective_checkpoint_contexts` is private
    checkpoint,
    create_selective_checkpoint_contexts,
)

from trimaran.core import RECOMPUTED_BY_OPERATOR, Plan, Recompute
from trimaran.nets import LoraLinear, Network
from trimaran.parallel.axes import ring_attention as _registers_operator  # noqa: F401
from trimaran.parallel.mesh import RankMesh, recompute_of, tower_of_blocks

aten, collective = torch.ops.aten, torch.ops._c10d_functional

# Outputs that recompute by operator saves. Attention saves the most compute for the least memory. All-reduce,
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
        torch.ops.trimaran.ring_attention.default,
        collective.reduce_scatter_tensor.default,
        collective.all_reduce.default,
        collective.all_to_all_single.default,
    }
)
# Elementwise recompute saves the outputs of these, too. Selective recompute saves every second one, starting with the
# second: the keys, the attention output projection and one half of a gated feed-forward. So a block's last matmul,
# whose output no backward needs, is not saved. The two matmuls of an adapter do not count: they are cheap to recompute,
# and the output of the second is as wide as the layer's own.
MATMUL_OPS: frozenset[Any] = frozenset(
    {aten.mm.default, aten.addmm.default, aten._scaled_mm.default, aten._grouped_mm.default}
)
# Operators that follow an all-gather along another than the first dim, in this order.
REORDERING_OPS: frozenset[Any] = frozenset({collective.wait_tensor.default, aten.view.default})

RECOMPUTED_ATTRIBUTE = "_trimaran_recomputed"  # of a forward that recomputes: the function that it recomputes


def apply_recompute(network: Network, plan: Plan, ranks: RankMesh | None) -> None:
    """Recompute activations of blocks in backward. Parameter names do not change.

    A number k means every k-th block of a tower, starting with the first. Runs before compile, which then sees the
    policy, and before FSDP, which unshards a block's weights before its recompute.
    """
    contexts: dict[tuple[str, int], Any] = {}  # equal blocks share one, and with it a compilation
    for how, block in recomputed_blocks(network, plan):
        policy, rank = how if how in RECOMPUTED_BY_OPERATOR else "full", matrix_rank(block)
        # A compiled block applies the policy to each operator. Without a policy, torch 2.11 does not mark the outputs
        # of autograd functions and saves them: all joint projections and fp8 matmuls.
        context = contexts.setdefault((policy, rank), partial(_contexts, policy, rank))
        _recompute(block, {"context_fn": context} if plan.compile or policy != "full" else {})


def change_recompute(network: Network, plan: Plan, ranks: RankMesh | None) -> None:
    """Recompute as `plan` says from the next forward on, whatever was recomputed before. No block is compiled."""
    for block in network.blocks:
        forward = block.__dict__.get("forward")
        if (inner := getattr(forward, RECOMPUTED_ATTRIBUTE, None)) is not None:
            block.forward = MethodType(inner, block)
    apply_recompute(network, plan, ranks)


def recomputed_blocks(network: Network, plan: Plan) -> Iterator[tuple[Recompute, nn.Module]]:
    """Yield the blocks that are recomputed, and how."""
    by_tower: dict[str, list[nn.Module]] = {}
    for tower, block in tower_of_blocks(network):
        by_tower.setdefault(tower, []).append(block)
    for tower, blocks in by_tower.items():
        how = recompute_of(tower, plan)
        if how != "none":
            yield from ((how, block) for block in blocks[:: how if isinstance(how, int) else 1])


def regather_in_compiled(blocks: Iterable[nn.Module], group: str) -> None:
    """Let compiled blocks repeat all-gathers over this group in backward. What else they save the compiler chooses."""
    contexts = partial(_regather_contexts, group)  # one for all blocks, so that equal ones share a compilation
    for block in blocks:
        _recompute(block, {"context_fn": contexts})


def _regather_contexts(group: str) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(RegatherPolicy(group))


class RegatherPolicy:
    """Recomputes all-gathers over one group, and what turns the output of each into the gathered tensor.

    A block that torch runs eagerly, although it should be compiled, is recomputed in full: to save all else would keep
    the output of every operator.
    """

    def __init__(self, group: str) -> None:
        self._group, self._follows_gather = group, False

    def __call__(self, _: SelectiveCheckpointContext, operator: Any, *args: Any, **__: Any) -> CheckpointPolicy:
        if get_proxy_mode() is None:
            return CheckpointPolicy.PREFER_RECOMPUTE
        is_gather = operator is collective.all_gather_into_tensor.default
        if is_gather:  # torch names a process group, or passes the group itself
            is_gather = (args[2] if isinstance(args[2], str) else args[2].group_name) == self._group
        self._follows_gather = is_gather or (self._follows_gather and operator in REORDERING_OPS)
        return CheckpointPolicy.MUST_RECOMPUTE if self._follows_gather else CheckpointPolicy.PREFER_SAVE


def _recompute(block: nn.Module, options: dict[str, Any]) -> None:
    """Checkpoint the block's forward in place. It saves the input; random numbers are equal in the recompute.

    Only `forward` is recomputed, not the hooks around it. torch's composable `checkpoint` would run the hooks again,
    and it does not see operators inside a compiled block, so selective would silently become full.
    """
    inner: Any = block.forward.__func__  # pyrefly: ignore[missing-attribute]

    @wraps(inner)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Without autocast's cache, which would hold a cast copy of every weight until autocast ends.
        device = next(self.parameters()).device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False):
            return checkpoint(inner, self, *args, use_reentrant=False, **options, **kwargs)

    setattr(forward, RECOMPUTED_ATTRIBUTE, inner)
    block.forward = MethodType(forward, block)  # bound, so a copy of the block gets its own forward


def matrix_rank(block: nn.Module) -> int:
    """Return the rank of the adapters in the block; 0 if it has none."""
    return next((len(each.lora_A) for each in block.modules() if isinstance(each, LoraLinear)), 0)


def _contexts(mode: str, rank: int) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    policy: Any = _save_nothing
    if mode in RECOMPUTED_BY_OPERATOR:
        policy = partial(selective_policy, {False: 0, True: 0}, rank, 1 if mode == "elementwise" else 2)
    first, second = create_selective_checkpoint_contexts(policy)
    return first, _RecomputeDispatchMode(policy, second.storage, False)  # torch before 2.13 also calls the policy here


class _RecomputeDispatchMode(_CachedTorchDispatchMode):
    """The dispatch mode of the recompute, which ignores operators that are never saved.

    torch requires every operator to run as often as in forward. But FSDP unshards experts inside a block, and runs
    other operators for that in backward.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in SAVED_OPS or func in MATMUL_OPS:
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _save_nothing(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_policy(
    matmuls: dict[bool, int],
    rank: int,
    stride: int,
    context: SelectiveCheckpointContext,
    operator: Any,
    *args: Any,
    **_: Any,
) -> CheckpointPolicy:
    """Save every `stride`-th matmul, counted in `matmuls` by forward and recompute, but none of an adapter's `rank`."""
    counts = operator in MATMUL_OPS and not (operator is aten.mm.default and rank in args[1].shape)
    matmuls[context.is_recompute] += counts
    if operator in SAVED_OPS or (counts and matmuls[context.is_recompute] % stride == 0):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
