"""Finds out what a Hugging Face model does, by calls with a few tokens: its head, attention, masks, cache and pages."""

import logging
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.nets.decoder.attention_context import document_positions
from trimaran.nets.decoder.key_value_cache import KeyValueCache
from trimaran.nets.hf.hf_attention import (
    ISOLATING_LAYERS,
    SCOPE_ARGUMENT,
    attention_difference,
    first_line,
    first_true,
    is_noncausal,
    takes_scope,
    transformers,
    unsupported_option,
    use_our_attention,
)
from trimaran.nets.hf.hf_stages import meta_copy
from trimaran.nets.network import Network
from trimaran.nets.paged_cache import PagedCache, PagedExtension, PagedLayer
from trimaran.nets.varlen_attention import AttentionOptions

PROBE_ATTENTION = "trimaran_probe"
OWN_MASK = "masks of its own"
TOKENS_SHAPE = (2, 8)
log = logging.getLogger(__name__)
LAYER_MASKS_ATTRIBUTE = "trimaran_layer_masks"  # the attribute of a model that needs the masks of `layer_masks`
NUM_TOKENS = 8
PROBE_TOKENS = 6
CACHE_TOLERANCE = 1e-3  # of the largest logit: a cache that is wrong is wrong by far more
PAGE_SIZE = 4
# Of the largest logit, in fp32 and in half precision: attention that is wrong is wrong by far more.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.06
PAGED_ATTRIBUTE = "trimaran_pages"  # the attribute of a model that was found to attend to pages


@dataclass(slots=True)
class ProbeResult:
    """`ends_in_head`: the logits are the head's output, without further processing.

    `attention_difference`: why our attention cannot replace the model's; empty if it can. `unsupported_option`: what
    the model attends with in training and our attention does not support; empty if there is no such option.
    """

    ends_in_head: bool = False
    attention_difference: str = ""
    unsupported_option: str = ""
    is_noncausal: bool = False


def probe(module: Any) -> ProbeResult:
    """Return what a meta-device copy of the model does with a few tokens. `module` does not change.

    A model that does not run on the meta device keeps its own attention and head; the log says why.
    """
    found, scope, (batch, length) = ProbeResult(), object(), TOKENS_SHAPE
    head_output = torch.empty(1 + batch * length, device="meta")  # as a head that computes the loss returns it
    head_calls, attends = [], []

    def head(input: Tensor) -> Tensor:
        head_calls.append(1)
        return head_output

    def attend(
        part: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        attends.append(1)
        found.is_noncausal = found.is_noncausal or is_noncausal(part, options)
        own_mask = OWN_MASK if attention_mask is not None else ""
        found.unsupported_option = found.unsupported_option or unsupported_option(options) or own_mask
        reasons = {
            "does not pass extra arguments on to its attention": options.get(SCOPE_ARGUMENT) is not scope,
            "builds its own attention masks": attention_mask is not None,
            "has non-causal attention": is_noncausal(part, options),
            "has values of another head size than keys": value.shape[-1] != query.shape[-1],
            f"attends with {unsupported_option(options)}": bool(unsupported_option(options)),
        }
        found.attention_difference = found.attention_difference or first_true(reasons)
        return value.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]), None

    try:
        copy = meta_copy(module, torch.bfloat16).train()  # some kernels for experts support nothing else
        if isinstance(last := copy.get_output_embeddings(), nn.Linear):
            last.forward = head
        arguments: dict[str, Any] = {SCOPE_ARGUMENT: scope}
        if getattr(copy, "_supports_attention_backend", False):
            transformers.AttentionInterface.register(PROBE_ATTENTION, attend)
            copy.set_attn_implementation(PROBE_ATTENTION)
        else:  # with a mask given the model does not build one, which would read values
            arguments = {"attention_mask": torch.ones(batch, 1, length, length, dtype=torch.bool, device="meta")}
        tokens = torch.zeros(TOKENS_SHAPE, dtype=torch.long, device="meta")
        with torch.no_grad():
            logits = copy(input_ids=tokens, position_ids=tokens, use_cache=False, **arguments).logits
    except Exception as error:  # any error of the model's own code
        log.info("%s does not run on the meta device: %s: %s", type(module).__name__, type(error).__name__, error)
        return ProbeResult(attention_difference="does not run on the meta device")
    found.ends_in_head = logits is head_output and len(head_calls) == 1
    own = "" if attends else "has its own attention implementation"
    found.attention_difference = attention_difference(module) or found.attention_difference or own
    return found


def choose_document_masks(module: Any) -> bool:
    """Return whether masks keep documents apart in a model with windows; it gets `layer_masks` if its own do not."""
    documents = torch.arange(NUM_TOKENS)[None] // (NUM_TOKENS // 2)
    positions = document_positions(documents)
    if _isolate(_given_masks(module, {"position_ids": positions})):
        return True
    masks = layer_masks(module, positions)
    isolates = _isolate(_given_masks(module, {"position_ids": positions, "attention_mask": masks}))
    if isolates:
        setattr(module, LAYER_MASKS_ATTRIBUTE, True)
    return isolates


def layer_masks(module: Any, positions: Tensor) -> Any:
    """Return masks by kind of layer that keep documents apart; `positions` [B, T] restart with each document."""
    device = positions.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    shape_only = torch.empty(*positions.shape, 0, dtype=dtype, device=positions.device)
    return transformers.masking_utils.create_masks_for_generate(
        config=module.config.get_text_config(),
        inputs_embeds=shape_only,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )


def _isolate(masks: list[Tensor | None]) -> bool:
    """Return whether no mask lets a token of the second document attend to the first."""
    half = NUM_TOKENS // 2
    return all(
        mask is not None and not (mask if mask.dtype == torch.bool else mask == 0)[..., half:, :half].any()
        for mask in masks
    )


def _given_masks(module: Any, arguments: Mapping[str, Any]) -> list[Tensor | None]:
    """Return the mask that each layer gets in a call; an empty list if the model does not run without its layers."""
    on_meta = {id(each): torch.empty_like(each, device="meta") for each in module.parameters()}
    copy = deepcopy(module, {key: nn.Parameter(each, requires_grad=False) for key, each in on_meta.items()})
    masks: list[Tensor | None] = []

    def record(stream: Tensor, *args: Any, **options: Any) -> Tensor:
        given = [each for each in (*args, *options.values()) if isinstance(each, Tensor)]
        masks.append(next((each for each in given if each.ndim == 4 and each.shape[-2:] == (NUM_TOKENS,) * 2), None))
        return stream

    lists = [each for each in copy.modules() if isinstance(each, nn.ModuleList)]
    for layer in max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()), default=()):
        layer.forward = record
    embedding = copy.get_input_embeddings()
    embedding.forward = lambda tokens: torch.zeros(*tokens.shape, embedding.embedding_dim)
    with torch.no_grad(), suppress(Exception):  # what follows the layers has no values; the masks are known by then
        copy(input_ids=torch.zeros(1, NUM_TOKENS, dtype=torch.long), use_cache=False, **arguments)
    return masks


class HfCache(KeyValueCache):
    """transformers' cache for the rows of a batch: all positions, those of a window, or states of recurrent layers."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self._module = module
        self._cache: Any = transformers.DynamicCache(config=module.config)

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on; all of them if the cache cannot go back."""
        if length < self.length:
            self._cache, length = transformers.DynamicCache(config=self._module.config), 0
        super().truncate(length)

    def arguments(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments with which the model appends `tokens` [rows, T] to this cache."""
        start, self.length = self.length, self.length + tokens.shape[1]
        positions = torch.arange(start, self.length, device=tokens.device).expand(len(tokens), -1)
        return {"position_ids": positions, "past_key_values": self._cache, "use_cache": True}


@torch.no_grad()
def cache_difference(module: Any, device: torch.device) -> str:
    """Return why the model's own cache cannot be used; empty if a few tokens give the same logits with and without it.

    Architectures differ in what they take and keep, and a cache that is ignored gives wrong tokens without an error.
    """
    vocabulary = module.get_input_embeddings().num_embeddings
    tokens = (torch.arange(1, PROBE_TOKENS + 1, device=device) % vocabulary)[None]
    try:
        whole = module(input_ids=tokens, use_cache=False).logits[:, -1]
        cache, last = HfCache(module), whole
        for part in tokens.split([PROBE_TOKENS - 2, 1, 1], dim=1):
            last = module(input_ids=part, **cache.arguments(part)).logits[:, -1]
    except Exception as error:  # any error of the model's own code
        log.info("%s runs without a cache: %s: %s", type(module).__name__, type(error).__name__, error)
        return f"{type(error).__name__}: {error}"
    difference = (whole - last).abs().max() / whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
    if difference < CACHE_TOLERANCE:
        return ""
    log.info("%s runs without a cache: its logits would differ by %.1e", type(module).__name__, difference)
    return f"its logits differ by {difference:.1e}"


@torch.no_grad()
def paged_difference(network: Network, device: torch.device) -> str:
    """Return why the model's logits over pages would differ; empty if not, and from now on it attends to pages."""
    module: Any = network.module
    if getattr(module, PAGED_ATTRIBUTE, False):
        return ""
    # Parts and settings with which sequences in one row are not computed as they are alone.
    config = module.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ()
    found = [getattr(part, "rope_type", "") for part in module.modules()]
    rope_kinds = [kind for each in found for kind in (each.values() if isinstance(each, Mapping) else [each])]
    own_code = "has its own attention implementation"
    reasons = {
        "takes no position_ids": "position_ids" not in signature(module.forward).parameters,
        "also mixes tokens with a convolution": any(isinstance(part, nn.Conv1d) for part in module.modules()),
        "has layers without attention scores": not ISOLATING_LAYERS.issuperset(kinds),
        "attends in chunks": "chunked_attention" in kinds or bool(getattr(config, "attention_chunk_size", None)),
        "has rotary frequencies that depend on the longest sequence": any(
            isinstance(kind, str) and ("dynamic" in kind or kind == "longrope") for kind in rope_kinds
        ),
        own_code: not getattr(module, "_supports_attention_backend", False),
    }
    if reason := first_true(reasons):
        return reason
    before = module.config._attn_implementation
    numbers = torch.arange(1, 2 * PROBE_TOKENS, device=device)
    tokens = [numbers[:PROBE_TOKENS] % network.vocabulary, numbers[PROBE_TOKENS:] * 3 % network.vocabulary]
    try:
        whole = [module(input_ids=each[None], use_cache=False).logits[0, -1].float() for each in tokens]
        reason = "" if takes_scope(module) or use_our_attention(module) else own_code
        if not reason:
            reason = _difference_of_logits(network, tokens, torch.stack(whole))
    except Exception as error:  # any error of the model's own code
        reason = first_line(error)
    if not reason:
        setattr(module, PAGED_ATTRIBUTE, True)
    elif not takes_scope(module):
        module.set_attn_implementation(before)
    return reason


def _difference_of_logits(network: Network, tokens: list[Tensor], whole: Tensor) -> str:
    """Return how the logits over pages differ from those of the model's own attention; empty if they do not."""
    cache, last, windows = PagedCache(4, PAGE_SIZE), whole, {}
    lengths = [len(each) for each in tokens]
    for start, stop in ((0, -2), (-2, -1), (-1, None)):
        parts = [each[start:stop] for each in tokens]
        keys = [length + (stop or 0) for length in lengths]
        new, device = [len(each) for each in parts], tokens[0].device
        positions = [torch.arange(stop - count, stop, device=device) for count, stop in zip(new, keys, strict=True)]
        ends = torch.tensor([0, *new], device=device).cumsum(0)
        extension = _ProbeExtension(
            cache=cache,
            positions=torch.cat(positions)[None],
            slots=torch.cat([each + number * 2 * PAGE_SIZE for number, each in enumerate(positions)]),
            page_tables=torch.arange(4, device=device).view(2, 2),
            context_lengths=torch.tensor(keys, device=device),
            query_starts=ends,
            kept=ends[1:] - 1,
            query_lengths=new,
            key_lengths=keys,
            num_decodes=sum(count == 1 for count in new),
        )
        inputs = {"tokens": torch.cat(parts)[None]}
        if getattr(network.spec, "sections", ()):  # time, row and column
            inputs["positions"] = extension.positions.expand(3, -1, -1)
        last = network.extend_pages(extension, inputs)[0].float()
        windows = extension.windows
    difference = (whole - last).abs().max() / whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
    # Rounding alone makes half precision differ by more.
    is_half = any(each.dtype != torch.float32 for each in network.module.parameters())
    is_half = is_half or torch.is_autocast_enabled(tokens[0].device.type)
    if not difference < (HALF_TOLERANCE if is_half else TOLERANCE):
        return f"computes other logits over pages, by {difference:.1e}"
    # The window of each layer by the config, None for all keys. The few tokens of the probe are inside it.
    config: Any = network.module.config.get_text_config()  # pyrefly: ignore
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    window = window if kinds or getattr(config, "use_sliding_window", True) else None
    if any(
        each != (window if not kinds or kinds[layer] == "sliding_attention" else None)
        for layer, each in windows.items()
    ):
        return "does not tell its attention about its windows"
    return ""


@dataclass(frozen=True, eq=False, kw_only=True)
class _ProbeExtension(PagedExtension):
    windows: dict[int, int | None] = field(default_factory=dict)

    def layer(self, number: int) -> PagedLayer:
        return _ProbeLayer(self, number)


class _ProbeLayer(PagedLayer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        assert isinstance(self.extension, _ProbeExtension)
        self.extension.windows[self.number] = options.window
        return PagedLayer.attend(self, query, key, value, options)
