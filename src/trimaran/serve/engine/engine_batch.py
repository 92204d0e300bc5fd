"""The input of one forward: the new tokens of all sequences that take part, and where their keys and values are."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

# What a sequence wants of a step.
NOTHING = 0  # a part of a prompt
LAST = 1  # the logits after its last new token
ALL = 2  # the logits after each of its new tokens
EMBEDDING = 3  # the sum of the last layer's outputs at its new tokens


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """The new images of all sequences, in the order of their tokens: patches u8 [P, values], grids i64 [parts, 2]."""

    patches: np.ndarray
    grids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EngineBatch:
    """N new tokens of S sequences side by side, i64 arrays on the host. Sequences with one new token come first.

    A token -1 - s is the one that sequence s of the step before has chosen, and that only the device knows.
    Sequence s has the tokens from `query_starts[s]` to `query_starts[s + 1]`, and `context_lengths[s]` keys with them.
    Its keys are in the pages `page_tables[s]`; entries after its last page repeat its first. `slots` are where the new
    keys go: page times page size plus offset. `positions` are those in the sequence; `grid` [3, N] are time, row and
    column for a model that has them. `adapters` [S] are numbers of adapters, 0 for none. `sequences` [S] are unique
    numbers, and `finished` are the numbers of those that ended, or were preempted, since the last step.
    """

    tokens: np.ndarray
    positions: np.ndarray
    query_starts: np.ndarray
    context_lengths: np.ndarray
    page_tables: np.ndarray
    slots: np.ndarray
    wants: np.ndarray
    adapters: np.ndarray
    sequences: np.ndarray
    finished: np.ndarray
    grid: np.ndarray | None = None
    images: StepImages | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)

    @property
    def query_lengths(self) -> np.ndarray:
        return np.diff(self.query_starts)

    @property
    def num_decodes(self) -> int:
        """How many of the first sequences have one new token."""
        return int(np.count_nonzero(self.query_lengths == 1))

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one new token, wants its logits, and has no adapter: a step of a fixed shape."""
        is_plain = self.images is None and not self.adapters.any()
        return is_plain and self.num_tokens == self.num_sequences and bool((self.wants == LAST).all())

    def logit_rows(self) -> np.ndarray:
        """Return the indices of the tokens whose logits are wanted, in order."""
        last = self.query_starts[1:] - 1
        if self.num_tokens == self.num_sequences or not (self.wants == ALL).any():
            return last[(self.wants == LAST) | (self.wants == ALL)]
        wanted = np.repeat(self.wants == ALL, self.query_lengths)
        wanted[last[self.wants == LAST]] = True
        return np.flatnonzero(wanted)

    def embedding_rows(self) -> np.ndarray:
        """Return the indices of the tokens of sequences that are embedded, in order."""
        return np.flatnonzero(np.repeat(self.wants == EMBEDDING, self.query_lengths))

    def to_tensor(self) -> Tensor:
        """Return everything as one flat i64 tensor on the host, for a broadcast to other ranks."""
        images = self.images
        patches = np.empty((0, 0), dtype=np.uint8) if images is None else images.patches
        grids = np.empty((0, 2), dtype=np.int64) if images is None else images.grids
        pixels = np.zeros(-(-patches.size // 8) * 8, dtype=np.uint8)  # 8 bytes in each number
        pixels[: patches.size] = patches.reshape(-1)
        head = [self.num_tokens, self.num_sequences, self.page_tables.shape[1], len(self.finished),
                self.grid is not None, images is not None, len(grids), *patches.shape]  # fmt: skip
        arrays = [np.array(head), self.tokens, self.positions, self.query_starts, self.context_lengths,
                  self.page_tables.reshape(-1), self.slots, self.wants, self.adapters, self.sequences,
                  self.finished]  # fmt: skip
        if self.grid is not None:
            arrays.append(self.grid.reshape(-1))
        arrays += [grids.reshape(-1), pixels.view(np.int64)]
        return torch.from_numpy(np.concatenate([each.astype(np.int64, copy=False) for each in arrays]))

    @classmethod
    def from_tensor(cls, flat: Tensor) -> Self:
        """Return what `to_tensor` has written."""
        numbers, at = flat.numpy(), len(_HEAD)
        sizes = dict(zip(_HEAD, numbers[:at].tolist(), strict=True))

        def take(*shape: int) -> np.ndarray:
            nonlocal at
            start, at = at, at + int(np.prod(shape))
            return numbers[start:at].reshape(shape)

        n, s = sizes["tokens"], sizes["sequences"]
        arrays = {"tokens": take(n), "positions": take(n), "query_starts": take(s + 1), "context_lengths": take(s),
                  "page_tables": take(s, sizes["pages"]), "slots": take(n), "wants": take(s), "adapters": take(s),
                  "sequences": take(s), "finished": take(sizes["finished"])}  # fmt: skip
        grid = take(3, n) if sizes["has_grid"] else None
        grids, count = take(sizes["image_parts"], 2), sizes["patches"] * sizes["patch_values"]
        pixels = take(-(-count // 8)).view(np.uint8)[:count].reshape(sizes["patches"], sizes["patch_values"])
        return cls(**arrays, grid=grid, images=StepImages(pixels, grids) if sizes["has_images"] else None)


# The first numbers of the flat tensor, in order.
_HEAD = ("tokens", "sequences", "pages", "finished", "has_grid", "has_images", "image_parts", "patches", "patch_values")
