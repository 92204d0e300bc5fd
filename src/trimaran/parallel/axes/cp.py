"""Context parallelism: each rank holds a shard of every sequence, and attention covers the full sequence."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _disable_current_modes

from trimaran.core import Plan
from trimaran.nets import AttentionScope, Context, Network, attend
from trimaran.nets.varlen_attention import PLAIN, AttentionOptions, causal_window, masked_attention, run_lengths
from trimaran.parallel.axes.block_attention import Scores
from trimaran.parallel.axes.ring_attention import ring_attention
from trimaran.parallel.comm.axis_waits import axis_span
from trimaran.parallel.comm.tensor_collectives import exchange_rows, gather_dim
from trimaran.parallel.mesh import RankMesh

CP = "cp"


def apply_cp(network: Network, plan: Plan, ranks: RankMesh) -> None:
    """Give each rank its positions of every sequence. Parameters do not change."""
    if ranks.degrees.cp > 1:
        network.use_context(CONTEXTS[plan.comm.context](ranks.group("cp")))


class GroupContext(Context):
    """The positions of each sequence are split over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank, self._size = group, group.rank(), group.size()

    def all_reduce(self, local: Tensor) -> Tensor:
        total = local.detach().clone()
        with axis_span(CP):
            dist.all_reduce(total, group=self._group)
        return total

    def gather(self, local: Tensor) -> Tensor:
        return gather_dim(local, 1, self._group, axis=CP)


class AllGatherContext(GroupContext):
    """All-gathers keys and values of the full sequence; queries stay local.

    A sequence is split into two chunks per rank. A rank holds one chunk from the front and the mirrored one from the
    back: with causal attention late queries attend to more keys than early ones, so this balances the work.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._chunks = (self._rank, 2 * self._size - 1 - self._rank)

    def shard(self, full: Tensor) -> Tensor:
        chunks = full.chunk(2 * self._size, dim=1)
        return torch.cat([chunks[each] for each in self._chunks], dim=1)

    def mask(self, documents: Tensor) -> Tensor:
        positions = torch.arange(documents.shape[1], device=documents.device)[None]
        same = self.shard(documents)[:, :, None] == documents[:, None, :]
        return (same & (positions[:, None, :] <= self.shard(positions)[:, :, None])).unsqueeze(1)

    def scope(self, documents: Tensor, lengths: Sequence[int] | None = None) -> AttentionScope:
        return self.mask(documents)  # a document may span several ranks

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, options: AttentionOptions = PLAIN
    ) -> Tensor:
        key, value = (self._in_order(gather_dim(each, 2, self._group, axis=CP), dim=2) for each in (key, value))
        if options.changes_scores or options.limits(key.shape[2]):
            # Attention with a window, a soft cap or sinks. The scope, if any, is this context's own mask.
            positions = torch.arange(key.shape[2], device=query.device)
            mask = causal_window(self.shard(positions[None])[0], positions, options.window)
            if scope is not None:
                assert isinstance(scope, Tensor), "this context has masks only"
                mask = mask & scope
            return masked_attention(query, key, value, mask, options)
        if scope is not None:
            return attend(query, key, value, scope, options)
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        length = query.shape[2] // 2
        outs = []
        for chunk, part in zip(self._chunks, query.split(length, dim=2), strict=True):
            num_keys = (chunk + 1) * length
            keys, values = key[:, :, :num_keys], value[:, :, :num_keys]
            # torch cannot create this tensor under a dispatch mode (selective recompute).
            with nullcontext() if torch.compiler.is_compiling() else _disable_current_modes():
                bias = causal_lower_right(length, num_keys)
            outs.append(scaled_dot_product_attention(part, keys, values, attn_mask=bias, scale=options.scale))
        return torch.cat(outs, dim=2)

    def gather(self, local: Tensor) -> Tensor:
        return self._in_order(super().gather(local), dim=1)

    def _in_order(self, gathered: Tensor, *, dim: int) -> Tensor:
        """Return the chunks in sequence order. They are gathered as front and back chunk of each rank in turn."""
        chunks = gathered.chunk(2 * self._size, dim)
        return torch.cat([*chunks[0::2], *reversed(chunks[1::2])], dim)


class RingContext(AllGatherContext):
    """Ring attention: keys and values of one other rank at a time, while those of the last are computed.

    Ranks hold the same positions as with `AllGatherContext`. Blocks without a common document are neither computed nor
    sent. A mask, which only models of Hugging Face without our attention scope need, takes gathered keys.
    """

    def scope(self, documents: Tensor, lengths: Sequence[int] | None = None) -> AttentionScope:
        """Return the lengths of the documents, row after row, on the host."""
        found = torch.tensor(run_lengths(documents.cpu()) if lengths is None else lengths, dtype=torch.int64)
        if "torch._dynamo" in sys.modules:
            torch._dynamo.maybe_mark_dynamic(found, 0)  # another number of documents must not compile again
        return found

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, options: AttentionOptions = PLAIN
    ) -> Tensor:
        if isinstance(scope, Tensor) and scope.ndim > 1:
            return super().attend(query, key, value, scope, options)
        assert scope is None or isinstance(scope, Tensor), "a cache is not sharded"
        scale = query.shape[-1] ** -0.5 if options.scale is None else options.scale
        window = options.window if options.limits(self._size * query.shape[2]) else None
        scores = Scores(scale, window, options.softcap or None)
        return ring_attention((query, key, value), scope, self._group.group_name, scores, options.sinks)


class UlyssesContext(GroupContext):
    """Ulysses: all-to-all swaps positions for heads; with fewer key heads than ranks, each is sent to several."""

    def shard(self, full: Tensor) -> Tensor:
        return full.chunk(self._size, dim=1)[self._rank]

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scope: AttentionScope, options: AttentionOptions = PLAIN
    ) -> Tensor:
        repeats = -(-self._size // key.shape[1])
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        query, key, value = (self._exchange(each, split=1, join=2) for each in (query, key, value))
        if options.sinks is not None:  # this rank now has the heads of its own number
            options = replace(options, sinks=options.sinks.chunk(self._size)[self._rank])
        return self._exchange(attend(query, key, value, scope, options), split=2, join=1)

    def _exchange(self, x: Tensor, *, split: int, join: int) -> Tensor:
        """Return `x` with dim `split` sharded over the ranks and dim `join` gathered from them."""
        chunks = torch.stack(x.chunk(self._size, split)).contiguous()
        even = [1] * self._size
        return torch.cat(exchange_rows(chunks, even, even, self._group, axis=CP).unbind(0), join)


CONTEXTS = {"gather": AllGatherContext, "exchange": UlyssesContext, "ring": RingContext}
