"""Keys and values of many sequences in pages of one memory, and attention over them.

A forward has one row of new tokens: those of all sequences, side by side. Each token attends to the pages of its own
sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trimaran.nets.varlen_attention import AttentionOptions, attention, cached_mask, masked_attention

MAX_KERNEL_HEAD_DIM = 256


class HostLengthsNeededError(Exception):
    """Pages are attended to without our kernel, which needs lengths on the host; a step of a CUDA graph has none."""

    def __init__(self) -> None:
        super().__init__("the attention of this model has no kernel for pages")


class PagedCache:
    """What every layer keeps of each token, in pages of `page_size` tokens: [pages, page_size, heads, head_dim].

    These are keys and values, or the vectors that they are made from (see `LatentHeads`). A layer's memory is allocated
    when it is first written, in the dtype and with the heads that it then has, so that the cache of a pipeline stage or
    of a slice of the heads needs no other settings. There is one page more than `num_pages`, which no sequence has:
    `unused_page`. Tokens that only pad a batch to a fixed size are written there.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self._layers: dict[int, tuple[Tensor, ...]] = {}

    @property
    def unused_page(self) -> int:
        return self.num_pages

    @property
    def page_bytes(self) -> int:
        """The bytes of one page in all layers that were written so far."""
        return sum(each[0].numel() * each.element_size() for kept in self._layers.values() for each in kept)

    def memory(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Return the memory of what a layer keeps, such as keys and values like these [1, heads, N, head_dim]."""
        if layer not in self._layers:
            # Zeros: attention multiplies what a mask excludes by zero, and uninitialised memory may hold NaN.
            shape = (self.num_pages + 1, self.page_size)
            self._layers[layer] = tuple(each.new_zeros(*shape, each.shape[1], each.shape[3]) for each in new)
        return self._layers[layer]


@dataclass(frozen=True, eq=False, kw_only=True)
class PagedExtension:
    """The positions that one forward appends to the pages of S sequences; all its N tokens are one row.

    Tensors i64 on the device: `positions` [1, N]; `slots` [N], where the new keys go; `page_tables` [S, pages];
    `context_lengths` [S], with the new tokens; `query_starts` [S + 1]; `kept` [K], the tokens whose output is wanted,
    None for all; `new_pages`, those that get their first token, None if none does. On the host: the new tokens
    `query_lengths` and all tokens `key_lengths` of each sequence, and `num_decodes`, how many sequences have one new
    token; they are the first ones.
    """

    cache: PagedCache
    positions: Tensor
    slots: Tensor
    page_tables: Tensor
    context_lengths: Tensor
    query_starts: Tensor
    kept: Tensor | None
    query_lengths: Sequence[int]
    key_lengths: Sequence[int]
    num_decodes: int
    new_pages: Tensor | None = None
    shared: dict[object, Tensor] = field(default_factory=dict)  # what all layers use, computed by the first of them

    def layer(self, number: int) -> "PagedLayer":
        """Return what the queries of a layer attend to."""
        return PagedLayer(self, number)

    def last_of(self, x: Tensor) -> Tensor:
        """Return the wanted positions of `x` [1, N, ...], as [1, K, ...]."""
        return x if self.kept is None else x.index_select(1, self.kept)


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """An attention scope: the pages of each token's own sequence, up to the token itself."""

    extension: PagedExtension
    number: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """Store the new keys and values, and return the attention output, all [1, heads, N, head_dim]."""
        if has_paged_kernel(query, value) and options.chunk is None:
            from trimaran.nets.kernels.paged_attention import store_and_attend  # noqa: PLC0415 - only a GPU has Triton

            keys, values = self.extension.cache.memory(self.number, key, value)
            return store_and_attend(query, key, value, (keys, values), self.extension, options)
        keys, values = self.stored(key, value)
        return attend_gathered_pages(query, key, value, (keys, values), self.extension, options)

    def stored(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Store what is new, [1, heads, N, width] each, with torch's operators, and return the memory of each."""
        memory = self.extension.cache.memory(self.number, *new)
        for pages, each in zip(memory, new, strict=True):
            # What a page holds from an earlier sequence is masked, but NaN times zero is NaN.
            if self.extension.new_pages is not None:
                pages.index_fill_(0, self.extension.new_pages, 0)
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self.extension.slots, each[0].transpose(0, 1))
        return memory


def has_paged_kernel(query: Tensor, value: Tensor) -> bool:
    """Return whether our kernel attends to pages for heads like these, [1, heads, N, head_dim]."""
    return query.is_cuda and not torch.version.hip and query.shape[-1] == value.shape[-1] <= MAX_KERNEL_HEAD_DIM


def attend_gathered_pages(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: tuple[Tensor, Tensor],
    extension: PagedExtension,
    options: AttentionOptions,
) -> Tensor:
    """Return the attention output [1, heads, N, head_dim], with torch's operators on any device.

    Sequences with one new token are one batch over a copy of their pages, padded to the longest; each other sequence is
    a call of its own, without a copy if all its keys are new.
    """
    if not extension.key_lengths:
        raise HostLengthsNeededError
    decodes, parts = extension.num_decodes, []
    if decodes:
        gathered = [pages_of_decodes(each, extension) for each in memory]
        parts.append(attend_decodes(query[:, :, :decodes], gathered[0], gathered[1], extension, options))
    start = decodes
    for number in range(decodes, len(extension.query_lengths)):
        stop = start + extension.query_lengths[number]
        new = [each[:, :, start:stop] for each in (query, key, value)]
        if extension.key_lengths[number] != stop - start:
            new[1:] = (pages_of_one(number, each, extension) for each in memory)
        parts.append(attend_causally(new[0], new[1], new[2], options))
        start = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def pages_of_decodes(pages: Tensor, extension: PagedExtension) -> Tensor:
    """Return a copy of the pages of all decodes, padded to the longest of them, [S, heads, keys, width]."""
    gathered = pages.index_select(0, _decode_index(extension))
    return gathered.view(extension.num_decodes, -1, *pages.shape[2:]).transpose(1, 2)


def attend_decodes(
    query: Tensor, key: Tensor, value: Tensor, extension: PagedExtension, options: AttentionOptions
) -> Tensor:
    """Return the output of the sequences with one new token, [1, heads, S, width], given `pages_of_decodes`."""
    sequences, heads = key.shape[:2]
    # Which of the gathered keys each decode attends to, [S, 1, 1, keys].
    kind = ("decode_mask", options.window, options.chunk)
    if kind not in extension.shared:
        decodes = extension.num_decodes
        count = len(_decode_index(extension)) // decodes * extension.cache.page_size
        lengths = extension.context_lengths[:decodes, None]
        keys = torch.arange(count, device=lengths.device)
        extension.shared[kind] = cached_mask(lengths - 1, keys, options)[:, None]
    mask = extension.shared[kind]
    # The query heads of one key head become queries of it, so that keys are not repeated.
    grouped = query[0].transpose(0, 1).reshape(sequences, heads, -1, query.shape[3])
    sinks = None if options.sinks is None else options.sinks.view(heads, -1)
    out = masked_attention(grouped, key, value, mask, options, sinks)
    return out.reshape(sequences, query.shape[1], -1).transpose(0, 1)[None]


def _decode_index(extension: PagedExtension) -> Tensor:
    """Return the pages of all decodes, one sequence after another, each with as many pages as the longest one."""
    if "decode_index" not in extension.shared:
        longest = max(extension.key_lengths[: extension.num_decodes])
        num_pages = -(-longest // extension.cache.page_size)
        tables = extension.page_tables[: extension.num_decodes, :num_pages]
        extension.shared["decode_index"] = tables.reshape(-1)
    return extension.shared["decode_index"]


def pages_of_one(number: int, pages: Tensor, extension: PagedExtension) -> Tensor:
    """Return a copy of what one sequence has in the pages, [1, heads, length, width]."""
    length = extension.key_lengths[number]
    own = extension.page_tables[number, : -(-length // extension.cache.page_size)]
    return pages.index_select(0, own).flatten(0, 1)[:length].transpose(0, 1)[None]


def attend_causally(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Return the output of the last positions of one sequence, [1, heads, T, head_dim], given all its keys."""
    new, length = query.shape[2], key.shape[2]
    if new == length and not options.hides_cached(length) and not options.changes_scores:
        return attention(query, key, value, None, scale=options.scale)
    positions = torch.arange(length, device=query.device)
    mask = cached_mask(positions[length - new :], positions, options)
    return masked_attention(query, key, value, mask[None, None], options)
