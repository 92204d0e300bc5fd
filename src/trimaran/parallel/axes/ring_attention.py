"""Ring attention: each rank computes its queries against its own keys while those of another rank arrive.

In step s a rank receives keys and values from the rank that is s before it, straight from their owner, and only those
that its queries attend to. Outputs of blocks are merged by the log-sum-exp of their scores, so no rank ever holds more
keys than its own and those of two others. In backward the gradients of keys return the same way.

The whole of it is one operator, forward and backward, which torch neither compiles nor recomputes in parts.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from trimaran.nets import define_operator
from trimaran.parallel.axes.block_attention import Gradients, KeyBlock, Outputs, QueryState, Scores, attention_for
from trimaran.parallel.axes.ring_layout import RingChunks, RingLayout, RingStep, ring_layout
from trimaran.parallel.comm.tensor_collectives import start_all_to_all, wait_for

CP = "cp"
Heads = tuple[Tensor, Tensor, Tensor]
NO_LENGTHS = torch.empty(0, dtype=torch.int64)


def ring_attention(heads: Heads, lengths: Tensor | None, group: str, scores: Scores, sinks: Tensor | None) -> Tensor:
    """Return the attention output of this rank's queries to the full sequence, [B, heads, T / ranks, head_dim].

    `heads` are queries, keys and values. `lengths` are those of the documents of all rows of full sequences, on the
    host; None if each row is one document.
    """
    lengths = NO_LENGTHS if lengths is None else lengths
    settings = [scores.scale, float(scores.window or 0), scores.softcap or 0.0]
    return _RingAttention.apply(*heads, sinks, lengths, group, settings)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *heads, sinks, lengths, ctx.group, ctx.settings = arguments
        out, lse = torch.ops.trimaran.ring_attention(heads, sinks, lengths, ctx.group, ctx.settings)
        ctx.save_for_backward(*heads, sinks, lengths, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        *heads, sinks, lengths, out, lse = ctx.saved_tensors
        given = [out, lse, gradients[0]]
        found = torch.ops.trimaran.ring_attention_backward(heads, given, lengths, ctx.group, ctx.settings)
        of_sinks = None
        if sinks is not None:  # the share of the probability that it takes from all values
            product = (gradients[0].float() * out.float()).sum(-1)
            shares = (sinks.float()[None, :, None] - lse).exp()
            of_sinks = -(shares * product).sum((0, 2)).to(sinks.dtype)
        return *found, of_sinks, None, None, None


def _forward(
    heads: Sequence[Tensor], sinks: Tensor | None, lengths: Tensor, group: str, settings: Sequence[float]
) -> tuple[Tensor, Tensor]:
    (query, key, value), scores = heads, _scores(settings)
    with torch.autocast(query.device.type, enabled=False):
        layout, attention = _layout(query, lengths, group, scores.window), attention_for(query, value, scores)
        total, blocks = Outputs(query, value), _KeyExchange((key, value), layout, group)
        for step in (None, *layout.steps):
            block, keys, values = blocks.next(step)
            attention.forward(total, query, keys, values, block)
        if sinks is not None:
            total.add_sinks(sinks)
    return total.out.to(value.dtype), total.lse


def _backward(
    heads: Sequence[Tensor], given: Sequence[Tensor], lengths: Tensor, group: str, settings: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `heads`; `given` are output, log-sum-exp and the gradient of the output."""
    (query, key, value), scores, state = heads, _scores(settings), QueryState(heads[0], *given)
    with torch.autocast(query.device.type, enabled=False):
        layout, attention = _layout(query, lengths, group, scores.window), attention_for(query, value, scores)
        own = Gradients(*(_zeros(each) for each in heads))
        blocks, returned = _KeyExchange((key, value), layout, group), _GradientReturn(own, layout, group)
        for step in (None, *layout.steps):
            block, keys, values = blocks.next(step)
            found = own if step is None else Gradients(own.query, _zeros(keys), _zeros(values))
            attention.backward(found, state, keys, values, block)
            if step is not None:
                returned.send(step, found, dtype=key.dtype)
        returned.finish()
    return own.query.to(query.dtype), own.key.to(key.dtype), own.value.to(value.dtype)


def _scores(settings: Sequence[float]) -> Scores:
    scale, window, softcap = settings
    return Scores(scale, int(window) or None, softcap or None)


class _KeyExchange:
    """Hands out this rank's keys and values, then those of each step, and receives one step ahead."""

    def __init__(self, own: tuple[Tensor, Tensor], layout: RingLayout, group: str) -> None:
        self._own, self._layout, self._group = own, layout, group
        self._left = [*layout.steps]
        self._pending: Tensor | None = None

    def next(self, step: RingStep | None) -> tuple[KeyBlock, Tensor, Tensor]:
        """Return the block of a step, None for this rank's own, with its keys and values."""
        ring, rank = self._layout.ring, self._layout.rank
        arrived = None if self._pending is None else wait_for(self._pending, axis=CP)
        self._pending = None
        if self._left:
            following = self._left.pop(0)
            sent, received = _packed(self._own, following.sent), _num_elements(self._own, following.received)
            counts = _counts(self._layout, following, sends=sent.numel(), receives=received)
            self._pending = start_all_to_all(sent, *counts, self._group)
        if step is None or arrived is None:
            return KeyBlock(self._layout.own, ring, rank, rank), *self._own
        keys, values = _unpacked(arrived, self._own, step.received)
        return KeyBlock(step.rectangles, ring, rank, _owner(step, self._layout), step.received[0]), keys, values


class _GradientReturn:
    """Sends gradients of keys and values to their owners, and adds those of this rank's own as they arrive."""

    def __init__(self, own: Gradients, layout: RingLayout, group: str) -> None:
        self._own, self._layout, self._group = own, layout, group
        self._pending: tuple[RingStep, Tensor] | None = None

    def send(self, step: RingStep, found: Gradients, *, dtype: torch.dtype) -> None:
        """Start to return the gradients of a step's keys, after those of the last step have arrived."""
        self.finish()
        keys, values = found.key.to(dtype), found.value.to(dtype)
        flat = _packed((keys, values), (0, keys.shape[2]))
        num_received = _num_elements((self._own.key, self._own.value), step.sent)
        receives, sends = _counts(self._layout, step, sends=num_received, receives=flat.numel())
        self._pending = step, start_all_to_all(flat, sends, receives, self._group)

    def finish(self) -> None:
        if self._pending is None:
            return
        step, pending = self._pending
        own = self._own.key, self._own.value
        for total, part in zip(own, _unpacked(wait_for(pending, axis=CP), own, step.sent), strict=True):
            total[:, :, slice(*step.sent)].add_(part)
        self._pending = None


def _layout(query: Tensor, lengths: Tensor, group: str, window: int | None) -> RingLayout:
    ranks = dist.distributed_c10d._resolve_process_group(group)  # pyrefly: ignore[bad-argument-type]
    ring = RingChunks(ranks.size(), query.shape[2] // 2)
    return ring_layout(tuple(lengths.tolist()), (query.shape[0], query.shape[2]), ring, ranks.rank(), window)


def _owner(step: RingStep, layout: RingLayout) -> int:
    return (layout.rank - step.shift) % layout.ring.num_ranks


def _counts(layout: RingLayout, step: RingStep, *, sends: int, receives: int) -> tuple[list[int], list[int]]:
    """Return how many elements go to, and come from, each rank: one reader's keys, and those of one owner."""
    to, by = [0] * layout.ring.num_ranks, [0] * layout.ring.num_ranks
    to[(layout.rank + step.shift) % layout.ring.num_ranks] = sends
    by[_owner(step, layout)] = receives
    return to, by


def _packed(tensors: Sequence[Tensor], span: tuple[int, int]) -> Tensor:
    return torch.cat([each[:, :, slice(*span)].reshape(-1) for each in tensors])


def _num_elements(tensors: Sequence[Tensor], span: tuple[int, int]) -> int:
    return sum(each.shape[0] * each.shape[1] * each.shape[3] for each in tensors) * (span[1] - span[0])


def _unpacked(flat: Tensor, like: Sequence[Tensor], span: tuple[int, int]) -> tuple[Tensor, ...]:
    shapes = [(each.shape[0], each.shape[1], span[1] - span[0], each.shape[3]) for each in like]
    sizes = [_num_elements((each,), span) for each in like]
    return tuple(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))


def _zeros(x: Tensor) -> Tensor:
    """Return zeros in fp32 with the positions before the heads in memory, as kernels return gradients."""
    batch, heads, length, width = x.shape
    return x.new_zeros(batch, length, heads, width, dtype=torch.float32).transpose(1, 2)


def _fake_forward(heads: Sequence[Tensor], *_: Any) -> tuple[Tensor, Tensor]:
    query, _key, value = heads
    batch, num, length, _width = query.shape
    lse = query.new_empty((batch, length, num), dtype=torch.float32).transpose(1, 2)
    return value.new_empty(batch, length, num, value.shape[-1]).transpose(1, 2), lse


define_operator(
    "ring_attention(Tensor[] heads, Tensor? sinks, Tensor lengths, str group, float[] settings) -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
define_operator(
    "ring_attention_backward(Tensor[] heads, Tensor[] given, Tensor lengths, str group, float[] settings) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    lambda heads, *_: tuple(_zeros(each).to(each.dtype) for each in heads),
)
