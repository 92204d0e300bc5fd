"""A batched copy: every byte once, in few pieces, none across the end of a pinned chunk; the kernel where Triton is."""

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor

from trimaran.checkpoint import VALUES_PER_ROW, Piece, Run, find_run, gather_rows, split_into_pieces
from trimaran.parallel import SplitWeight, join_fp32, split_fp32

SPECIAL = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -3e38, 3.4e38])


def read(address: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(bytearray(ctypes.string_at(address, num_bytes)), dtype=torch.uint8)


def gather(piece: Piece) -> Tensor:
    """Return the bytes of a piece as the kernel must gather them."""
    into = torch.full((piece.num_bytes // 4,), -1, dtype=torch.int32)
    for first, second, begin, count in gather_rows(piece).tolist():
        assert 0 < count <= VALUES_PER_ROW
        values = read(first, 4 * count).view(torch.int32)
        if second:
            upper, lower = read(first, 2 * count).view(torch.bfloat16), read(second, 2 * count).view(torch.int16)
            values = join_fp32(upper, lower).view(torch.int32)
        into[begin : begin + count] = values
    return into.view(torch.uint8)


def values_and_runs(begin: int) -> tuple[Tensor, list[Run]]:
    """Return bytes as they must be in a slot from `begin` on, and the runs that hold them."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(5000, generator=generator)
    large, bits = torch.randn(300, 1001, generator=generator), torch.randint(-(2**31), 2**31, (90_000,))
    sources: list[Tensor | SplitWeight] = [
        SplitWeight(*split_fp32(bits.to(torch.int32).view(torch.float32).reshape(300, 300))),
        flat[:1000], flat[1000:1300], flat[2000:], SplitWeight(*split_fp32(SPECIAL)), large,
        torch.arange(7), torch.randn(33, 2, generator=generator).bfloat16(),
    ]  # fmt: skip
    runs, expected, start = [], [], begin
    for each in sources:
        run = find_run(start, each)
        assert run is not None
        runs.append(run)
        expected.append(
            (each.joined() if isinstance(each, SplitWeight) else each).contiguous().view(-1).view(torch.uint8)
        )
        start += run.num_bytes
    return torch.cat(expected), runs


@pytest.mark.parametrize(("chunk_bytes", "staging_bytes"), [(1 << 28, 1 << 24), (1 << 16, 1 << 14), (1 << 20, 1 << 18)])
def test_pieces_hold_every_byte_once_and_cross_no_pinned_chunk(chunk_bytes: int, staging_bytes: int) -> None:
    expected, runs = values_and_runs(begin := 4096)
    copied, num_copied = torch.zeros_like(expected), torch.zeros(len(expected))
    for piece in split_into_pieces(runs, chunk_bytes=chunk_bytes, staging_bytes=staging_bytes):
        assert piece.start // chunk_bytes == (piece.start + piece.num_bytes - 1) // chunk_bytes
        assert piece.is_direct or piece.num_bytes <= staging_bytes
        part = slice(piece.start - begin, piece.start - begin + piece.num_bytes)
        copied[part] = piece.runs[0].sources[0] if piece.is_direct else gather(piece)
        num_copied[part] += 1
    assert torch.equal(copied, expected)
    assert bool((num_copied == 1).all())


def test_small_tensors_and_split_weights_share_a_piece_and_neighbours_are_one_copy() -> None:
    _, runs = values_and_runs(4096)
    assert [(each.is_direct, len(each.runs)) for each in split_into_pieces(runs)] == [(False, 4), (True, 1), (False, 2)]
    moments = torch.randn(64, 128, 256)  # 64 moments in one allocation, 8 MiB
    starts = range(0, moments.nbytes, moments[0].nbytes)
    flat = [find_run(start, each) for start, each in zip(starts, moments, strict=True)]
    assert [(each.is_direct, each.num_bytes) for each in split_into_pieces([each for each in flat if each])] == [
        (True, moments.nbytes)
    ]


def test_what_only_torch_can_copy_is_no_run() -> None:
    assert find_run(0, torch.randn(3, 5).t()) is None, "not contiguous"
    assert find_run(2, torch.randn(3)) is None, "not at a multiple of 4 bytes"
    assert find_run(0, torch.zeros(3, dtype=torch.int8)) is None, "no multiple of 4 bytes"
    assert find_run(0, SplitWeight(*(each.t() for each in split_fp32(torch.randn(3, 5))))) is None
    assert find_run(0, torch.zeros(0)) is None
    assert find_run(1, torch.zeros((1 << 20) + 1, dtype=torch.int8)) is not None, "large enough for a copy of its own"


KERNEL = """
import torch
from tests.unit.test_batched_copy import gather, values_and_runs
from trimaran.checkpoint.batched_copy import gather_rows, split_into_pieces
from trimaran.checkpoint.gather_kernel import gather_values
for piece in split_into_pieces(values_and_runs(4096)[1]):
    if not piece.is_direct:
        into = torch.full((piece.num_bytes // 4,), -1, dtype=torch.int32)
        gather_values(torch.from_numpy(gather_rows(piece)), into)
        assert torch.equal(into.view(torch.uint8), gather(piece))
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, whose interpreter runs kernels on a CPU")
def test_the_kernel_gathers_and_joins_as_its_rows_say() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", KERNEL], env=environment, check=True, timeout=300)


def test_rows_of_halves_point_into_both() -> None:
    halves = torch.zeros(40_000, dtype=torch.bfloat16), torch.zeros(40_000, dtype=torch.int16)
    (piece,) = split_into_pieces([Run(8192, 160_000, halves)])
    rows = gather_rows(piece)
    upper, lower = (each.data_ptr() for each in halves)
    steps = np.array([0, VALUES_PER_ROW, 2 * VALUES_PER_ROW])
    assert rows[:, 0].tolist() == (upper + 2 * steps).tolist()
    assert rows[:, 1].tolist() == (lower + 2 * steps).tolist()
    assert rows[:, 2:].tolist() == [[0, 16384], [16384, 16384], [32768, 7232]]
