"""Steps as CUDA graphs: the host starts one graph instead of hundreds of kernels.

A graph has a fixed number of tokens and sequences. A step with fewer is padded: a padded sequence has no keys, and the
key of a padded token goes to a page that no sequence has. A decode graph has one token for each sequence; the graphs of
other steps have room for parts of prompts, too.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from trimaran.nets import Network, PagedCache, PagedExtension
from trimaran.serve.engine.engine_batch import LAST, NOTHING, EngineBatch
from trimaran.serve.engine.model_runner import ModelRunner, RunnerTraits, StepLogits
from trimaran.serve.engine.token_choice import PendingTokens, TokenChooser, chosen_or_given, likeliest_tokens, moved
from trimaran.serve.serving_layers import join_projections

MAX_SEQUENCES = 256
DECODE_SIZES = (1, 2, 4, *range(8, MAX_SEQUENCES + 1, 8))
TOKEN_SIZES = (64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)

log = logging.getLogger(__name__)


class GraphSize(NamedTuple):
    """How many tokens and sequences a graph has room for; in a decode step each sequence has one token."""

    tokens: int
    sequences: int
    is_decode: bool


class GraphRunner(ModelRunner):
    """Runs a network on this process's GPU. Its steps are CUDA graphs, each captured when it is first needed."""

    def __init__(
        self, network: Network, device: torch.device, dtype: torch.dtype, cache: PagedCache, traits: RunnerTraits
    ) -> None:
        """Joins projections. From now on the weights must stay where they are: graphs have their addresses."""
        join_projections(network)
        super().__init__(network, device, dtype, cache, traits)
        self._graphs = EngineGraphs(self, self._chosen.tokens)

    @property
    def captures(self) -> bool:
        """Whether the steps of this network can be captured, as far as is known."""
        return not self._graphs.impossible

    def run(self, batch: EngineBatch) -> StepLogits:
        """See `Runner`. The logits are valid until the next step."""
        if not self._replayed(batch):
            return super().run(batch)
        with torch.inference_mode():
            return StepLogits(self._graphs.wanted_logits(batch))

    def launch(self, batch: EngineBatch, choosers: Sequence[TokenChooser | None]) -> PendingTokens:
        """See `LaunchingRunner`. A graph chooses the likeliest tokens itself."""
        if not self._replayed(batch):
            return super().launch(batch, choosers)
        with torch.inference_mode():
            if self.traits.image_token is not None or any(each and each.sampling.temperature for each in choosers):
                self._choose(self._graphs.wanted_logits(batch), batch, choosers)
            return self._chosen.to_host(batch.num_sequences)

    def _replayed(self, batch: EngineBatch) -> bool:
        """Start a step if a graph computes it; return whether one does."""
        size = self._graphs.size_of(batch)
        with torch.inference_mode(), self.autocast():
            if size is None or not self._graphs.capture(size):
                return False
            self._graphs.replay(batch, size)
        return True

    def capture(self, max_running: int, max_step_tokens: int = 1024) -> int:
        """Capture the graphs of all steps of this size, so that no request waits for one; return their number."""
        decodes = _up_to(DECODE_SIZES, max_running)
        sizes = [GraphSize(size, MAX_SEQUENCES, is_decode=False) for size in _up_to(TOKEN_SIZES, max_step_tokens)]
        sizes += [GraphSize(size, size, is_decode=True) for size in decodes]
        with torch.inference_mode(), self.autocast():
            # Smaller graphs use the memory of larger ones.
            captured = sum(self._graphs.capture(size) for size in sorted(sizes, reverse=True))
        torch.cuda.synchronize(self.device)
        log.info("captured %d CUDA graphs for steps of up to %d sequences and %d tokens", captured, decodes[-1],
                 max(size.tokens for size in sizes))  # fmt: skip
        return captured


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """The inputs of all graphs, i32: memory on the device, two copies of it in pinned memory, and page tables.

    A step's inputs are one copy to the device: what `num_inputs` lists, and then the page tables, only as wide as the
    longest one. A token has 3 numbers: id, position and slot; or 6, if its position is also time, row and column.
    """

    per_token: int
    staged: Tensor
    host: tuple[Tensor, Tensor]  # alternate: the copy of a step may still run while the next one is written
    copied: tuple[torch.cuda.Event, torch.cuda.Event]  # the last copy of each has ended
    tables: Tensor  # [MAX_SEQUENCES, pages of the longest sequence]

    @classmethod
    def allocate(cls, max_pages: int, device: torch.device, *, has_grid: bool) -> Self:
        per_token = 6 if has_grid else 3
        count = per_token * TOKEN_SIZES[-1] + (2 + max_pages) * MAX_SEQUENCES + 1
        first, second = (torch.zeros(count, dtype=torch.int32, pin_memory=True) for _ in range(2))
        tables = torch.zeros(MAX_SEQUENCES, max_pages, dtype=torch.int32, device=device)
        staged, copied = torch.zeros(count, dtype=torch.int32, device=device), (torch.cuda.Event(), torch.cuda.Event())
        return cls(per_token, staged, (first, second), copied, tables)

    def num_inputs(self, size: GraphSize) -> int:
        """Return how many numbers are before the tables: of each token, the length of each sequence, its begin."""
        return self.per_token * size.tokens + 2 * size.sequences + 1

    def split(self, numbers: Tensor, size: GraphSize) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the numbers of a step: of its tokens [per token, tokens], lengths, and begins."""
        of_tokens = self.per_token * size.tokens
        lengths = numbers[of_tokens : of_tokens + size.sequences]
        starts = numbers[of_tokens + size.sequences : self.num_inputs(size)]
        return numbers[:of_tokens].view(self.per_token, size.tokens), lengths, starts

    def copy_from(self, batch: EngineBatch, size: GraphSize, step: int, unused_slot: int) -> None:
        """Copy a step's inputs to the device, padded to the graph's size, without waiting for the copy."""
        host, copied, count = self.host[step % 2], self.copied[step % 2], batch.num_tokens
        copied.synchronize()  # parts of a long prompt have no result to wait for, so that many steps may be in flight
        of_tokens, lengths, starts = (each.numpy() for each in self.split(host, size))
        grid = () if batch.grid is None else batch.grid
        for row, values in zip(of_tokens, (batch.tokens, batch.positions, batch.slots, *grid), strict=True):
            row[:count] = values
        of_tokens[:, count:] = 0
        of_tokens[2, count:] = unused_slot
        num_sequences, width = batch.page_tables.shape
        lengths[:num_sequences], lengths[num_sequences:] = batch.context_lengths, 0
        starts[: num_sequences + 1], starts[num_sequences + 1 :] = batch.query_starts, count
        start = self.num_inputs(size)
        stop = start + num_sequences * width
        host.numpy()[start:stop] = batch.page_tables.reshape(-1)
        self.staged[:stop].copy_(host[:stop], non_blocking=True)
        copied.record()
        tables = self.staged[start:stop].view(num_sequences, width)
        self.tables[:num_sequences, :width].copy_(tables)


class EngineGraphs:
    """The CUDA graphs of a runner, and the memory that they share."""

    def __init__(self, runner: ModelRunner, chosen: Tensor) -> None:
        """`chosen` are the likeliest tokens of the last step's sequences: every graph writes them."""
        self._runner, self._chosen = runner, chosen
        self._graphs: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        self._max_pages = -(-runner.max_length // runner.page_size)
        self._inputs = GraphInputs.allocate(self._max_pages, runner.device, has_grid=runner.traits.has_grid)
        self._unused_slot = runner.cache.unused_page * runner.page_size
        self._logits: Tensor | None = None  # of all graphs: [MAX_SEQUENCES, vocabulary]
        self._steps, self.impossible = 0, False

    def size_of(self, batch: EngineBatch) -> GraphSize | None:
        """Return the size of the graph that computes a step; None if there is none, as with images and adapters."""
        tokens, sequences = batch.num_tokens, batch.num_sequences
        is_small = sequences <= MAX_SEQUENCES and batch.page_tables.shape[1] <= self._max_pages
        is_text = batch.images is None and not batch.adapters.any()
        if self.impossible or not is_small or not is_text:
            return None
        if batch.is_decode:
            size = _up_to(DECODE_SIZES, sequences)[-1]
            return GraphSize(size, size, is_decode=True)
        fits = tokens <= TOKEN_SIZES[-1] and bool(((batch.wants == LAST) | (batch.wants == NOTHING)).all())
        return GraphSize(_up_to(TOKEN_SIZES, tokens)[-1], MAX_SEQUENCES, is_decode=False) if fits else None

    def replay(self, batch: EngineBatch, size: GraphSize) -> None:
        self._inputs.copy_from(batch, size, self._steps, self._unused_slot)
        self._steps += 1
        self._graphs[size].replay()

    def wanted_logits(self, batch: EngineBatch) -> Tensor:
        """Return the fp32 logits that the step wants that was started last; they are valid until the next one."""
        assert self._logits is not None, "a capture allocates it"
        wanted = np.flatnonzero(batch.wants == LAST)
        if len(wanted) == batch.num_sequences:
            return self._logits[: batch.num_sequences]
        return self._logits.index_select(0, moved(wanted, self._logits.device))

    def capture(self, size: GraphSize) -> bool:
        """Capture the graph of this size, unless it is; return False if the network's steps cannot be captured."""
        if size in self._graphs or self.impossible:
            return not self.impossible
        inputs = self._inputs
        inputs.staged[: inputs.num_inputs(size)].zero_()
        inputs.split(inputs.staged, size)[0][2].fill_(self._unused_slot)
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):  # compiles kernels, and allocates what outlives the step
                logits = self._forward(size)
                if self._logits is None:
                    self._logits = torch.zeros(MAX_SEQUENCES, logits.shape[-1], device=logits.device)
                likeliest_tokens(self._logits[: size.sequences])
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            pool = next(iter(self._graphs.values())).pool() if self._graphs else None
            # Other threads may use the device meanwhile.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                logits = self._logits[: size.sequences].copy_(self._forward(size))
                self._chosen[: size.sequences].copy_(likeliest_tokens(logits))
        except Exception as error:  # of any library: the model's own code may do what a capture does not allow
            self.impossible = True
            torch.cuda.set_stream(current)  # a capture that fails leaves its own stream the current one
            torch.cuda.synchronize()
            log.warning("steps run without CUDA graphs, more slowly: %s: %s", type(error).__name__, error)
            return False
        self._graphs[size] = graph
        return True

    def _forward(self, size: GraphSize) -> Tensor:
        """Return the logits [sequences, vocabulary] after each sequence's last token, for the inputs on the device."""
        given, lengths, starts = self._inputs.split(self._inputs.staged, size)
        numbers, sequences = given.long(), size.sequences
        extension = PagedExtension(
            cache=self._runner.cache,
            positions=numbers[1][None],
            slots=numbers[2],
            page_tables=self._inputs.tables[:sequences],
            context_lengths=lengths,
            query_starts=starts,
            kept=None if size.is_decode else (starts[1:] - 1).clamp(min=0).long(),
            query_lengths=(),  # these are known on the device only
            key_lengths=(),
            num_decodes=sequences if size.is_decode else 0,
        )
        inputs = {"tokens": chosen_or_given(numbers[0], self._chosen)[None]}
        if len(numbers) > 3:
            inputs["positions"] = numbers[3:, None]
        return self._runner.network.extend_pages(extension, inputs)[0]


def _up_to(sizes: Iterable[int], needed: int) -> list[int]:
    """Return the sizes up to the smallest one that is at least `needed`, or all if none is."""
    found: list[int] = []
    for size in sizes:
        found.append(size)
        if size >= needed:
            break
    return found
