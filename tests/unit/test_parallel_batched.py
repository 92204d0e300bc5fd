"""Computations over many tensors at once on a CPU: squares by group, sampled weights, numbers for a device."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trimaran.parallel import DeviceNumbers, GradientSquares, ProgramMap, TensorSquares, gradient_norm, is_aligned
from trimaran.train import MAX_SAMPLED_VALUES, SampledWeights, sample_values

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_squares_are_those_of_each_tensor_in_order_and_zero_for_a_missing_one() -> None:
    tensors = [
        torch.full((3,), 2.0),
        None,
        torch.full((2, 2), 3.0, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.ones(5),
    ]
    squares = TensorSquares([1.0, 1.0, 0.5, 1.0, 1.0], CPU)
    assert squares.measure(tensors).tolist() == pytest.approx([12.0, 0.0, 18.0, 0.0, 5.0], rel=1e-6)
    assert squares.measure([None] * 5).tolist() == [0.0] * 5


def test_a_nan_of_one_group_does_not_reach_another() -> None:
    parameters = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    parameters[0].grad, parameters[2].grad = torch.tensor([1.0, torch.nan, 0.0, 0.0]), torch.full((4,), 2.0)
    gradients = GradientSquares([parameters[:1], parameters[1:]], pp=1, device=CPU)
    gradients.measure()
    first, second = gradients.group_squares().tolist()
    assert first != first
    assert second == pytest.approx(16.0)
    assert float(gradient_norm(parameters[1:])) == pytest.approx(4.0)


def test_samples_follow_weights_that_change_or_move() -> None:
    parameters = [
        nn.Parameter(torch.zeros(40, 300)),
        nn.Parameter(torch.zeros(300, 40).t()),
        nn.Parameter(torch.zeros(3)),
    ]
    sampled = SampledWeights(parameters, CPU)
    assert not sampled.read().any()
    with torch.no_grad():
        parameters[0].data = torch.ones(40, 300)
        parameters[1].add_(2)
        parameters[2].add_(3)
    samples = sampled.read()
    assert samples.shape == (3, MAX_SAMPLED_VALUES)
    for row, size, value in zip(samples, sampled.sizes, (1.0, 2.0, 3.0), strict=True):
        assert (row[:size] == value).all()
        assert not row[size:].any()


def test_a_wide_tensor_that_is_not_contiguous_has_no_more_samples_than_others() -> None:
    assert 0 < len(sample_values(torch.zeros(2, 200_000)[:, ::2])) <= MAX_SAMPLED_VALUES


def test_numbers_are_copied_only_when_they_change() -> None:
    numbers = DeviceNumbers(CPU)
    first = numbers.set([1, 2])
    first += 10  # would be overwritten by a copy
    assert numbers.set([1, 2]).tolist() == [11, 12]
    assert numbers.set([1, 3]).tolist() == [1, 3]
    assert numbers.set([1, 3, 5]).tolist() == [1, 3, 5]


def test_programs_of_a_kernel_are_given_to_tensors_in_order() -> None:
    programs = ProgramMap([4, 7, 2], [2, 1, 3], CPU)
    assert (programs.count, programs.firsts, programs.owners.tolist()) == (6, [0, 2, 3], [4, 4, 7, 2, 2, 2])
    assert is_aligned(4096, 32)
    assert not is_aligned(4098, 32)
    assert not is_aligned(4096, 33)
