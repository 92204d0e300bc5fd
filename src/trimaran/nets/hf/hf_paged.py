"""Whether a Hugging Face model can attend to pages: found out by running it both ways on a few tokens."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.nets.attention_options import AttentionOptions
from trimaran.nets.hf.hf_attention import ISOLATING_LAYERS, takes_scope, use_paged_attention
from trimaran.nets.network import Network
from trimaran.nets.paged_cache import PagedCache, PagedExtension, PagedLayer

PROBE_TOKENS = 6
PAGE_SIZE = 4
# Of the largest logit, in fp32 and in half precision: attention that is wrong is wrong by far more.
TOLERANCE, HALF_TOLERANCE = 1e-3, 0.06
PAGED_ATTRIBUTE = "trimaran_pages"  # the attribute of a model that was found to attend to pages

log = logging.getLogger(__name__)


@torch.no_grad()
def paged_difference(network: Network, device: torch.device) -> str:
    """Return why a Hugging Face model cannot attend to pages; empty if it can, and from now on it does.

    Its logits of two sequences in one row must be those that its own attention computes for each of them. A model that
    cannot do it stays as it was.
    """
    module: Any = network.module
    if getattr(module, PAGED_ATTRIBUTE, False):
        return ""
    if reason := _difference_of_parts(module):
        return reason
    before = module.config._attn_implementation
    tokens = _probe_tokens(network.vocabulary, device)
    try:
        whole = [module(input_ids=each[None], use_cache=False).logits[0, -1].float() for each in tokens]
        reason = "" if takes_scope(module) or use_paged_attention(module) else "has its own attention implementation"
        if not reason:
            reason = _difference_of_logits(network, tokens, torch.stack(whole))
    except Exception as error:  # any error of the model's own code
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if not reason:
        setattr(module, PAGED_ATTRIBUTE, True)
    elif not takes_scope(module):
        module.set_attn_implementation(before)
    return reason


def _difference_of_parts(module: Any) -> str:
    """Return why sequences in one row would not be computed as they are alone, from the model's parts and config."""
    kinds = getattr(module.config.get_text_config(), "layer_types", None) or ()
    own_code = "has its own attention implementation"
    reasons = {
        "takes no position_ids": "position_ids" not in signature(module.forward).parameters,
        "also mixes tokens with a convolution": any(isinstance(part, nn.Conv1d) for part in module.modules()),
        "has layers without attention scores": not ISOLATING_LAYERS.issuperset(kinds),
        "attends in chunks": "chunked_attention" in kinds or bool(_option(module, "attention_chunk_size")),
        "has rotary frequencies that depend on the longest sequence": any(_rope_kinds(module)),
        own_code: not getattr(module, "_supports_attention_backend", False),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _rope_kinds(module: nn.Module) -> Iterator[bool]:
    """Yield whether each rotary embedding computes its frequencies from the positions of the whole batch."""
    for part in module.modules():
        found = getattr(part, "rope_type", "")
        for kind in found.values() if isinstance(found, Mapping) else [found]:
            yield isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")


def _option(module: Any, name: str) -> Any:
    return getattr(module.config.get_text_config(), name, None)


def _probe_tokens(vocabulary: int, device: torch.device) -> list[Tensor]:
    numbers = torch.arange(1, 2 * PROBE_TOKENS, device=device)
    return [numbers[:PROBE_TOKENS] % vocabulary, numbers[PROBE_TOKENS:] * 3 % vocabulary]


def _difference_of_logits(network: Network, tokens: list[Tensor], whole: Tensor) -> str:
    """Return how the logits over pages differ from those of the model's own attention; empty if they do not.

    All but two tokens of each sequence come first, and then one after the other.
    """
    cache, last, windows = PagedCache(4, PAGE_SIZE), whole, {}
    lengths = [len(each) for each in tokens]
    for start, stop in ((0, -2), (-2, -1), (-1, None)):
        parts = [each[start:stop] for each in tokens]
        keys = [length + (stop or 0) for length in lengths]
        extension = _extension(cache, [len(each) for each in parts], keys, tokens[0].device)
        inputs = {"tokens": torch.cat(parts)[None]}
        if getattr(network.spec, "sections", ()):  # time, row and column
            inputs["positions"] = extension.positions.expand(3, -1, -1)
        last = network.extend_pages(extension, inputs)[0].float()
        windows = extension.windows
    difference = (whole - last).abs().max() / whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
    if not difference < _tolerance(network.module, tokens[0].device):
        return f"computes other logits over pages, by {difference:.1e}"
    if windows != _windows_of(network.module.config, windows):
        return "does not tell its attention about its windows"
    return ""


def _tolerance(module: nn.Module, device: torch.device) -> float:
    """Return how much logits may differ by rounding alone."""
    is_half = torch.is_autocast_enabled(device.type) or any(each.dtype != torch.float32 for each in module.parameters())
    return HALF_TOLERANCE if is_half else TOLERANCE


def _windows_of(config: Any, found: Mapping[int, int | None]) -> dict[int, int | None]:
    """Return the window of each layer by the config, None for all keys. The few tokens of the probe are inside it."""
    config = config.get_text_config()
    kinds, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    if not kinds:
        uses_window = getattr(config, "use_sliding_window", True)
        return dict.fromkeys(found, window if uses_window else None)
    return {layer: window if kinds[layer] == "sliding_attention" else None for layer in found}


@dataclass(frozen=True, eq=False, kw_only=True)
class _ProbeExtension(PagedExtension):
    """Records the window that each layer attends with."""

    windows: dict[int, int | None] = field(default_factory=dict)

    def layer(self, number: int) -> PagedLayer:
        return _ProbeLayer(self, number)


class _ProbeLayer(PagedLayer):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        assert isinstance(self.extension, _ProbeExtension)
        self.extension.windows[self.number] = options.window
        return PagedLayer.attend(self, query, key, value, options)


def _extension(cache: PagedCache, new: list[int], keys: list[int], device: torch.device) -> _ProbeExtension:
    """Return the extension of two sequences with two pages each."""
    positions = [torch.arange(length - count, length, device=device) for count, length in zip(new, keys, strict=True)]
    ends = torch.tensor([0, *new], device=device).cumsum(0)
    return _ProbeExtension(
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
