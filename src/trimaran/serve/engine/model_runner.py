"""Runs a step's batch through a network, over a paged key-value cache."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.nets.adapters.adapter_bank import AdapterBank
from trimaran.nets.paged_cache import PagedCache, PagedExtension
from trimaran.serve.engine.chosen_tokens import ChosenTokens, PendingTokens
from trimaran.serve.engine.engine_batch import EMBEDDING, LAST, EngineBatch
from trimaran.serve.engine.token_choice import TokenChooser, choose_on_device, moved


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerTraits:
    """What the engine must know of a model.

    `has_grid`: positions are time, row and column; `image_token`: the id that stands for a part of an image;
    `reuses_prefixes`: pages may be shared by sequences that begin alike; `embeds`: it returns embeddings; `overlaps`:
    the next step is planned and launched while this one is computed. `adapters` are the names of the loaded adapters:
    the first has number 1.
    """

    has_grid: bool = False
    image_token: int | None = None
    reuses_prefixes: bool = True
    embeds: bool = True
    overlaps: bool = False
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepLogits:
    """What a step computed, on the runner's device.

    `logits` fp32 [K, vocabulary] belong to `EngineBatch.logit_rows`. `embeddings` fp32 [sequences that are embedded,
    hidden] are the sums of the last layer's outputs at their new tokens; None if there are none.
    """

    logits: Tensor
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
            inputs["tokens"] = self._chosen.filled_in(inputs["tokens"], batch)
            return StepLogits(self.network.extend_pages(extension, inputs)[0].float())

    def launch(self, batch: EngineBatch, choosers: Sequence[TokenChooser | None]) -> PendingTokens:
        """See `LaunchingRunner`."""
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


def output_head(network: Network) -> nn.Module | None:
    """Return the module whose input is the last layer's output; its own output may be processed further."""
    if network.head is not None or not hasattr(network.module, "get_output_embeddings"):
        return network.head
    return network.module.get_output_embeddings()  # pyrefly: ignore[not-callable]


def step_inputs(
    batch: EngineBatch, cache: PagedCache, device: torch.device, kept: np.ndarray
) -> tuple[PagedExtension, dict[str, Tensor]]:
    """Return a batch as the network takes it, on `device`. `kept` are the tokens whose output is wanted."""
    new_pages = batch.slots[batch.positions % cache.page_size == 0] // cache.page_size
    arrays = [batch.tokens, batch.positions, batch.slots, batch.page_tables, batch.context_lengths,
              batch.query_starts, kept, new_pages, *([] if batch.grid is None else [batch.grid])]  # fmt: skip
    tokens, positions, slots, tables, contexts, starts, kept_rows, new_rows, *grid = _moved_together(arrays, device)
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


def _moved_together(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """Return i64 arrays as tensors on `device`, with one copy for all of them."""
    if not DEVICE_TRAITS[device.type].has_own_memory:
        return [torch.from_numpy(each) for each in arrays]
    flat = moved(np.concatenate([each.reshape(-1) for each in arrays]), device)
    parts = flat.split([each.size for each in arrays])
    return [part.view(each.shape) for part, each in zip(parts, arrays, strict=True)]
