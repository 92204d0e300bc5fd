"""Keys and values of positions that were already computed, so that a new token needs a forward of one position."""

from dataclasses import dataclass

import torch
from torch import Tensor

from trimaran.nets.varlen_attention import PLAIN, AttentionOptions, attention, cached_mask, masked_attention

MIN_CAPACITY = 64


class KeyValueCache:
    """The keys and values of every layer, in preallocated memory that doubles when it is full.

    The rows of a batch are sequences of the same length that do not attend to each other. A forward that appends
    positions goes through `extend`. A layer's memory is allocated when it is first written, in the dtype and with the
    heads that it then has, so that the cache of a pipeline stage or of a slice of the heads needs no other settings.
    """

    def __init__(self) -> None:
        self.length = 0
        self._capacity = MIN_CAPACITY
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = min(length, self.length)

    def extend(self, tokens: Tensor) -> "CacheExtension":
        """Return the positions that a forward of `tokens` [rows, T] appends, for exactly one forward."""
        start, self.length = self.length, self.length + tokens.shape[1]
        while self._capacity < self.length:
            self._capacity *= 2
        positions = torch.arange(start, self.length, device=tokens.device).expand(len(tokens), -1)
        mask = None
        if start and tokens.shape[1] > 1:
            mask = (torch.arange(self.length, device=tokens.device) <= positions[:, :, None])[:, None]
        return CacheExtension(self, positions, mask, start, self.length)

    def memory(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Return the memory [rows, heads, capacity, width] of what a layer keeps, such as keys like these."""
        old = self._layers.get(layer)
        if old is None or old[0].shape[2] < self._capacity:
            # Zeros: attention multiplies what a mask excludes by zero, and uninitialised memory may hold NaN.
            grown = tuple(each.new_zeros(*each.shape[:2], self._capacity, each.shape[3]) for each in new)
            for after, before in zip(grown, old or (), strict=False):
                after[:, :, : before.shape[2]] = before
            self._layers[layer] = grown
        return self._layers[layer]


@dataclass(frozen=True, eq=False)
class CacheExtension:
    """The positions that one forward appends to a cache, from `start` to `stop`.

    `positions` [rows, T] are those of the new tokens, `mask` which of the keys from 0 to `stop` each of them attends
    to; None if all of them, or if there is nothing before them and attention is plain causal attention.
    """

    cache: KeyValueCache
    positions: Tensor
    mask: Tensor | None
    start: int
    stop: int

    def layer(self, number: int) -> "CachedLayer":
        """Return what the queries of a layer attend to."""
        return CachedLayer(self, number)

    def last_of(self, x: Tensor) -> Tensor:
        """Return the last new position of each row of `x` [rows, T, ...], as [rows, 1, ...]."""
        return x[:, -1:]


@dataclass(frozen=True, eq=False)
class CachedLayer:
    """An attention scope: the cached positions of a layer, and the new ones up to the query's own."""

    extension: CacheExtension
    number: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions = PLAIN) -> Tensor:
        """Store the new keys and values, and return the attention output, all [rows, heads, T, head_dim]."""
        keys, values = self.stored(key, value)
        if not self.extension.start:  # they are the same, without gaps between the rows
            keys, values = key, value
        return self.attend_to(query, keys, values, options)

    def attend_to(self, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions) -> Tensor:
        """Return the attention output, given the keys and values of all positions up to the last new one."""
        if options.changes_scores or options.hides_cached(self.extension.stop):
            positions = torch.arange(self.extension.stop, device=query.device)
            mask = cached_mask(self.extension.positions, positions, options)[:, None]
            return masked_attention(query, keys, values, mask, options)
        if not self.extension.start:
            return attention(query, keys, values, None, scale=options.scale)
        mask = self.extension.mask
        if query.shape[2] > 1:
            return attention(query, keys, values, mask, causal=False, scale=options.scale)
        # The query heads of one key head become queries of it: repeated keys would copy the whole cache for each token.
        grouped = query.view(len(query), keys.shape[1], -1, query.shape[3])
        return attention(grouped, keys, values, mask, causal=False, scale=options.scale).view(*query.shape[:3], -1)

    def stored(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Store what is new, [rows, heads, T, width] each, and return all of it up to the last new position."""
        start, stop = self.extension.start, self.extension.stop
        memory = self.extension.cache.memory(self.number, *new)
        for whole, each in zip(memory, new, strict=True):
            whole[:, :, start:stop] = each
        return tuple(each[:, :, :stop] for each in memory)
