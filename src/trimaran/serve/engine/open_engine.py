"""Builds the engine of one process or of rank 0: weights, adapters, cache, and output guided by llguidance."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from trimaran.core import DEVICE_TRAITS, AdapterSection, UserError
from trimaran.data import ByteTokenizer, JsonTokenizer, Tokenizer
from trimaran.nets import AdapterBank, Network, attach_adapter, output_head
from trimaran.serve.engine.batching_engine import BatchingEngine
from trimaran.serve.engine.decode_graphs import GraphRunner
from trimaran.serve.engine.engine_request import EngineRequest, TokenConstraint
from trimaran.serve.engine.model_runner import CacheSettings, ModelRunner, Runner, open_runner
from trimaran.serve.serving_layers import quantise
from trimaran.serve.settings import EngineConfig, TrainedWeights
from trimaran.serve.trained_model import (
    FillAdapter,
    described_adapter,
    fill_from_peft,
    has_adapter,
    load_checkpoint,
    open_network,
    open_texts,
    refuse_other_base,
    saved_base,
    section_of,
)
from trimaran.train import first_device

LOG = logging.getLogger(__name__)
GPU_FRACTION = 0.9  # of the memory that is free when the weights are loaded
CPU_FRACTION, MAX_CPU_BYTES = 0.25, 8 << 30


def load_peft_folder(network: Network, bank: AdapterBank, name: str, folder: Path) -> None:
    """Add the adapter in a PEFT folder to the bank, under this name. One of the same name is replaced.

    After a replacement the engine must forget its prefixes: see `BatchingEngine.flush_prefixes`.
    """
    load_adapter(network, bank, name, described_adapter(network, folder), fill_from_peft(folder))


def load_adapter(network: Network, bank: AdapterBank, name: str, section: AdapterSection, fill: FillAdapter) -> None:
    """Add an adapter to the bank; `fill` gives it its values. A failure leaves network and bank as they were."""
    try:
        attach_adapter(network, section.model_copy(update={"base": "auto"}))
        fill(network, section)
        network.module.eval()
        bank.take(name)
    finally:
        bank.discard()


@dataclass(frozen=True, slots=True)
class OpenEngine:
    """An engine, and the function that loads other weights of the same model into it."""

    engine: BatchingEngine
    load: Callable[[TrainedWeights], None]
    close: Callable[[], None] = lambda: None


def open_engine(config: EngineConfig) -> OpenEngine:
    """Return the engine of a single process. Raises UserError if something does not fit."""
    device = first_device()
    cache_folder = None if config.cache is None else Path(config.cache)
    network, dtype = open_network(config.weights, device, config.dtype, cache=cache_folder)
    bank = None
    if config.adapters:
        refuse_other_bases(config)
        bank = AdapterBank(network, output_head(network))
        for name, path in adapter_folders(config).items():
            load_peft_folder(network, bank, name, path)
        network.module.requires_grad_(False)
    if config.quantise is not None:
        quantise(network, config.quantise, device)
    runner = open_runner(network, device, dtype, cache_settings(network, device, config), bank=bank)
    if type(runner) is ModelRunner and DEVICE_TRAITS[device.type].has_graphs and bank is None:
        runner = GraphRunner(network, device, dtype, runner.cache, runner.traits)
        runner.capture(config.sizes.max_running, config.sizes.max_step_tokens)  # before the first request

    @torch.no_grad()
    def load(weights: TrainedWeights) -> None:
        """Copy other weights of the same model into the network in place, so that captured graphs stay valid."""
        if weights.step is not None and not has_adapter(weights):
            load_checkpoint(network, weights.path)
            return
        loaded, _ = open_network(weights, torch.device("cpu"), config.dtype, cache=cache_folder)
        new = dict(loaded.module.named_parameters()) | dict(loaded.module.named_buffers())
        for name, each in [*network.module.named_parameters(), *network.module.named_buffers()]:
            if name in new:
                each.copy_(new[name])

    return OpenEngine(new_engine(runner, config), load)


def new_engine(runner: Runner, config: EngineConfig) -> BatchingEngine:
    maker = constraint_maker(open_texts(config.weights).tokenizer, runner.vocabulary)
    return BatchingEngine(runner, config.sizes, make_constraint=maker)


def cache_settings(network: Network, device: torch.device, config: EngineConfig) -> CacheSettings:
    """Return the size of the cache: what is asked for, or a part of the free; at most for all running sequences."""
    sizes = config.sizes
    most = sizes.max_running * network.max_seq_len
    if sizes.cache_bytes is not None:
        return CacheSettings(max_bytes=sizes.cache_bytes, max_tokens=most, page_size=sizes.page_size)
    if DEVICE_TRAITS[device.type].has_own_memory:
        free = int(torch.cuda.mem_get_info(device)[0] * GPU_FRACTION)
    else:
        free = min(int(psutil.virtual_memory().available * CPU_FRACTION), MAX_CPU_BYTES)
    return CacheSettings(max_bytes=free, max_tokens=most, page_size=sizes.page_size)


def adapter_folders(config: EngineConfig) -> dict[str, Path]:
    folders = {name: Path(folder) for name, folder in config.adapters.items()}
    for name, path in folders.items():
        if not (path / "adapter_config.json").is_file():
            raise UserError("U014.not-peft-folder-adapter", where=f"--adapter {name}", path=path)
    return folders


def refuse_other_bases(config: EngineConfig) -> None:
    base = section_of(config.weights)
    if base.path and config.weights.run is None:
        cache = None if config.cache is None else Path(config.cache)
        for path in adapter_folders(config).values():
            refuse_other_base(base, saved_base(path), seed=0, cache=cache)


NUM_BYTES = 256
# As json.dumps writes it, which is what models have seen. Free white space is a place where a small model never ends.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonConstraint:
    """The tokens that may follow in one answer. When the JSON is complete, only the end of the text may."""

    def __init__(self, matcher: Any, vocabulary: int, end_ids: frozenset[int]) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._end_ids = [each for each in end_ids if each < vocabulary]

    def allowed(self) -> np.ndarray:
        """See TokenConstraint. Every id that ends the text is allowed where the end is."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.zeros(self._vocabulary, dtype=bool)
        found = np.unpackbits(bits, bitorder="little")[: self._vocabulary]
        mask[: len(found)] = found.astype(bool)
        if self._matcher.is_accepting() or not mask.any():
            mask[self._end_ids] = True
        return mask

    def advance(self, token: int) -> None:
        if not self._matcher.is_stopped() and token not in self._end_ids:
            self._matcher.consume_token(token)


def constraint_maker(tokenizer: Tokenizer, vocabulary: int) -> Callable[[EngineRequest], TokenConstraint] | None:
    """Return a function that makes the constraint of a request with a grammar; None if llguidance is missing."""
    try:
        import llguidance  # noqa: PLC0415 - optional
    except ImportError:
        return None
    prepared: list[Any] = []  # made for the first request that needs it: it takes a second for large vocabularies

    def make(request: EngineRequest) -> TokenConstraint:
        if not prepared:
            if isinstance(tokenizer, JsonTokenizer):
                guided = llguidance.LLTokenizer(tokenizer.to_json(), tokenizer.vocab_size, tokenizer.end_id)
            else:
                assert isinstance(tokenizer, ByteTokenizer), "there is no other kind"
                guided = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_GuidedBytes()))
            prepared.append(guided)
        assert request.grammar is not None, "only requests with a grammar have a constraint"
        grammar = llguidance.LLMatcher.grammar_from_json_schema(request.grammar, overrides=JSON_STYLE)
        matcher = llguidance.LLMatcher(prepared[0], grammar, log_level=0)
        if matcher.is_error():
            raise UserError(
                "U011.schema-cannot-used", where="response_format.json_schema", get_error=matcher.get_error()
            )
        return JsonConstraint(matcher, vocabulary, request.stop_ids or frozenset([tokenizer.end_id]))

    return make


class _GuidedBytes:
    eos_token_id = ByteTokenizer.end_id
    bos_token_id = None
    tokens = (*(bytes([each]) for each in range(NUM_BYTES)), b"<end>")
    special_token_ids = (ByteTokenizer.end_id,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
