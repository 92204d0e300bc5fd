"""Chooses how a network is run: over pages, all sequences together, or one sequence after another."""

import logging
from dataclasses import dataclass, replace
from inspect import signature

import numpy as np
import torch

from trimaran.core import UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Network
from trimaran.nets.adapters.adapter_bank import AdapterBank
from trimaran.nets.paged_cache import PagedCache
from trimaran.serve.engine.engine_batch import LAST, EngineBatch
from trimaran.serve.engine.model_runner import ModelRunner, Runner, RunnerTraits, output_head
from trimaran.serve.engine.sequence_runner import SequenceRunner

PAGE_SIZE = 16  # tokens

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSettings:
    """The key-value cache: at most `max_bytes` of memory, and no more than `max_tokens` if that is not None."""

    max_bytes: int
    max_tokens: int | None = None
    page_size: int = PAGE_SIZE


def open_runner(
    network: Network,
    device: torch.device,
    dtype: torch.dtype,
    cache: CacheSettings,
    *,
    bank: AdapterBank | None = None,
) -> Runner:
    """Return the runner of a network with weights. The log says if its sequences are not batched, and why."""
    network.module.eval()
    traits = traits_of(network)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        difference = network.paged_difference(device)
    if difference:
        return _one_by_one(network, device, dtype, cache, difference, bank)
    page_bytes = bytes_of_page(network, device, dtype, cache.page_size)
    num_pages = cache.max_bytes // page_bytes
    if cache.max_tokens is not None:
        num_pages = min(num_pages, -(-cache.max_tokens // cache.page_size))
    if num_pages < 1:
        raise UserError("E010", f"a key-value cache of {cache.max_bytes} bytes has no room for a page of {page_bytes}",
                        where="the cache", fix="give the cache more memory")  # fmt: skip
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


def _one_by_one(
    network: Network,
    device: torch.device,
    dtype: torch.dtype,
    cache: CacheSettings,
    difference: str,
    bank: AdapterBank | None,
) -> SequenceRunner:
    name = type(network.module).__name__
    log.warning("%s %s: its sequences are computed one after another, not together", name, difference)
    if bank is not None:
        raise UserError("E009", f"several adapters need attention over pages, and {name} {difference}",
                        where="adapters", fix="serve one adapter alone, merged into its base")  # fmt: skip
    num_tokens = cache.max_tokens if cache.max_tokens is not None else 1 << 20
    return SequenceRunner(
        network, device, dtype, num_pages=-(-num_tokens // cache.page_size), page_size=cache.page_size
    )
