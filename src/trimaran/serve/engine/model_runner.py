"""Runs the batches of steps through a network: over pages, or one sequence after another."""

import logging
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.core import DEVICE_TRAITS, UserError
from trimaran.nets import AdapterBank, KeyValueCache, Network, PagedCache, PagedExtension, output_head
from trimaran.serve.engine.engine_batch import ALL, EMBEDDING, LAST, EngineBatch
from trimaran.serve.engine.token_choice import (
    ChosenTokens,
    PendingTokens,
    TokenChooser,
    choose_on_device,
    chosen_or_given,
    moved,
)

PAGE_SIZE = 16  # tokens
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTraits:
    """What the engine must know of a model."""

    has_grid: bool = False  # positions are time, row and column
    image_token: int | None = None  # the id that stands for a part of an image
    reuses_prefixes: bool = True  # pages may be shared by sequences that begin alike
    embeds: bool = True  # it returns embeddings
    overlaps: bool = False  # the next step is planned and launched while this one is computed
    adapters: tuple[str, ...] = ()  # names of the loaded ones; the first has number 1


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """What a step computed, on the runner's device, in fp32."""

    logits: Tensor  # [K, vocabulary], of `EngineBatch.logit_rows`
    # [sequences that are embedded, hidden]: sums of the last layer's outputs at their new tokens
    embeddings: Tensor | None = None


class Runner(Protocol):
    """Computes the steps of an engine, on one process or several. `max_length` are the model's positions."""

    num_pages: int
    page_size: int
    vocabulary: int
    max_length: int

    @property
    def traits(self) -> RunnerTraits:
        """What the engine must know of the model now; the loaded adapters may change."""
        ...

    def run(self, batch: EngineBatch) -> StepLogits:
        """Return the logits that the batch asks for, and keep its keys and values in their pages."""
        ...


@runtime_checkable
class LaunchingRunner(Runner, Protocol):
    """A runner that chooses tokens itself, on its device, so that nobody waits for them before the next step."""

    def launch(self, batch: EngineBatch, choosers: Sequence[TokenChooser | None]) -> PendingTokens:
        """Start a step, and return where the tokens will be that its sequences choose; None chooses none.

        Sequences want the last logits or nothing. The batch may name tokens that the step before has chosen. The
        tokens of the step before the last must have been read.
        """
        ...


class ModelRunner:
    """Runs a network on this process. `dtype` is the one that matmuls compute in."""

    def __init__(
        self,
        network: Network,
        device: torch.device,
        dtype: torch.dtype,
        cache: PagedCache,
        traits: RunnerTraits,
        bank: AdapterBank | None = None,
    ) -> None:
        """`bank` has the adapters that sequences may use."""
        self.network, self.device, self.dtype, self.cache = network, device, dtype, cache
        self._traits, self._bank = traits, bank
        self.num_pages, self.page_size = cache.num_pages, cache.page_size
        self.vocabulary, self.max_length = network.vocabulary, network.max_seq_len
        self._chosen = ChosenTokens(device)
        network.module.eval()

    @property
    def traits(self) -> RunnerTraits:
        return self._traits if self._bank is None else replace(self._traits, adapters=tuple(self._bank.names))

    def run(self, batch: EngineBatch) -> StepLogits:
        """See `Runner`. A step for which `batch.is_decode` holds may be the replay of a CUDA graph instead."""
        with torch.inference_mode(), self.autocast():
            rows, embedded = batch.logit_rows(), batch.embedding_rows()
            if self._bank is not None:
                self._bank.use(batch.adapters, batch.query_lengths, rows, self.device)
            if len(embedded):
                return self._run_with_embeddings(batch, rows, embedded)
            extension, inputs = step_inputs(batch, self.cache, self.device, rows)
            if batch.tokens.min() < 0:  # tokens that the last step has chosen
                inputs["tokens"] = chosen_or_given(inputs["tokens"], self._chosen.tokens)
            return StepLogits(self.network.extend_pages(extension, inputs)[0].float())

    def launch(self, batch: EngineBatch, choosers: Sequence[TokenChooser | None]) -> PendingTokens:
        logits = self.run(batch).logits
        with torch.inference_mode():
            self._choose(logits, batch, choosers)
            return self._chosen.to_host(batch.num_sequences)

    def _choose(self, logits: Tensor, batch: EngineBatch, choosers: Sequence[TokenChooser | None]) -> None:
        """Choose a token for each sequence that wants one, given its logits; the others have no row."""
        found = choose_on_device(logits, [each for each in choosers if each], excluded=self.traits.image_token)
        self._chosen.put(found, np.flatnonzero(batch.wants == LAST), batch.num_sequences)

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, dtype=self.dtype)

    def _run_with_embeddings(self, batch: EngineBatch, rows: np.ndarray, embedded: np.ndarray) -> StepLogits:
        """Return logits and embeddings: what the head takes, which is the output of the last norm."""
        kept = np.union1d(rows, embedded)
        extension, inputs = step_inputs(batch, self.cache, self.device, kept)
        head = output_head(self.network)
        assert head is not None, "the engine refuses embeddings of a model without a head"
        places = [torch.from_numpy(np.searchsorted(kept, each)).to(self.device) for each in (rows, embedded)]
        found: list[Tensor] = []

        def without_embedded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            found.append(args[0][0, places[1]].float())
            return args[0][:, places[0]], *args[1:]

        hook = head.register_forward_pre_hook(without_embedded)
        try:
            logits = self.network.extend_pages(extension, inputs)[0].float()
        finally:
            hook.remove()
        parts = found[0].split(batch.query_lengths[batch.wants == EMBEDDING].tolist())
        return StepLogits(logits, torch.stack([each.sum(0) for each in parts]))


def step_inputs(
    batch: EngineBatch, cache: PagedCache, device: torch.device, kept: np.ndarray
) -> tuple[PagedExtension, dict[str, Tensor]]:
    """Return a batch as the network takes it, on `device`. `kept` are the tokens whose output is wanted."""
    new_pages = batch.slots[batch.positions % cache.page_size == 0] // cache.page_size
    arrays = [batch.tokens, batch.positions, batch.slots, batch.page_tables, batch.context_lengths,
              batch.query_starts, kept, new_pages, *([] if batch.grid is None else [batch.grid])]  # fmt: skip
    if DEVICE_TRAITS[device.type].has_own_memory:  # one copy for all of them
        flat = moved(np.concatenate([each.reshape(-1) for each in arrays]), device)
        parts = flat.split([each.size for each in arrays])
        tensors = [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]
    else:
        tensors = [torch.from_numpy(each) for each in arrays]
    tokens, positions, slots, tables, contexts, starts, kept_rows, new_rows, *grid = tensors
    keeps_all = len(kept) == batch.num_tokens
    extension = PagedExtension(
        cache=cache,
        positions=positions[None],
        slots=slots,
        page_tables=tables,
        context_lengths=contexts,
        query_starts=starts,
        kept=None if keeps_all else kept_rows,
        query_lengths=batch.query_lengths.tolist(),
        key_lengths=batch.context_lengths.tolist(),
        num_decodes=batch.num_decodes,
        new_pages=new_rows if len(new_pages) else None,
    )
    inputs = {"tokens": tokens[None]}
    if grid:
        inputs["positions"] = grid[0][:, None]
    if batch.images is not None:
        inputs["patches"] = torch.from_numpy(batch.images.patches).to(device)
        inputs["grids"] = torch.from_numpy(batch.images.grids).to(device)
    return extension, inputs


@dataclass(slots=True, eq=False)
class _CachedSequence:
    """The tokens of one sequence. Those from `num_cached` on are not in its cache yet."""

    cache: KeyValueCache | None
    num_cached: int = 0
    tokens: list[int] = field(default_factory=list)


class SequenceRunner:
    """A runner for networks with recurrent layers or an attention of their own. Nothing is batched.

    Pages only limit how many tokens are in the caches: the caches themselves are those of the network. Without a usable
    one the whole sequence is computed for each token.
    """

    def __init__(
        self, network: Network, device: torch.device, dtype: torch.dtype, *, num_pages: int, page_size: int
    ) -> None:
        self.network, self.device, self.dtype = network, device, dtype
        self.num_pages, self.page_size = num_pages, page_size
        self.vocabulary, self.max_length = network.vocabulary, network.max_seq_len
        self.traits = RunnerTraits(reuses_prefixes=False, embeds=False)
        network.module.eval()
        self._has_cache = network.has_cache(device)
        config = getattr(network.module, "config", None)
        rope = {} if config is None else getattr(config.get_text_config(), "rope_parameters", None) or {}
        is_long = rope.get("rope_type") == "longrope"  # positions of a longer sequence have other frequencies
        limit = rope["original_max_position_embeddings"] if is_long else sys.maxsize
        self._long_after = min(network.long_after, limit)
        self._sequences: dict[int, _CachedSequence] = {}

    def run(self, batch: EngineBatch) -> StepLogits:
        for number in batch.finished.tolist():
            self._sequences.pop(number, None)
        rows: list[Tensor] = []
        with torch.inference_mode(), torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for index, (number, want) in enumerate(zip(batch.sequences.tolist(), batch.wants.tolist(), strict=True)):
                new = batch.tokens[batch.query_starts[index] : batch.query_starts[index + 1]].tolist()
                if number not in self._sequences:
                    self._sequences[number] = _CachedSequence(self.network.new_cache() if self._has_cache else None)
                sequence = self._sequences[number]
                sequence.tokens += new
                if want == LAST and sequence.cache is not None:
                    if sequence.num_cached <= self._long_after < len(sequence.tokens):
                        # its keys were rotated by other angles
                        sequence.cache, sequence.num_cached = self.network.new_cache(), 0
                    tokens = torch.tensor(sequence.tokens[sequence.num_cached :], device=self.device)
                    sequence.num_cached = len(sequence.tokens)
                    rows.append(self.network.extend(sequence.cache, {"tokens": tokens[None]})[0])
                elif want in (LAST, ALL):  # of the whole sequence, without the cache
                    tokens = torch.tensor(sequence.tokens, device=self.device)
                    logits = self.network.forward({"tokens": tokens[None]})[0][0]
                    rows.append(logits[-1 if want == LAST else -len(new) :])
        empty = torch.empty(0, self.vocabulary, device=self.device)
        return StepLogits(torch.cat([empty, *(each.float() for each in rows)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The key-value cache: at most `max_bytes` of memory, and no more than `max_tokens` if that is not None."""

    max_bytes: int
    max_tokens: int | None = None
    page_size: int = PAGE_SIZE


def open_runner(
    network: Network, device: torch.device, dtype: torch.dtype, cache: CacheSettings, *, bank: AdapterBank | None = None
) -> Runner:
    """Return the runner of a network with weights. The log says if its sequences are not batched, and why."""
    network.module.eval()
    traits = traits_of(network)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        difference = network.paged_difference(device)
    if difference:
        name = type(network.module).__name__
        log.warning("%s %s: its sequences are computed one after another, not together", name, difference)
        if bank is not None:
            raise UserError("E009.several-adapters-need", where="adapters", name=name, difference=difference)
        num_tokens = cache.max_tokens if cache.max_tokens is not None else 1 << 20
        num_pages = -(-num_tokens // cache.page_size)
        return SequenceRunner(network, device, dtype, num_pages=num_pages, page_size=cache.page_size)
    page_bytes = bytes_of_page(network, device, dtype, cache.page_size)
    num_pages = cache.max_bytes // page_bytes
    if cache.max_tokens is not None:
        num_pages = min(num_pages, -(-cache.max_tokens // cache.page_size))
    if num_pages < 1:
        raise UserError("E010.key-value-cache", where="the cache", max_bytes=cache.max_bytes, page_bytes=page_bytes)
    traits = replace(traits, overlaps=DEVICE_TRAITS[device.type].runs_async)  # a CPU would wait for itself
    return ModelRunner(network, device, dtype, PagedCache(num_pages, cache.page_size), traits, bank)


def traits_of(network: Network) -> RunnerTraits:
    """Return what the engine must know of a network that attends to pages."""
    # The head must get the kept tokens only: transformers' models do it if they have this argument.
    parameters = signature(network.module.forward).parameters
    keeps = "tokens" in parameters or "logits_to_keep" in parameters
    traits = RunnerTraits(embeds=keeps and output_head(network) is not None)
    images = None if network.spec is None else network.spec.images()
    if images is None:
        return traits
    return replace(traits, has_grid=images.positions == "grid", image_token=images.image_token)


def bytes_of_page(network: Network, device: torch.device, dtype: torch.dtype, page_size: int) -> int:
    """Return the bytes of one page in all layers, found out by computing one token."""
    one = np.ones(1, dtype=np.int64)
    zeros = np.zeros(1, dtype=np.int64)
    traits, cache = traits_of(network), PagedCache(1, page_size)
    batch = EngineBatch(
        tokens=zeros, positions=zeros, query_starts=np.array([0, 1]), context_lengths=one, page_tables=zeros[None],
        slots=zeros, wants=one * LAST, adapters=zeros, sequences=zeros, finished=zeros[:0],
        grid=np.zeros((3, 1), dtype=np.int64) if traits.has_grid else None,
    )  # fmt: skip
    ModelRunner(network, device, dtype, cache, traits).run(batch)
    return cache.page_bytes
