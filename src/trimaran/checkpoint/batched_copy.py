"""Pins host memory, and copies many tensors from a GPU to it with few copies, after the first time in a single launch.

Consecutive bytes of a slot that come from large tensors, or from tensors that are neighbours in memory, are copied as
they are. Split weights and small tensors are first gathered in one of two small buffers on the GPU, by one kernel for a
whole buffer. While one buffer is copied to the host, the other is filled. All launches for a slot are recorded once
as a CUDA graph, since hundreds of them from Python cost milliseconds.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from trimaran.checkpoint.memory_copies import PAGE_BYTES, MemorySlot, RankMemory
from trimaran.parallel import SplitWeight

PIN_CHUNK_BYTES = 1 << 28
"""Bytes pinned per call. A call blocks all other use of the GPU: pinning 15 GB at once stalled training for 8 s."""
log = logging.getLogger(__name__)
STAGING_BYTES = 1 << 24  # of each of the two buffers on the GPU
MIN_DIRECT_BYTES = 1 << 20
"""From this size on, a tensor is copied as it is: it is not worth a second pass through the GPU's memory."""
VALUES_PER_ROW = 1 << 14  # how many 4-byte values one program of the kernel gathers at most
WORD_BYTES, ROW_FIELDS = 4, 4
Gather = Callable[[Tensor, Tensor], None]  # fills the second tensor as the rows of the first say; see `gather_rows`


class PinnedMemory:
    """Keeps the pages of `memory` pinned until this object is dropped."""

    def __init__(self, memory: Tensor) -> None:
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)))
        release: Any = finalize(self, lambda: runtime.cudaHostUnregister(memory.data_ptr()))
        release.atexit = False  # the end of the process unpins it, and faster


class BackgroundPinning:
    """Allocates a rank memory, then pins it slot by slot, in a thread while training continues.

    This takes about one second per gigabyte, during which the first step can compile. The thread calls `pin` with one
    chunk of a slot at a time; `pin` returns an object that keeps the chunk pinned until it is dropped. Between two
    chunks the thread sleeps, so that training can use the GPU. `prepare` is called first, in the same thread.
    """

    def __init__(
        self,
        rank_memory: RankMemory,
        pin: Callable[[Tensor], object],
        prepare: Callable[[], None] = lambda: None,
        *,
        chunk_bytes: int = PIN_CHUNK_BYTES,
    ) -> None:
        self._rank_memory, self._pin, self._prepare = rank_memory, pin, prepare
        self._chunk_bytes = chunk_bytes
        self._pins: list[object] = []
        self._lacks_memory = False
        self.is_cancelled = False
        self._failure: Exception | None = None
        self._done = threading.Event()
        # Not a daemon: a process that ends while a thread is inside CUDA is aborted. `_should_continue` stops the
        # thread soon after the main thread has ended.
        threading.Thread(target=self._work, name="trimaran-pin", daemon=False).start()

    @property
    def is_done(self) -> bool:
        """Whether it is known if there is enough memory."""
        return self._done.is_set()

    @property
    def is_pinned(self) -> bool:
        """Whether all slots are pinned, once this is done. If the system limits pinning, none is."""
        return bool(self._pins)

    def wait(self) -> bool:
        """Return whether there is enough memory, as soon as that is known."""
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        return not self._lacks_memory

    def release(self) -> None:
        """Stop, and unpin everything. The rank memory stays allocated."""
        self.is_cancelled = True
        self._done.wait()
        self._pins.clear()

    def _should_continue(self) -> bool:
        return not self.is_cancelled and threading.main_thread().is_alive()

    def _work(self) -> None:
        try:
            self._prepare()
            self._rank_memory.allocate(self._should_continue)
            for chunk in (each for slot in self._rank_memory.slots for each in slot.memory.split(self._chunk_bytes)):
                if self._should_continue():
                    # Map every page by reading from it. Otherwise pinning does it, and blocks the GPU meanwhile.
                    chunk.numpy()[::PAGE_BYTES].max(initial=0)
                    began = time.monotonic()
                    self._pins.append(self._pin(chunk))
                    time.sleep(time.monotonic() - began)
        except OSError:
            self._lacks_memory = True
        except RuntimeError as error:  # the system limits pinning: copies to pageable memory stall training
            self._pins.clear()
            log.warning("host memory cannot be pinned, so training waits for every copy of the state: %s", error)
        except Exception as error:  # `wait` raises it in the training thread
            self._failure = error
        finally:
            self._done.set()


def split_at_pin_chunks(
    slot: Tensor, target: Tensor, values: Tensor | SplitWeight, chunk_bytes: int = PIN_CHUNK_BYTES
) -> Iterator[tuple[Tensor, Tensor | SplitWeight]]:
    """Yield `target`, a slice of `slot`, and its values in parts in one pinned chunk each, which GPU copies need."""
    first = target.data_ptr() - slot.data_ptr()
    remaining = chunk_bytes - first % chunk_bytes
    if target.nbytes <= remaining:
        yield target, values
        return
    row_bytes = target.nbytes // len(target)
    num_rows, rest = divmod(remaining, row_bytes)
    if num_rows:
        yield target[:num_rows], values[:num_rows]
    if rest:
        yield from split_at_pin_chunks(slot, target[num_rows], values[num_rows], chunk_bytes)
        num_rows += 1
    if num_rows < len(target):
        yield from split_at_pin_chunks(slot, target[num_rows:], values[num_rows:], chunk_bytes)


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are consecutive in a slot, from byte `start` of its memory on, and in each of their sources.

    There is one source, or the upper and the lower half of fp32 values. A source is a flat tensor.
    """

    start: int
    num_bytes: int
    sources: tuple[Tensor, ...]

    def part(self, first: int, end: int) -> "Run":
        """Return the bytes from `first` to `end` of this run, multiples of 4 for halves."""
        sources = tuple(
            each[first * len(each) // self.num_bytes : end * len(each) // self.num_bytes] for each in self.sources
        )
        return Run(self.start + first, end - first, sources)


@dataclass(slots=True)
class Piece:
    """Consecutive bytes of a slot that are copied at once: from a tensor if there is one run, else via a buffer."""

    start: int
    num_bytes: int = 0
    is_direct: bool = False
    runs: list[Run] = field(default_factory=list)


def find_run(start: int, values: Tensor | SplitWeight) -> Run | None:
    """Return the values as a run that begins at byte `start`; None if only torch can copy them."""
    if isinstance(values, SplitWeight):
        halves = values.upper, values.lower
        if halves[0].device != halves[1].device:  # the lower one is on disk
            return None
        if start % WORD_BYTES or not all(each.is_contiguous() for each in halves):
            return None
        return Run(start, WORD_BYTES * values.upper.numel(), tuple(each.view(-1) for each in halves))
    if not values.is_contiguous() or not values.numel():
        return None
    source = values.detach().view(-1).view(torch.uint8)
    aligned = not any(each % WORD_BYTES for each in (start, len(source), source.data_ptr()))
    return Run(start, len(source), (source,)) if aligned or len(source) >= MIN_DIRECT_BYTES else None


def split_into_pieces(
    runs: Sequence[Run], *, chunk_bytes: int = PIN_CHUNK_BYTES, staging_bytes: int = STAGING_BYTES
) -> list[Piece]:
    """Return the pieces to copy; `runs` are in the order of the slot. No piece crosses the end of a pinned chunk."""
    pieces: list[Piece] = []
    for run in _merged(runs):
        if len(run.sources) == 1 and run.num_bytes >= MIN_DIRECT_BYTES:
            parts = _at_chunk_ends(run, chunk_bytes)
            pieces += [Piece(each.start, each.num_bytes, is_direct=True, runs=[each]) for each in parts]
            continue
        for part in _at_chunk_ends(run, chunk_bytes):
            first = 0
            while first < part.num_bytes:  # to the last piece as far as its buffer has room, and to new ones
                start, last = part.start + first, pieces[-1] if pieces else None
                if (
                    last is None
                    or last.is_direct
                    or last.num_bytes >= staging_bytes
                    or last.start + last.num_bytes != start
                    or last.start // chunk_bytes != start // chunk_bytes
                ):
                    pieces.append(last := Piece(start))
                end = min(part.num_bytes, first + staging_bytes - last.num_bytes)
                last.runs.append(part.part(first, end))
                last.num_bytes += end - first
                first = end
    return pieces


def gather_rows(piece: Piece) -> np.ndarray:
    """Return what one launch gathers in a buffer of 4-byte values: a row of int64 for each part of a run.

    A row is the address of the values, or of the upper and the lower half (else 0), the index of the first value in the
    buffer, and the number of values.
    """
    tables = []
    for run in piece.runs:
        num_values = run.num_bytes // WORD_BYTES
        firsts = np.arange(0, num_values, VALUES_PER_ROW)
        rows = np.zeros((len(firsts), ROW_FIELDS), dtype=np.int64)
        for column, source in enumerate(run.sources):
            rows[:, column] = source.data_ptr() + firsts * (WORD_BYTES // len(run.sources))
        rows[:, 2] = (run.start - piece.start) // WORD_BYTES + firsts
        rows[:, 3] = np.minimum(VALUES_PER_ROW, num_values - firsts)
        tables.append(rows)
    return np.concatenate(tables)


def _at_chunk_ends(run: Run, chunk_bytes: int) -> Iterator[Run]:
    first = 0
    while first < run.num_bytes:
        end = min(run.num_bytes, first + chunk_bytes - (run.start + first) % chunk_bytes)
        yield run.part(first, end)
        first = end


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Return the runs; those of tensors that are neighbours in one allocation as well as in the slot become one."""
    merged: list[Run] = []
    for run in runs:
        last = merged[-1] if merged else None
        if last and len(last.sources) == len(run.sources) == 1 and last.start + last.num_bytes == run.start:
            mine, its = last.sources[0], run.sources[0]
            is_same = mine.untyped_storage().data_ptr() == its.untyped_storage().data_ptr()
            if is_same and mine.data_ptr() + last.num_bytes == its.data_ptr():
                num_bytes = last.num_bytes + run.num_bytes
                merged[-1] = Run(last.start, num_bytes, (mine.as_strided((num_bytes,), (1,)),))
                continue
        merged.append(run)
    return merged


class BatchedCopy:
    """Copies the same pieces to any slot of a rank memory. Their runs must stay where they are in memory."""

    def __init__(self, pieces: list[Piece], device: torch.device, stream: torch.cuda.Stream, gather: Gather) -> None:
        """Copies run on `stream`. `gather` must have run before: a kernel cannot be compiled for a graph."""
        self._pieces, self._stream, self._gather = pieces, stream, gather
        # Of high priority, so that its short kernels do not wait for long ones of training.
        self._gather_stream = torch.cuda.Stream(device, priority=-1)
        no_rows = np.zeros((0, ROW_FIELDS), dtype=np.int64)
        rows = [no_rows if each.is_direct else gather_rows(each) for each in self._pieces]
        table = torch.from_numpy(np.concatenate([no_rows, *rows])).pin_memory()
        self._rows = table.to(device, non_blocking=True).split([len(each) for each in rows])
        num_words = max((each.num_bytes for each in self._pieces if not each.is_direct), default=0) // WORD_BYTES
        self._buffers = [torch.empty(num_words, dtype=torch.int32, device=device) for _ in range(2)]
        self._graphs: dict[MemorySlot, torch.cuda.CUDAGraph] = {}
        self._records_graphs = True

    def start(self, slot: MemorySlot) -> None:
        """Start to copy to `slot`, after everything that was started on `stream` before."""
        if not self._pieces:
            return
        if self._records_graphs and slot not in self._graphs:
            self._record(slot)
        with torch.cuda.stream(self._stream):
            if slot in self._graphs:
                self._graphs[slot].replay()
            else:
                self._launch(slot)

    def _record(self, slot: MemorySlot) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    self._launch(slot)
                finally:
                    graph.capture_end()
        except RuntimeError as error:
            self._records_graphs = False
            log.warning("copies of the state are launched one by one, since they cannot be recorded: %s", error)
            return
        self._graphs[slot] = graph

    @torch.no_grad()
    def _launch(self, slot: MemorySlot) -> None:
        self._gather_stream.wait_stream(self._stream)
        copied: list[torch.cuda.Event | None] = [None, None]
        turn = 0
        memory = slot.memory.numpy()
        for piece, rows in zip(self._pieces, self._rows, strict=True):
            # Its storage must begin in pinned memory: torch looks there whether it can record a copy to it.
            target = torch.from_numpy(memory[piece.start : piece.start + piece.num_bytes])
            if piece.is_direct:
                target.copy_(piece.runs[0].sources[0], non_blocking=True)
                continue
            buffer, last = self._buffers[turn], copied[turn]
            with torch.cuda.stream(self._gather_stream):
                if last is not None:
                    self._gather_stream.wait_event(last)
                self._gather(rows, buffer)
            self._stream.wait_stream(self._gather_stream)
            target.copy_(buffer.view(torch.uint8)[: piece.num_bytes], non_blocking=True)
            copied[turn] = event = torch.cuda.Event()
            event.record(self._stream)
            turn = 1 - turn
        self._stream.wait_stream(self._gather_stream)  # a recording must end on the stream that it began on
