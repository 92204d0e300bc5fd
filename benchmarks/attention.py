"""Cost of attention inside documents and images: with a T x T mask, with our kernels, and over full rows as the bound.

usage: python benchmarks/attention.py [--json RESULTS.json] [--flex]

Measures the attention of one layer, forward and backward. Documents have the lengths of web text (log-normal, median
400 tokens), images the grids of photographs at native resolution. On a GPU it runs in bf16 with the heads of
Llama-3.1-8B and of Qwen2-VL's vision tower; on a CPU everything is smaller and in fp32. `--flex` also measures torch's
flex_attention, compiled for each shape.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trimaran.nets.varlen_attention import Segments, attention, segment_attention

GPU = torch.device("cuda")
SPREAD = 1.2  # standard deviation of the logarithm of a document's length
TURNS = 7


@dataclass(frozen=True, slots=True)
class Case:
    """Rows of text (causal), or one row of images; a segment has about `typical` positions."""

    name: str
    rows: int
    length: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    typical: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One implementation of one case: forward and backward of a layer, and the memory beyond its inputs."""

    case: str
    segments: int
    way: str
    milliseconds: float
    peak_mib: float | None  # of a GPU


LARGE = (
    *(Case(f"text {length}", 32768 // length, length, 32, 8, 128, True, 400) for length in (2048, 8192, 32768)),
    Case("images 16384", 1, 16384, 16, 16, 80, False, 1000),
)
SMALL = (
    *(Case(f"text {length}", 4096 // length, length, 4, 2, 32, True, 60) for length in (256, 1024, 4096)),
    Case("images 2048", 1, 2048, 4, 4, 24, False, 100),
)


def document_lengths(case: Case) -> list[int]:
    """Return the lengths of documents that fill the rows; the last document of a row is truncated."""
    drawn, lengths = torch.Generator().manual_seed(0), []
    for _ in range(case.rows):
        left = case.length
        while left:
            length = torch.randn((), generator=drawn).mul(SPREAD).exp().mul(case.typical).ceil().int().item()
            lengths.append(int(min(left, length)))
            left -= lengths[-1]
    return lengths


def image_lengths(case: Case) -> list[int]:
    """Return the number of patches of each image; sides vary by a factor of three, with an aspect ratio of 4:3."""
    drawn, lengths, left = torch.Generator().manual_seed(0), [], case.length
    while left:
        side = int(case.typical**0.5 * torch.empty(()).uniform_(0.4, 1.2, generator=drawn))
        length = min(left, side * (side * 4 // 3))
        lengths.append(length)
        left -= length
    return lengths


def ways(case: Case, device: torch.device, *, flex: bool) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    """Yield each implementation of the case. What layers share is built when an implementation is first called."""
    lengths = document_lengths(case) if case.causal else image_lengths(case)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).view(case.rows, case.length)
    found = Segments.of_documents(ids.to(device), lengths)

    def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, found.mask(causal=case.causal))

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return segment_attention(query, key, value, found, causal=case.causal)

    def full_rows(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, None, causal=case.causal)

    yield "ours", ours
    yield "full rows", full_rows
    if flex:
        yield "flex", flexed(found.ids, causal=case.causal)
    yield "mask", masked


def flexed(ids: Tensor, *, causal: bool) -> Callable[..., Tensor]:
    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = ids[row, query] == ids[row, key]
        return same & (query >= key) if causal else same

    blocks = create_block_mask(sees, ids.shape[0], None, ids.shape[1], ids.shape[1], device=str(ids.device))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda query, key, value: compiled(query, key, value, block_mask=blocks, enable_gqa=True)


def inputs_of(case: Case, device: torch.device) -> list[Tensor]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    drawn = []
    for heads in (case.heads, case.kv_heads, case.kv_heads, case.heads):
        shape = (case.rows, case.length, heads, case.head_dim)
        drawn.append(torch.randn(shape, device=device, dtype=dtype).transpose(1, 2))
    return [*(each.requires_grad_() for each in drawn[:3]), drawn[3]]


def measure(work: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[float, float | None]:
    """Return the median milliseconds of a forward and backward, and on a GPU its peak memory in MiB."""
    *inputs, weight = tensors
    on_gpu = weight.is_cuda

    def turn() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        torch.autograd.grad(work(*inputs), inputs, weight)
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    turn()
    taken = statistics.median(turn() for _ in range(TURNS))
    peak = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1) if on_gpu else None
    return round(taken * 1e3, 3), peak


def results(device: torch.device, *, flex: bool) -> Iterator[Measured]:
    for case in LARGE if device.type == "cuda" else SMALL:
        tensors = inputs_of(case, device)
        count = len(document_lengths(case) if case.causal else image_lengths(case))
        for way, work in ways(case, device, flex=flex):
            taken, peak = measure(work, tensors)
            yield Measured(case.name, count, way, taken, peak)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--flex", action="store_true")
    asked = parser.parse_args()
    torch.manual_seed(0)
    device = GPU if torch.cuda.is_available() else torch.device("cpu")
    name = torch.cuda.get_device_name() if device == GPU else f"{platform.machine()}, {torch.get_num_threads()} threads"
    sys.stdout.write(f"{name}, torch {torch.__version__}, {date.today()}; forward and backward of one layer\n\n")
    sys.stdout.write(f"{'case':16}{'segments':>9}  {'way':12}{'ms':>10}{'MiB':>10}{'mask / it':>11}\n")
    rows: list[Measured] = []
    for each in results(device, flex=asked.flex):
        rows.append(each)
        if each.way == "mask":
            for row in (row for row in rows if row.case == each.case):
                ratio = each.milliseconds / row.milliseconds
                memory = "-" if row.peak_mib is None else f"{row.peak_mib:.0f}"
                numbers = f"{row.milliseconds:10.2f}{memory:>10}{ratio:10.1f}x"
                sys.stdout.write(f"{row.case:16}{row.segments:9}  {row.way:12}{numbers}\n")
            sys.stdout.flush()
    if asked.json:
        result = {"device": name, "torch": torch.__version__, "date": str(date.today())}
        asked.json.write_text(json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
