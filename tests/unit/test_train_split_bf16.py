"""fp32 weights split into two 16-bit halves: no bit is lost, and AdamW updates them like fp32 weights."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.unit.test_train_optimizer import FORMATS, ManyShapes, section
from trimaran.core import Plan
from trimaran.parallel import NO_SPLIT_WEIGHTS, SplitWeights, build_optimizer, join_fp32, split_fp32

SPECIAL = (0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x3F808000, 0xBF818000)
BORDERS = (0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF)


def values() -> Tensor:
    """Return fp32 values of every kind: a million random bit patterns, and the special ones."""
    drawn = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([drawn, torch.tensor(SPECIAL + BORDERS)]).to(torch.int32).view(torch.float32)


def split_matrices(module: nn.Module) -> SplitWeights:
    """Make the matrices of a module their upper halves, and return the lower halves."""
    lower_halves: dict[Tensor, Tensor] = {}
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.data, lower_halves[parameter] = split_fp32(parameter.detach())
    return SplitWeights(lower_halves)


def trained(states: str, *, halves: bool, factor: float | None = None) -> tuple[dict[str, Tensor], Optimizer]:
    """Return the fp32 weights after ten steps with gradients that are exact in bf16, and the optimizer."""
    module = ManyShapes()
    split = split_matrices(module) if halves else NO_SPLIT_WEIGHTS
    plan = Plan(offload="none" if halves else "optimizer")
    optimizer = build_optimizer([module], section(states), plan, split=split)
    optimizer.factor = None if factor is None else torch.tensor(factor)  # pyrefly: ignore[missing-attribute]
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16() + 0.25
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
    return {name: split.full_tensor(each) for name, each in module.named_parameters()}, optimizer


def test_two_halves_have_the_same_bits() -> None:
    full = values()
    upper, lower = split_fp32(full)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join_fp32(upper, lower).view(torch.int32), full.view(torch.int32))
    turned = full[: 2**20].view(1024, 1024).t()
    assert torch.equal(join_fp32(*split_fp32(turned)).view(torch.int32), turned.view(torch.int32))


def test_the_upper_half_is_the_nearest_bf16_and_the_larger_of_two_equally_near() -> None:
    finite = values()
    finite = finite[finite.isfinite()]
    upper, lower = split_fp32(finite)
    tie = lower == -(2**15)
    assert torch.equal(upper[~tie], finite.bfloat16()[~tie])
    assert tie.any()
    assert (upper[tie].abs() >= finite[tie].abs()).all()
    assert split_fp32(torch.tensor([torch.finfo(torch.float32).max]))[0].isinf().all()


@pytest.mark.parametrize("states", FORMATS)
def test_split_weights_are_updated_like_fp32_weights(states: str) -> None:
    (full, _), (joined, optimizer) = trained(states, halves=False), trained(states, halves=True)
    for name, expected in full.items():
        assert torch.equal(joined[name], expected), name
    assert sum("low" in each for each in optimizer.state.values()) == 4


@pytest.mark.parametrize("states", FORMATS)
def test_the_factor_multiplies_the_gradients(states: str) -> None:
    """A factor that is a power of two is exact, and AdamW's update does not depend on it, except for eps."""
    for halves in (True, False):
        plain, _ = trained(states, halves=halves)
        scaled, optimizer = trained(states, halves=halves, factor=2.0**-10)
        first = [each["exp_avg"] for each in optimizer.state.values() if each["exp_avg"].dtype == torch.float32]
        assert first == [] or max(float(each.abs().max()) for each in first) < 2.0**-8
        for name, expected in plain.items():
            moved = (expected - ManyShapes().get_parameter(name).detach()).norm()
            assert (scaled[name] - expected).norm() < 1e-4 * moved, name


def test_a_split_weight_may_have_an_fp32_gradient() -> None:
    module, plain = ManyShapes(), ManyShapes()
    split = split_matrices(module)
    for each, other in zip(module.parameters(), plain.parameters(), strict=True):
        each.grad_dtype = None
        each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(0))
        other.grad = each.grad.clone()
    build_optimizer([module], section(), Plan(), split=split).step()
    build_optimizer([plain], section(), Plan(offload="optimizer")).step()
    for each, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(split.full_tensor(each), other)
