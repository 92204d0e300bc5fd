"""Decode steps as CUDA graphs: the host starts one graph instead of hundreds of kernels.

A graph has a fixed number of sequences. A step with fewer is padded: a padded sequence has no keys, and its new key goes
to a page that no sequence has.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimaran.infer.engine.model_runner import ModelRunner, RunnerTraits, StepLogits
from trimaran.infer.engine.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.nets.paged_cache import PagedCache, PagedExtension

GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8))
MAX_GRAPH_SIZE = GRAPH_SIZES[-1]
# What each sequence has in the inputs of a graph, in this order; its page table comes after these.
TOKEN, POSITION, SLOT, LENGTH = range(4)

log = logging.getLogger(__name__)


class GraphRunner(ModelRunner):
    """Runs a network on this process's GPU. Decode steps are CUDA graphs, each captured when it is first needed."""

    def __init__(
        self, network: Network, device: torch.device, dtype: torch.dtype, cache: PagedCache, traits: RunnerTraits
    ) -> None:
        super().__init__(network, device, dtype, cache, traits)
        self.graphs = DecodeGraphs(self)

    def run(self, batch: StepBatch) -> StepLogits:
        """See `Runner`. Logits of a decode step are valid until the next step."""
        if not self.graphs.supports(batch):
            return super().run(batch)
        with torch.inference_mode(), self.autocast():
            return StepLogits(self.graphs.logits(batch))

    def capture(self, max_sequences: int) -> None:
        """Capture the graphs of all steps with at most `max_sequences` sequences, so that no request waits for one."""
        needed = [size for size in GRAPH_SIZES if size < max_sequences]
        largest = graph_size(min(max_sequences, MAX_GRAPH_SIZE))
        with torch.inference_mode(), self.autocast():
            for size in sorted({*needed, largest}, reverse=True):  # smaller graphs then use the memory of larger ones
                self.graphs.capture(size)
        torch.cuda.synchronize(self.device)
        log.info("captured decode steps of up to %d sequences as CUDA graphs", largest)


def graph_size(sequences: int) -> int:
    """Return the number of sequences of the smallest graph that has room for so many."""
    return next(size for size in GRAPH_SIZES if size >= sequences)


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """The inputs of all graphs: i32 memory on the device, a copy of it in pinned memory, and the page tables.

    A step's inputs are the values of TOKEN for each sequence, those of POSITION and so on, and then the page tables,
    only as wide as the longest one. So one copy to the device has them all.
    """

    staged: Tensor
    host: tuple[Tensor, Tensor]  # alternate: the copy of a step may still run while the next one is written
    tables: Tensor  # [MAX_GRAPH_SIZE, pages of the longest sequence]

    @classmethod
    def allocate(cls, max_pages: int, device: torch.device) -> "GraphInputs":
        count = MAX_GRAPH_SIZE * (LENGTH + 1 + max_pages)
        first, second = (torch.zeros(count, dtype=torch.int32, pin_memory=True) for _ in range(2))
        tables = torch.zeros(MAX_GRAPH_SIZE, max_pages, dtype=torch.int32, device=device)
        return cls(torch.zeros(count, dtype=torch.int32, device=device), (first, second), tables)

    def copy_from(self, batch: StepBatch, size: int, step: int, unused_slot: int) -> None:
        """Copy a step's inputs to the device, padded to `size` sequences, without waiting for it."""
        count, width = batch.num_sequences, batch.page_tables.shape[1]
        head, total = (LENGTH + 1) * size, size * (LENGTH + 1 + width)
        host = self.host[step % 2]
        numbers = host.numpy()
        rows = numbers[:head].reshape(LENGTH + 1, size)
        rows[:, count:] = np.array([0, 0, unused_slot, 0])[:, None]
        for row, values in zip(
            rows, (batch.tokens, batch.positions, batch.slots, batch.context_lengths), strict=True
        ):
            row[:count] = values
        numbers[head : head + count * width] = batch.page_tables.reshape(-1)
        self.staged[:total].copy_(host[:total], non_blocking=True)
        self.tables[:count, :width].copy_(self.staged[head : head + count * width].view(count, width))


class DecodeGraphs:
    """The CUDA graphs of a runner, one for each number of sequences in GRAPH_SIZES that was needed."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._max_pages = -(-runner.max_length // runner.page_size)
        self._inputs = GraphInputs.allocate(self._max_pages, runner.device)
        self._logits: Tensor | None = None  # of all graphs
        self._steps = 0

    def supports(self, batch: StepBatch) -> bool:
        """Return whether the step is one of a graph: a decode step without adapters and positions of images."""
        fits = batch.num_sequences <= MAX_GRAPH_SIZE and batch.page_tables.shape[1] <= self._max_pages
        return batch.is_decode and fits and batch.grid is None and not batch.adapters.any()

    def logits(self, batch: StepBatch) -> Tensor:
        """Return the fp32 logits [sequences, vocabulary]; they are valid until the next call."""
        size = graph_size(batch.num_sequences)
        if size not in self._graphs:
            self.capture(size)
        unused_slot = self._runner.cache.unused_page * self._runner.page_size
        self._inputs.copy_from(batch, size, self._steps, unused_slot)
        self._steps += 1
        self._graphs[size].replay()
        assert self._logits is not None, "a capture allocates it"
        return self._logits[: batch.num_sequences]

    def capture(self, size: int) -> None:
        """Capture the step of `size` sequences."""
        if size in self._graphs:
            return
        head = self._inputs.staged[: (LENGTH + 1) * size].view(LENGTH + 1, size)
        head.zero_()
        head[SLOT] = self._runner.cache.unused_page * self._runner.page_size
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):  # compiles kernels, and allocates what outlives the step
            logits = self._forward(size)
            if self._logits is None:
                self._logits = torch.zeros(MAX_GRAPH_SIZE, logits.shape[-1], device=logits.device)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._logits[:size].copy_(self._forward(size))
        self._graphs[size] = graph

    def _forward(self, size: int) -> Tensor:
        """Return the logits [size, vocabulary] of a step with the inputs that are on the device."""
        head = self._inputs.staged[: (LENGTH + 1) * size].view(LENGTH + 1, size)
        numbers = head[:LENGTH].long()
        extension = PagedExtension(
            cache=self._runner.cache,
            positions=numbers[POSITION][None],
            slots=numbers[SLOT],
            page_tables=self._inputs.tables[:size],
            context_lengths=head[LENGTH],
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=head.device),
            kept=None,
            query_lengths=(),  # the kernel reads them from the device
            key_lengths=(),
            num_decodes=size,
        )
        return self._runner.network.extend_pages(extension, {"tokens": numbers[TOKEN][None]})[0]
