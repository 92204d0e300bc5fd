"""Turns what the scheduler has planned into the arrays of a step."""

from collections.abc import Sequence

import numpy as np

from trimaran.data.vision.grid_positions import grid_positions
from trimaran.serve.engine.engine_batch import ALL, EMBEDDING, LAST, NOTHING, EngineBatch, StepImages
from trimaran.serve.engine.engine_sequence import EngineSequence
from trimaran.serve.engine.model_runner import Runner
from trimaran.serve.engine.scheduler import ScheduledPart


class BatchBuilder:
    """Builds batches. It keeps the page tables of running sequences, so that a step writes only new pages."""

    def __init__(self, max_running: int, runner: Runner) -> None:
        self._page_size, self._runner = runner.page_size, runner
        self._tables = np.zeros((max_running, 16), dtype=np.int64)
        self._rows: dict[int, int] = {}  # of the table, by the number of the sequence
        self._written: dict[int, int] = {}  # pages
        self._free_rows = list(range(max_running - 1, -1, -1))
        self._grids: dict[str, np.ndarray] = {}

    def build(self, parts: Sequence[ScheduledPart], ended: Sequence[int], wants: Sequence[int]) -> EngineBatch:
        """Return the batch of the next tokens of these sequences. `ended` are the numbers of those that are gone."""
        for number in ended:
            self._free_row(number)
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
            start = sequence.num_computed
            tokens += sequence.tokens[start : start + count]
        traits = self._runner.traits
        adapters = [
            traits.adapters.index(each.request.adapter) + 1 if each.request.adapter else 0 for each in sequences
        ]
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
            images=_images(parts),
        )

    def forget(self, request: str) -> None:
        """Forget what is kept of a request that has ended."""
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

    def _free_row(self, number: int) -> None:
        row = self._rows.pop(number, None)
        if row is not None:
            self._free_rows.append(row)
            del self._written[number]

    def _grid(self, parts: Sequence[ScheduledPart], positions: np.ndarray) -> np.ndarray:
        """Return time, row and column [3, N] of the new tokens. Text after the prompt goes on where it ended."""
        grid, at = np.tile(positions, (3, 1)), 0
        for sequence, count in parts:
            if sequence.request.images:
                of_prompt = self._grid_of_prompt(sequence)
                index, length = positions[at : at + count], of_prompt.shape[1]
                shift = of_prompt[0, -1] - (length - 1)
                known = of_prompt[:, np.minimum(index, length - 1)]
                grid[:, at : at + count] = np.where(index < length, known, index + shift)
            at += count
        return grid

    def _grid_of_prompt(self, sequence: EngineSequence) -> np.ndarray:
        """Return the positions of a prompt and of the first token after it, which are the same in all three axes."""
        request = sequence.request
        if request.id not in self._grids:
            spans = [span for image in request.images for span in image.spans]
            self._grids[request.id] = grid_positions(sequence.num_prompt + 1, spans)
        return self._grids[request.id]


def part_wants(part: ScheduledPart, *, has_prompt_logprobs: bool) -> int:
    """Return what a part wants of its step. `has_prompt_logprobs`: those of its request are known already."""
    sequence, request = part.sequence, part.sequence.request
    if request.embed:
        return EMBEDDING
    if request.prompt_logprobs and not has_prompt_logprobs:
        return ALL
    return LAST if sequence.num_computed + part.num_tokens == len(sequence.tokens) else NOTHING


def _images(parts: Sequence[ScheduledPart]) -> StepImages | None:
    """Return the images of the new tokens, in the order of the tokens; None without images."""
    new = [
        image
        for sequence, count in parts
        for image in sequence.request.images
        if sequence.num_computed <= image.first < sequence.num_computed + count
    ]
    if not new:
        return None
    patches, grids = (np.concatenate([getattr(each, name) for each in new]) for name in ("patches", "grids"))
    return StepImages(patches, grids.astype(np.int64))
