"""The logits of the token that follows a sequence, from a network with a key-value cache or without one."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trimaran.data.vision.image_grid import grid_positions
from trimaran.nets import Network


@dataclass(frozen=True, slots=True)
class NextTokenModel:
    """Computes the logits [vocabulary], fp32 on the CPU, of the token that follows at most `max_length` ids (CPU)."""

    logits: Callable[[Tensor], Tensor]
    max_length: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image of a sequence: its patches u8 [P, values], and the grids [parts, 2] of rows and columns of patches.

    `first` is the index of its first token; `merge` x `merge` patches are one token.
    """

    patches: np.ndarray
    grids: np.ndarray
    first: int
    merge: int

    @property
    def spans(self) -> list[tuple[int, int, int]]:
        """The first token, and the rows and columns of tokens, of each part."""
        sizes = (self.grids // self.merge).tolist()
        starts = accumulate((rows * columns for rows, columns in sizes), initial=self.first)
        return [(start, rows, columns) for start, (rows, columns) in zip(starts, sizes, strict=False)]

    @property
    def stop(self) -> int:
        """The index after its last token."""
        return self.first + len(self.patches) // self.merge**2


class CachedLogits:
    """Computes the logits after a sequence. Only what differs from the last sequence runs through the network.

    The next token of a text is one position, and the next turn of a conversation is that turn. `images` are those of
    all sequences, in order. With `has_grid` positions are time, row and column (Qwen2-VL).
    """

    def __init__(self, network: Network, device: torch.device, *, has_grid: bool = False) -> None:
        self._network, self._device, self._has_grid = network, device, has_grid
        self._cache = network.new_cache()
        self._ids = torch.empty(0, dtype=torch.long)
        self.images: list[PlacedImage] = []

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits of the token after `ids` [length]."""
        is_longer = self._cache.length <= self._network.long_after < len(ids)  # from now on angles are others
        self._cache.truncate(0 if is_longer else self._num_unchanged(ids))
        start = self._cache.length
        inputs = {"tokens": ids[None, start:].to(self._device), **self._image_inputs(start, len(ids))}
        self._ids = ids[:0]  # if this fails, nothing is known of the cache
        logits = self._network.extend(self._cache, inputs)[0, 0].float().cpu()
        self._ids = ids.clone()
        return logits

    def _num_unchanged(self, ids: Tensor) -> int:
        """Return how many tokens of the cache stay: not all of `ids`, and no part of an image."""
        most = min(len(self._ids), len(ids) - 1)
        differs = (self._ids[:most] != ids[:most]).nonzero()
        same = int(differs[0]) if len(differs) else most
        return min([same, *(each.first for each in self.images if each.first < same < each.stop)])

    def _image_inputs(self, start: int, stop: int) -> dict[str, Tensor]:
        """Return the images of the tokens from `start` on, and these tokens' positions."""
        images = [each for each in self.images if each.stop <= stop]
        inputs = {}
        if self._has_grid:
            spans = [span for each in images for span in each.spans]
            inputs["positions"] = torch.from_numpy(grid_positions(stop, spans)[:, None, start:])
        if new := [each for each in images if each.first >= start]:
            inputs["patches"] = torch.from_numpy(np.concatenate([each.patches for each in new]))
            inputs["grids"] = torch.from_numpy(np.concatenate([each.grids for each in new]))
        return {name: each.to(self._device) for name, each in inputs.items()}


def whole_sequence_logits(network: Network, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the whole sequence through a network whose architecture has no usable cache."""
    return lambda ids: network.forward({"tokens": ids[None].to(device)})[0][0, -1].float().cpu()
