"""Weights in two halves: that nothing is lost, and that AdamW moves them as it moves whole ones."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.unit.test_train_optimizer import FORMATS, Oddities, section
from trimaran.core import Plan
from trimaran.optim import build_optimizer
from trimaran.optim.split_bf16 import join, split

SPECIAL = (0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00007FFF, 0x00008000, 0x007FFFFF, 0x3F808000, 0xBF818000)
BORDERS = (0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF)


def values() -> Tensor:
    """Return fp32 values of every kind: a million random patterns of bits, and those at the borders."""
    drawn = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([drawn, torch.tensor(SPECIAL + BORDERS)]).to(torch.int32).view(torch.float32)


def halved(module: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Make the matrices of a module their upper halves, and return the lower ones."""
    lows = {}
    for parameter in module.parameters():
        if parameter.ndim >= 2:
            parameter.data, lows[parameter] = split(parameter.detach())
    return lows


def trained(states: str, *, halves: bool, factor: float | None = None) -> tuple[dict[str, Tensor], Optimizer]:
    """Return the whole weights after ten steps whose gradients fit into bf16, and the optimizer."""
    module = Oddities()
    lows = halved(module) if halves else {}
    optimizer = build_optimizer([module], section(states), Plan(offload="none" if halves else "optimizer"), lows=lows)
    optimizer.factor = None if factor is None else torch.tensor(factor)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            gradient = torch.randn(parameter.shape, generator=generator).bfloat16() + 0.25
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: join(each, lows[each]) if each in lows else each for name, each in module.named_parameters()}
    return {name: each.detach() for name, each in whole.items()}, optimizer


def test_two_halves_are_the_same_bits() -> None:
    whole = values()
    upper, lower = split(whole)
    assert (upper.dtype, lower.dtype) == (torch.bfloat16, torch.int16)
    assert torch.equal(join(upper, lower).view(torch.int32), whole.view(torch.int32))
    turned = whole[: 2**20].view(1024, 1024).t()
    assert torch.equal(join(*split(turned)).view(torch.int32), turned.view(torch.int32))


def test_the_upper_half_is_the_nearest_bf16_and_of_two_the_larger() -> None:
    finite = values()
    finite = finite[finite.isfinite()]
    upper, lower = split(finite)
    tie = lower == -(2**15)
    assert torch.equal(upper[~tie], finite.bfloat16()[~tie])
    assert tie.any()
    assert (upper[tie].abs() >= finite[tie].abs()).all()
    assert split(torch.tensor([torch.finfo(torch.float32).max]))[0].isinf().all()


@pytest.mark.parametrize("states", FORMATS)
def test_halves_move_as_whole_weights_do(states: str) -> None:
    (whole, _), (joined, optimizer) = trained(states, halves=False), trained(states, halves=True)
    for name, theirs in whole.items():
        assert torch.equal(joined[name], theirs), name
    assert sum("low" in each for each in optimizer.state.values()) == 4


@pytest.mark.parametrize("states", FORMATS)
def test_a_factor_is_a_multiplication_of_the_gradients(states: str) -> None:
    """With a power of two as the factor, nothing depends on where it is multiplied; AdamW forgets it but for eps."""
    for halves in (True, False):
        plain, _ = trained(states, halves=halves)
        scaled, optimizer = trained(states, halves=halves, factor=2.0**-10)
        first = [each["exp_avg"] for each in optimizer.state.values() if each["exp_avg"].dtype == torch.float32]
        assert first == [] or max(float(each.abs().max()) for each in first) < 2.0**-8
        for name, theirs in plain.items():
            moved = (theirs - Oddities().get_parameter(name).detach()).norm()
            assert (scaled[name] - theirs).norm() < 1e-4 * moved, name


def test_gradients_that_were_summed_apart_win() -> None:
    module = nn.Linear(8, 8, bias=False)
    lows = halved(module)
    other, other_lows = copy.deepcopy(module), {}
    other_lows[other.weight] = lows[module.weight].clone()
    optimizers = [build_optimizer([each], section(), Plan(), lows=low) for each, low in
                  ((module, lows), (other, other_lows))]  # fmt: skip
    module.weight.grad = torch.full_like(module.weight, torch.nan)
    module.weight.main_grad = torch.randn(8, 8)  # pyrefly: ignore[missing-attribute]
    other.weight.main_grad = module.weight.main_grad.clone()  # pyrefly: ignore[missing-attribute]
    for each in optimizers:
        each.step()
        each.zero_grad()
    assert module.weight.isfinite().all()
    assert torch.equal(module.weight, other.weight)
    assert module.weight.grad is None
    assert module.weight.main_grad is None
    before = module.weight.detach().clone()
    optimizers[0].step()
    assert torch.equal(module.weight, before), "there is no gradient any more"
