"""Kernels over many tensors on a GPU give what torch gives for each: squares, checksums, sampled values."""

import pytest
import torch
from torch import Tensor, nn

from trimaran.parallel import DeviceNumbers, SplitWeights, TensorChecksums, TensorSquares, split_fp32
from trimaran.train import SampledWeights

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def tensors() -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3_000_001, generator=generator)
    held = [
        values[:60_000].view(200, 300), values[1:2_900_001], values[:91].view(7, 13).bfloat16(), values[:0],
        values[:5000].half(), values[:8192].view(128, 64).t(), values[7], values[:1_000_000].bfloat16(),
    ]  # fmt: skip
    return [*(each.cuda() for each in held), values.cuda()[1:2_000_000], None]


def test_sums_of_squares_equal_those_of_torch_and_are_always_the_same() -> None:
    held = tensors()
    factors = [1.0, 0.5, *[1.0] * (len(held) - 2)]
    squares = TensorSquares(factors, CUDA)
    exact = [0.0 if each is None else float(each.double().square().sum()) for each in held]
    expected = torch.tensor(exact, dtype=torch.float64) * torch.tensor(factors, dtype=torch.float64)
    first = squares.measure(held).clone()
    torch.testing.assert_close(first.cpu(), expected, rtol=1e-6, atol=0)
    again = TensorSquares(factors, CUDA)
    assert torch.equal(again.measure([None if each is None else each.clone() for each in held]), first)
    held[0], held[-1] = None, torch.ones(77, device=CUDA)
    measured = squares.measure(held)
    assert (float(measured[0]), float(measured[-1])) == (0.0, 77.0)


def test_a_nan_or_inf_shows_in_its_own_tensor_only() -> None:
    held = [torch.ones(5000, device=CUDA) for _ in range(3)]
    held[0][4999], held[1][17] = torch.nan, torch.inf
    measured = TensorSquares([1.0] * 3, CUDA).measure(held).tolist()
    assert measured[0] != measured[0]
    assert measured[1:] == [float("inf"), 5000.0]


def test_every_flipped_bit_changes_the_checksum_of_its_tensor() -> None:
    held = [each for each in tensors() if each is not None and each.is_contiguous() and each.numel()]
    held.append(torch.arange(301, dtype=torch.uint8, device=CUDA))
    checksums = TensorChecksums(held)
    before = checksums.compute()
    assert torch.equal(checksums.compute(), before)
    for index, each in enumerate(held):
        flat = each.reshape(-1).view(torch.uint8)
        for position, bit in ((0, 0), (len(flat) // 2, 7), (-1, 3)):
            flat[position] ^= 1 << bit
            assert (checksums.compute() != before).nonzero().flatten().tolist() == [index]
            flat[position] ^= 1 << bit


def test_another_number_of_tensors_compiles_nothing() -> None:
    from trimaran.parallel.kernels import tensor_sums as tensor_kernels  # noqa: PLC0415  needs Triton

    held = [torch.ones(64, device=CUDA) for _ in range(7)]
    TensorChecksums(held[:4]).compute()
    compiled = len(tensor_kernels.sum_words.device_caches[torch.cuda.current_device()][0])
    for count in range(1, 8):
        TensorChecksums(held[:count]).compute()
    assert len(tensor_kernels.sum_words.device_caches[torch.cuda.current_device()][0]) == compiled


def test_weights_are_sampled_as_on_a_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(60, 300), (7, 13), (2000, 170), (5,), ()]
    values = [torch.randn(shape, generator=generator) for shape in shapes]
    values.append(torch.randn(128, 640, generator=generator).t())
    samples = {}
    for device in (CUDA, CPU):
        parameters = [nn.Parameter(each.to(device)) for each in values]
        lower_halves: dict[Tensor, Tensor] = {}
        for each in parameters[:3]:
            each.data, lower_halves[each] = split_fp32(each.detach())
        sampled = SampledWeights(parameters, device, SplitWeights(lower_halves))
        sampled.read()
        with torch.no_grad():
            parameters[3].data = parameters[3] + 1.0  # at another address
            parameters[5].add_(1.0)
        samples[device] = sampled.read().cpu()
    assert torch.equal(samples[CUDA], samples[CPU])


def test_numbers_from_the_host_arrive_in_order_without_a_wait() -> None:
    """Each copy is used by a kernel before the next one: pinned memory must not be overwritten too early."""
    numbers, seen = DeviceNumbers(CUDA), []
    torch.cuda._sleep(50_000_000)  # so that all copies are still pending
    torch.cuda.set_sync_debug_mode("error")
    try:
        seen = [numbers.set([step, 2 * step]).clone() for step in range(50)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [each.tolist() for each in seen] == [[step, 2 * step] for step in range(50)]
