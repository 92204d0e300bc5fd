"""The key-value cache of a Hugging Face model that keeps its own attention, such as one with windows: transformers'."""

import logging
from typing import Any

import torch
from torch import Tensor

from trimaran.nets.decoder.key_value_cache import KeyValueCache

try:
    from transformers import DynamicCache
except ImportError:
    DynamicCache = None

PROBE_TOKENS = 6
TOLERANCE = 1e-3  # of the largest logit: a cache that is wrong is wrong by far more

log = logging.getLogger(__name__)


class HfCache(KeyValueCache):
    """transformers' cache for the rows of a batch, which all have the same length.

    It holds what the layers of the model need: all positions, those of a window, or the state of a recurrent layer.
    """

    def __init__(self, module: Any, rows: int) -> None:
        super().__init__(rows)
        self._module = module
        self._cache = self._new()

    def truncate(self, length: int) -> None:
        """Forget the positions from `length` on; all of them if the cache cannot go back."""
        if length < self.lengths[0]:
            self._cache, length = self._new(), 0
        super().truncate(length)

    def arguments(self, tokens: Tensor) -> dict[str, Any]:
        """Return the arguments with which the model appends `tokens` [rows, T] to this cache."""
        start = self.lengths[0]
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
        self.lengths = [start + tokens.shape[1]] * len(self.lengths)
        return {"position_ids": positions, "past_key_values": self._cache, "use_cache": True}

    def _new(self) -> Any:
        assert DynamicCache is not None, "there is no model without transformers"
        return DynamicCache(config=self._module.config)


@torch.no_grad()
def cache_difference(module: Any, device: torch.device) -> str:
    """Return why the model's own cache cannot be used; empty if a few tokens give the same logits with and without it.

    Architectures differ in what they take and keep, and a cache that is ignored gives wrong tokens without an error.
    """
    vocabulary = module.get_input_embeddings().num_embeddings
    tokens = (torch.arange(1, PROBE_TOKENS + 1, device=device) % vocabulary)[None]
    try:
        whole = module(input_ids=tokens, use_cache=False).logits[:, -1]
        cache, last = HfCache(module, 1), whole
        for part in tokens.split([PROBE_TOKENS - 2, 1, 1], dim=1):
            last = module(input_ids=part, **cache.arguments(part)).logits[:, -1]
    except Exception as error:  # any error of the model's own code
        log.info("%s runs without a cache: %s: %s", type(module).__name__, type(error).__name__, error)
        return f"{type(error).__name__}: {error}"
    difference = (whole - last).abs().max() / whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
    if difference < TOLERANCE:
        return ""
    log.info("%s runs without a cache: its logits would differ by %.1e", type(module).__name__, difference)
    return f"its logits differ by {difference:.1e}"
