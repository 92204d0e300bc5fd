"""The input of one step: new tokens of all sequences that take part, and how it is built from what is planned."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
import torch
from torch import Tensor

from trimaran.data import grid_positions
from trimaran.serve.engine.scheduler import EngineSequence, ScheduledPart

if TYPE_CHECKING:
    from trimaran.serve.engine.model_runner import Runner

# What a sequence wants of a step.
NOTHING = 0  # a part of a prompt
LAST = 1  # the logits after its last new token
ALL = 2  # the logits after each of its new tokens
EMBEDDING = 3  # the sum of the last layer's outputs at its new tokens
# The first numbers of the flat tensor, in order.
_HEAD = ("tokens", "sequences", "pages", "finished", "has_grid", "has_images", "image_parts", "patches", "patch_values")


@dataclass(frozen=True, slots=True, eq=False)
class StepImages:
    """The new images of all sequences, in the order of their tokens: patches u8 [P, values], grids i64 [parts, 2]."""

    patches: np.ndarray
    grids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EngineBatch:
    """N new tokens of S sequences side by side, i64 arrays on the host. Sequences with one new token come first."""

    tokens: np.ndarray  # [N]; -1 - s: what sequence s of the step before has chosen, and only the device knows
    positions: np.ndarray  # [N], in the sequence
    query_starts: np.ndarray  # [S + 1]: sequence s has the tokens from `query_starts[s]` to `query_starts[s + 1]`
    context_lengths: np.ndarray  # [S]: keys of each sequence, with those of its new tokens
    page_tables: np.ndarray  # [S, pages]; entries after a sequence's last page repeat its first
    slots: np.ndarray  # [N], where the new keys go: page times page size plus offset
    wants: np.ndarray  # [S]
    adapters: np.ndarray  # [S], numbers of adapters; 0 for none
    sequences: np.ndarray  # [S], unique numbers
    finished: np.ndarray  # numbers of sequences that ended, or were preempted, since the last step
    grid: np.ndarray | None = None  # [3, N]: time, row and column, for a model that has them
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


class BatchBuilder:
    """Builds batches. It keeps the page tables of running sequences, so that a step writes only new pages."""

    def __init__(self, max_running: int, runner: "Runner") -> None:
        self._page_size, self._runner = runner.page_size, runner
        self._tables = np.zeros((max_running, 16), dtype=np.int64)
        self._rows: dict[int, int] = {}  # of the table, by the number of the sequence
        self._written: dict[int, int] = {}  # pages
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._grids: dict[str, np.ndarray] = {}

    def build(self, parts: Sequence[ScheduledPart], ended: Sequence[int], wants: Sequence[int]) -> EngineBatch:
        """Return the batch of the next tokens of these sequences. `ended` are the numbers of those that are gone."""
        for number in ended:
            row = self._rows.pop(number, None)
            if row is not None:
                self._free_rows.append(row)
                del self._written[number]
        sequences = [part.sequence for part in parts]
        counts = np.array([part.num_tokens for part in parts])
        starts = np.array([each.num_computed for each in sequences])
        rows = np.array([self._row(each) for each in sequences])
        query_starts = np.zeros(len(parts) + 1, dtype=np.int64)
        counts.cumsum(out=query_starts[1:])
        positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], counts)
        pages = self._tables[np.repeat(rows, counts), positions // self._page_size]
        contexts = starts + counts
        tables = self._tables[rows, : -(-int(contexts.max()) // self._page_size)]
        tokens: list[int] = []
        for sequence, count in parts:
            new = sequence.tokens[sequence.num_computed : sequence.num_computed + count]
            tokens += new if len(new) == count else [*new, -1 - sequence.in_flight[0]]
        traits = self._runner.traits
        adapters = [
            traits.adapters.index(each.request.adapter) + 1 if each.request.adapter else 0 for each in sequences
        ]
        new = [image for sequence, count in parts for image in sequence.request.images
               if sequence.num_computed <= image.first < sequence.num_computed + count]  # fmt: skip
        images = None
        if new:
            grids = np.concatenate([each.grids for each in new]).astype(np.int64)
            images = StepImages(np.concatenate([each.patches for each in new]), grids)
        return EngineBatch(
            tokens=np.array(tokens, dtype=np.int64),
            positions=positions,
            query_starts=query_starts,
            context_lengths=contexts,
            page_tables=tables,
            slots=pages * self._page_size + positions % self._page_size,
            wants=np.array(wants, dtype=np.int64),
            adapters=np.array(adapters, dtype=np.int64),
            sequences=np.array([each.number for each in sequences], dtype=np.int64),
            finished=np.array(ended, dtype=np.int64),
            grid=self._grid(parts, positions) if traits.has_grid else None,
            images=images,
        )

    def forget(self, request: str) -> None:
        self._grids.pop(request, None)

    def _row(self, sequence: EngineSequence) -> int:
        """Return the row of the table that has the sequence's pages, after new ones are written to it."""
        number, pages = sequence.number, sequence.pages
        row = self._rows.get(number)
        if row is None:
            row = self._rows[number] = self._free_rows.pop()
            self._written[number] = 0
        written = self._written[number]
        if written != len(pages):
            if len(pages) > self._tables.shape[1]:
                wider = max(len(pages), 2 * self._tables.shape[1]) - self._tables.shape[1]
                self._tables = np.concatenate((self._tables, np.repeat(self._tables[:, :1], wider, axis=1)), axis=1)
            if not written:  # a table is read to the length of the longest: a sequence reads pages of its own only
                self._tables[row] = pages[0]
            self._tables[row, written : len(pages)] = pages[written:]
            self._written[number] = len(pages)
        return row

    def _grid(self, parts: Sequence[ScheduledPart], positions: np.ndarray) -> np.ndarray:
        """Return time, row and column [3, N] of the new tokens. Text after the prompt goes on where it ended."""
        grid, at = np.tile(positions, (3, 1)), 0
        for sequence, count in parts:
            if sequence.request.images:
                request = sequence.request
                if request.id not in self._grids:  # of the prompt and the first token after it, which has three equal
                    spans = [span for image in request.images for span in image.spans]
                    self._grids[request.id] = grid_positions(sequence.num_prompt + 1, spans)
                of_prompt = self._grids[request.id]
                index, length = positions[at : at + count], of_prompt.shape[1]
                shift = of_prompt[0, -1] - (length - 1)
                known = of_prompt[:, np.minimum(index, length - 1)]
                grid[:, at : at + count] = np.where(index < length, known, index + shift)
            at += count
        return grid


def part_wants(part: ScheduledPart, *, has_prompt_logprobs: bool) -> int:
    """Return what a part wants of its step. `has_prompt_logprobs`: those of its request are known already."""
    sequence, request = part.sequence, part.sequence.request
    if request.embed:
        return EMBEDDING
    if request.prompt_logprobs and not has_prompt_logprobs:
        return ALL
    return LAST if sequence.num_computed + part.num_tokens == sequence.length else NOTHING
