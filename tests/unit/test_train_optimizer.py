"""AdamW's states: what they weigh, what rounding does to them, and that where they live changes nothing."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.optim import adamw, build_optimizer
from trimaran.optim.block_quantization import codebook, quantised, restored
from trimaran.optim.moments import SALT, Constants, words
from trimaran.optim.state_streaming import StateStream
from trimaran.optim.stochastic_rounding import runs, salt, scrambled, to_bf16

CPU = torch.device("cpu")
FORMATS = ["fp32", "bf16", "8bit"]


class Oddities(nn.Module):
    """Parameters of every shape: tables, a stack of them, a vector, a scalar, and one that lies column by column."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(60, 300, generator=generator))
        self.stack = nn.Parameter(torch.randn(4, 32, 64, generator=generator))
        self.small = nn.Parameter(torch.randn(8, 8, generator=generator))
        self.vector = nn.Parameter(torch.randn(5000, generator=generator))
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.turned = nn.Parameter(torch.randn(128, 64, generator=generator).t())


def section(states: str = "fp32", *, lr: float = 1e-2, **constants: float) -> TrainSection:
    return TrainSection.model_validate({"lr": lr, "seed": 3, "optimizer": {"states": states} | constants})


def optimizer_for(module: nn.Module, states: str, *, offload: Any = "none", **constants: float) -> Optimizer:
    return build_optimizer([module], section(states, **constants), Plan(offload=offload))


def train(module: nn.Module, optimizer: Optimizer, steps: Iterable[int]) -> None:
    """Take these steps with gradients that depend on the number of the step alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) + 0.3)
        optimizer.step()
        optimizer.zero_grad()


def trained(states: str, *, steps: int = 10, offload: str = "none") -> tuple[nn.Module, Optimizer]:
    module = Oddities()
    optimizer = optimizer_for(module, states, offload=offload)
    train(module, optimizer, range(steps))
    return module, optimizer


def state_bytes(optimizer: Optimizer) -> int:
    return sum(value.nbytes for states in optimizer.state.values() for key, value in states.items() if key != "step")


def test_fp32_states_are_those_of_torch() -> None:
    ours, optimizer = trained("fp32")
    assert type(optimizer) is AdamW
    theirs = Oddities()
    matrices = [each for each in theirs.parameters() if each.ndim >= 2]
    vectors = [each for each in theirs.parameters() if each.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    train(theirs, AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True), range(10))
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("states", FORMATS)
def test_groups_name_what_they_hold(states: str) -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight  # tied
    second.bias.requires_grad_(False)
    modules = [nn.ModuleDict({"first": first}), nn.ModuleDict({"second": second, "third": nn.Linear(8, 8)})]
    optimizer = build_optimizer(modules, section(states), Plan())
    named = {
        name: each
        for group in optimizer.param_groups
        for name, each in zip(group["param_names"], group["params"], strict=True)
    }
    assert len(named) == sum(len(group["params"]) for group in optimizer.param_groups) == 4
    assert named["third.bias"] is modules[1].third.bias
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert list(optimizer.state_dict()["param_groups"][1]["param_names"]) == ["first.bias", "third.bias"]


@pytest.mark.parametrize(("states", "num_bytes"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_states_weigh_what_their_format_says(states: str, num_bytes: float, offload: str) -> None:
    module = nn.Linear(1024, 512, bias=False)
    optimizer = optimizer_for(module, states, offload=offload)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer.step()
    assert state_bytes(optimizer) == num_bytes * 1024 * 512


def test_small_tensors_and_vectors_are_not_worth_eight_bits() -> None:
    module, optimizer = trained("8bit", steps=1)
    kept = {name: optimizer.state[each]["exp_avg"].dtype for name, each in module.named_parameters()}
    assert {name for name, dtype in kept.items() if dtype == torch.uint8} == {"table", "stack", "turned"}
    assert {kept["small"], kept["vector"], kept["scalar"]} == {torch.float32}


@pytest.mark.parametrize("states", FORMATS)
def test_states_on_the_host_change_no_bit(states: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _ = trained(states)
    monkeypatch.setattr(adamw, "PIECE", 16 * 300)  # so that the table crosses in four pieces, and others in several
    loads = []
    monkeypatch.setattr(
        StateStream, "cross", lambda self, sent, cross=StateStream.cross: loads.append(len(sent)) or cross(self, sent)
    )
    there, _ = trained(states, offload="optimizer")
    assert loads == [4 + 2 + 1 + 1 + 1 + 2] * 10
    for (name, one), other in zip(here.named_parameters(), there.named_parameters(), strict=True):
        assert torch.equal(one, other[1]), name


def test_a_load_crosses_alone_whatever_was_in_its_place_before() -> None:
    loads = [{"a": torch.ones(4), "b": torch.ones(2)} if number % 2 else {"b": torch.ones(3)} for number in range(8)]
    for load, arrived in zip(loads, StateStream(CPU).cross(loads), strict=True):
        assert [*arrived] == [*load]
        arrived["b"].add_(1)
    assert all((load["b"] == 2).all() for load in loads)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("states", FORMATS)
def test_a_run_goes_on_from_its_state_dict_as_if_it_had_not_stopped(states: str, offload: str) -> None:
    whole, _ = trained(states, steps=10, offload=offload)
    half, before = trained(states, steps=6, offload=offload)
    saved = copy.deepcopy(before.state_dict())
    after = optimizer_for(half, states, offload=offload)
    after.load_state_dict(saved)
    for one, other in zip(before.state.values(), after.state.values(), strict=True):
        assert {key: value.dtype for key, value in one.items()} == {key: value.dtype for key, value in other.items()}
    train(half, after, range(6, 10))
    for (name, one), other in zip(whole.named_parameters(), half.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_states_of_another_format_are_refused() -> None:
    (_, rounded), (_, quantised_) = trained("bf16"), trained("8bit")
    with pytest.raises(ValueError, match="another format"):
        quantised_.load_state_dict(rounded.state_dict())


@pytest.mark.parametrize("states", FORMATS)
def test_a_parameter_without_a_gradient_stays(states: str) -> None:
    module = Oddities()
    optimizer = optimizer_for(module, states)
    module.vector.grad = torch.ones_like(module.vector)
    optimizer.step()
    assert torch.equal(module.table, Oddities().table)
    assert not torch.equal(module.vector, Oddities().vector)


# Rounding by chance.


def moved_by(steps: range, name: str = "0/weight") -> Tensor:
    """Return what the numbers of the values of a parameter are moved by at these steps."""
    constants = Constants(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return words(torch.tensor([*steps]).float(), torch.tensor(salt(name)).int(), constants)[:, SALT]


def noise(steps: range, shape: tuple[int, int]) -> Tensor:
    (start,), length = runs(torch.empty(shape), slice(0, shape[0]))
    places = torch.arange(length, dtype=torch.int32).view(shape)
    return torch.stack([scrambled(start + each + places) for each in moved_by(steps)])


def test_rounding_is_right_on_average_and_always_to_a_neighbour() -> None:
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 3, 16)[:, None]
    draws = 1000
    rounded = to_bf16(values, noise(range(draws), (16, 32))).float()
    step = values.abs().log2().floor().exp2() * 2.0**-7  # between neighbours in bf16
    assert ((rounded - values).abs() < step).all()
    error = (rounded.double().mean(0) - values) / step
    # The mean of so many roundings lies within 1/2 / sqrt(draws) of the value; of 512 means none is six times as far.
    assert error.abs().max() < 6 * 0.5 / draws**0.5
    assert error.mean().abs() < 6 * 0.5 / (draws * values.numel()) ** 0.5
    to_nearest = (values.bfloat16().float() - values) / step
    assert to_nearest.abs().max() > 0.4, "these values are ones that rounding to the nearest gets wrong"


def test_what_bf16_can_hold_is_not_rounded() -> None:
    special = [0.0, 1.0, -2.5, 3e-39, float("inf"), -float("inf"), float("nan")]
    exact = torch.tensor(special).bfloat16().float()
    exact = torch.cat([exact, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])  # the GPU's NaN
    for bits in (0, 0x7FFF, 0xFFFF):
        rounded = to_bf16(exact, torch.full(exact.shape, bits, dtype=torch.int32))
        assert torch.equal(rounded[:-2].float(), exact[:-2])
        assert rounded[-2:].isnan().all()


def test_the_bits_of_the_noise_are_fair_and_know_nothing_of_each_other() -> None:
    drawn = noise(range(32), (32, 128))
    bits = torch.stack([(drawn >> bit) & 1 for bit in range(32)]).double()
    spread = 0.5 / drawn.numel() ** 0.5
    assert (bits.mean((1, 2, 3)) - 0.5).abs().max() < 6 * spread
    for one, other in [
        (bits[:, 1:], bits[:, :-1]),  # of successive steps
        (bits[:, :, 1:], bits[:, :, :-1]),  # of neighbouring rows
        (bits[..., 1:], bits[..., :-1]),  # of neighbouring columns
        (bits[:16], bits[16:]),  # of the two moments
    ]:
        alike = (one == other).double().mean((1, 2, 3))
        assert (alike - 0.5).abs().max() < 6 * spread * 1.1


def test_a_value_has_one_number_in_whichever_rows_it_is_met() -> None:
    parameter = torch.empty(3, 5, 7)
    for rows in (slice(0, 15), slice(4, 9)):
        starts, length = runs(parameter, rows)
        assert (starts.tolist(), length) == ([7 * rows.start], 7 * (rows.stop - rows.start))


def test_names_and_steps_have_noise_of_their_own() -> None:
    assert len({*moved_by(range(1, 1000)).tolist(), *moved_by(range(1, 1000), "0/bias").tolist()}) == 2 * 999


def test_a_second_moment_falls_where_rounding_to_the_nearest_holds_it() -> None:
    """Large gradients, then small ones, at a beta2 whose step is a quarter of bf16's: only chance gets it down."""
    means = {}
    nearest = torch.zeros(32, 32, dtype=torch.bfloat16)
    for states in ("fp32", "bf16"):
        module = nn.Linear(32, 32, bias=False)
        optimizer = optimizer_for(module, states, beta2=0.999)
        for step in range(1500):
            gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            module.weight.grad = gradient * (1.0 if step < 500 else 0.01)
            optimizer.step()
            if states == "bf16":
                nearest = (nearest.float() * 0.999 + module.weight.grad.square() * 0.001).bfloat16()
        means[states] = float(optimizer.state[module.weight]["exp_avg_sq"].float().mean())
    assert means["bf16"] == pytest.approx(means["fp32"], rel=0.02)
    assert nearest.float().mean() > 2 * means["fp32"], "the old gradients are never forgotten"


# Eight bits.


def test_codes_stand_for_256_values_over_seven_decades() -> None:
    for signed in (True, False):
        book = codebook(CPU, signed=signed)
        assert book.unique().numel() == 256
        assert torch.equal(book, book.sort().values)
        assert book[-1] == 1
        assert 0 in book
        assert book[book > 0].min() < 1e-6
    signed = codebook(CPU, signed=True)
    assert torch.equal(signed[:127], -signed[128:255].flip(0)), "all but one has its negative"


@pytest.mark.parametrize("width", [256, 512, 300, 7])
@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_eight_bits_keep_a_value_to_a_few_percent(width: int, scale: float) -> None:
    values = torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * scale
    book = codebook(CPU, signed=True)
    codes, scales = quantised(values, book)
    assert codes.shape == values.shape
    assert scales.shape == (40, -(-width // 256))
    back = restored(codes, scales, book)
    assert (back - values).norm() < 0.02 * values.norm()
    assert (back - values).abs().amax() < 0.01 * values.abs().amax()


def test_what_has_been_quantised_stays_as_it_is() -> None:
    book = codebook(CPU, signed=False)
    once = quantised(torch.rand(40, 300, generator=torch.Generator().manual_seed(0)), book)
    twice = quantised(restored(*once, book), book)
    assert torch.equal(once[0], twice[0])
    assert torch.equal(once[1], twice[1])


def test_a_block_of_zeros_stays_zero_and_a_block_with_nan_shows_it() -> None:
    values = torch.zeros(2, 512)
    values[1, 3] = torch.nan
    book = codebook(CPU, signed=True)
    back = restored(*quantised(values, book), book)
    assert (back[0] == 0).all()
    assert back[1, :256].isnan().any()
    assert (back[1, 256:] == 0).all()


def test_blocks_end_with_their_row() -> None:
    values = torch.ones(2, 300)
    values[1] = 1000.0
    _, scales = quantised(values, codebook(CPU, signed=True))
    assert scales.tolist() == [[1, 1], [1000, 1000]]


def test_a_row_that_is_no_longer_seen_does_not_leap() -> None:
    """A value with a gradient of 1/10000 of its block's largest: eight bits cannot hold the square of that."""
    second = torch.full((1, 256), 1e-8)
    second[0, 0] = 1.0
    assert quantised(second, codebook(CPU, signed=False))[0][0, 1] == 0
    courses = {}
    for states in ("fp32", "8bit"):
        module = nn.Linear(256, 16, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = optimizer_for(module, states, lr=1e-3)
        for step in range(20):
            module.weight.grad = torch.zeros(16, 256)
            if step < 5:
                module.weight.grad[:, 0], module.weight.grad[:, 1:] = 0.1, 1e-5
            optimizer.step()
        courses[states] = module.weight.detach()
    # Twenty steps of at most lr each. Divided by epsilon alone, one step would be a hundred times lr.
    assert courses["fp32"].abs().max() < 0.02
    assert courses["8bit"].abs().max() < 0.02
