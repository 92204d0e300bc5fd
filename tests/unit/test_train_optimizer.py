"""AdamW's states: their size, how they are rounded, and that offloading them changes no result."""

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from trimaran.core import Plan, TrainSection
from trimaran.parallel import (
    NOISE_OFFSET,
    AdamWConstants,
    LowMemoryAdamW,
    ShardAdamW,
    StateStream,
    build_optimizer,
    codebook,
    dequantize,
    hash_int32,
    hash_text,
    index_runs,
    quantize,
    step_constants,
    to_bf16,
)

CPU = torch.device("cpu")
FORMATS = ["fp32", "bf16", "8bit"]


class ManyShapes(nn.Module):
    """Parameters of many shapes: matrices, a 3-D tensor, a vector, a scalar, and a transposed matrix."""

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
    """Take these steps with gradients that depend only on the step number."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in module.parameters():
            parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(torch.randn(parameter.shape, generator=generator) + 0.3)
        optimizer.step()
        optimizer.zero_grad()


def trained(states: str, *, steps: int = 10, offload: str = "none") -> tuple[nn.Module, Optimizer]:
    module = ManyShapes()
    optimizer = optimizer_for(module, states, offload=offload)
    train(module, optimizer, range(steps))
    return module, optimizer


def state_bytes(optimizer: Optimizer) -> int:
    return sum(value.nbytes for states in optimizer.state.values() for key, value in states.items() if key != "step")


def test_fp32_states_equal_those_of_torch() -> None:
    ours, optimizer = trained("fp32")
    assert type(optimizer) is ShardAdamW
    theirs = ManyShapes()
    matrices = [each for each in theirs.parameters() if each.ndim >= 2]
    vectors = [each for each in theirs.parameters() if each.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    train(theirs, AdamW(groups, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, fused=True), range(10))
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("states", FORMATS)
def test_groups_have_the_names_of_their_parameters(states: str) -> None:
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
    assert named["third.bias"] is modules[1].get_parameter("third.bias")
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert list(optimizer.state_dict()["param_groups"][1]["param_names"]) == ["first.bias", "third.bias"]


@pytest.mark.parametrize(("states", "num_bytes"), [("fp32", 8), ("bf16", 4), ("8bit", 2 + 8 / 256)])
@pytest.mark.parametrize("offload", ["none", "optimizer"])
def test_states_take_the_bytes_of_their_format(states: str, num_bytes: float, offload: str) -> None:
    module = nn.Linear(1024, 512, bias=False)
    optimizer = optimizer_for(module, states, offload=offload)
    module.weight.grad = torch.randn_like(module.weight)
    optimizer.step()
    assert state_bytes(optimizer) == num_bytes * 1024 * 512


def test_small_tensors_and_vectors_keep_fp32_moments() -> None:
    module, optimizer = trained("8bit", steps=1)
    dtypes = {name: optimizer.state[each]["exp_avg"].dtype for name, each in module.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.uint8} == {"table", "stack", "turned"}
    assert {dtypes["small"], dtypes["vector"], dtypes["scalar"]} == {torch.float32}


@pytest.mark.parametrize("states", FORMATS)
def test_states_on_the_host_give_bitwise_equal_weights_in_chunks_of_any_size(states: str) -> None:
    modules = []
    for on_host, chunk_values in ((False, 2**23), (True, 2**23), (True, 16 * 300)):  # the table has four small chunks
        module = ManyShapes()
        optimizer = LowMemoryAdamW(
            [{"params": [*module.named_parameters()]}],
            defaults={"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1},
            states=states, seed=0, on_host=on_host, chunk_values=chunk_values,
        )  # fmt: skip
        train(module, optimizer, range(10))
        modules.append(module)
    for other in modules[1:]:
        for (name, one), two in zip(modules[0].named_parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two), name


def test_a_chunk_is_not_affected_by_the_last_user_of_its_buffer() -> None:
    chunks = [{"a": torch.ones(4), "b": torch.ones(2)} if number % 2 else {"b": torch.ones(3)} for number in range(8)]
    for chunk, on_device in zip(chunks, StateStream(CPU).stream(chunks), strict=True):
        assert [*on_device] == [*chunk]
        on_device["b"].add_(1)
    assert all((chunk["b"] == 2).all() for chunk in chunks)


@pytest.mark.parametrize("offload", ["none", "optimizer"])
@pytest.mark.parametrize("states", FORMATS)
def test_resuming_from_a_state_dict_gives_bitwise_equal_weights(states: str, offload: str) -> None:
    uninterrupted, _ = trained(states, steps=10, offload=offload)
    resumed, before = trained(states, steps=6, offload=offload)
    saved = copy.deepcopy(before.state_dict())
    after = optimizer_for(resumed, states, offload=offload)
    after.load_state_dict(saved)
    for one, other in zip(before.state.values(), after.state.values(), strict=True):
        assert {key: value.dtype for key, value in one.items()} == {key: value.dtype for key, value in other.items()}
    train(resumed, after, range(6, 10))
    for (name, one), other in zip(uninterrupted.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_states_of_another_format_are_refused() -> None:
    (_, rounded), (_, quantised_) = trained("bf16"), trained("8bit")
    with pytest.raises(ValueError, match="another format"):
        quantised_.load_state_dict(rounded.state_dict())


@pytest.mark.parametrize("states", FORMATS)
def test_a_parameter_without_a_gradient_does_not_change(states: str) -> None:
    module = ManyShapes()
    optimizer = optimizer_for(module, states)
    module.vector.grad = torch.ones_like(module.vector)
    optimizer.step()
    assert torch.equal(module.table, ManyShapes().table)
    assert not torch.equal(module.vector, ManyShapes().vector)


# Stochastic rounding.


def noise_offsets(steps: range, name: str = "0/weight") -> Tensor:
    """Return what is added to the element indices of a parameter at these steps."""
    constants = AdamWConstants(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    hashes = torch.tensor(hash_text(name)).int()
    return step_constants(torch.tensor([*steps]).float(), hashes, constants)[:, NOISE_OFFSET]


def noise(steps: range, shape: tuple[int, int]) -> Tensor:
    (start,), length = index_runs(torch.empty(shape), slice(0, shape[0]))
    indices = torch.arange(length, dtype=torch.int32).view(shape)
    return torch.stack([hash_int32(start + each + indices) for each in noise_offsets(steps)])


def test_stochastic_rounding_is_right_on_average_and_always_to_a_neighbour() -> None:
    values = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 3, 16)[:, None]
    draws = 1000
    rounded = to_bf16(values, noise(range(draws), (16, 32))).float()
    step = values.abs().log2().floor().exp2() * 2.0**-7  # between neighbours in bf16
    assert ((rounded - values).abs() < step).all()
    error = (rounded.double().mean(0) - values) / step
    # The standard deviation of the mean is at most 1/2 / sqrt(draws); none of 512 means is six times as far off.
    assert error.abs().max() < 6 * 0.5 / draws**0.5
    assert error.mean().abs() < 6 * 0.5 / (draws * values.numel()) ** 0.5
    to_nearest = (values.bfloat16().float() - values) / step
    assert to_nearest.abs().max() > 0.4, "rounding to nearest would be far off for these values"


def test_values_that_bf16_represents_are_not_rounded() -> None:
    special = [0.0, 1.0, -2.5, 3e-39, float("inf"), -float("inf"), float("nan")]
    exact = torch.tensor(special).bfloat16().float()
    exact = torch.cat([exact, torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)])  # the GPU's NaN
    for bits in (0, 0x7FFF, 0xFFFF):
        rounded = to_bf16(exact, torch.full(exact.shape, bits, dtype=torch.int32))
        assert torch.equal(rounded[:-2].float(), exact[:-2])
        assert rounded[-2:].isnan().all()


def test_the_bits_of_the_noise_are_fair_and_uncorrelated() -> None:
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


def test_an_element_has_the_same_index_in_any_range_of_rows() -> None:
    parameter = torch.empty(3, 5, 7)
    for rows in (slice(0, 15), slice(4, 9)):
        starts, length = index_runs(parameter, rows)
        assert (starts.tolist(), length) == ([7 * rows.start], 7 * (rows.stop - rows.start))


def test_names_and_steps_have_different_noise() -> None:
    offsets = noise_offsets(range(1, 1000)), noise_offsets(range(1, 1000), "0/bias")
    assert len({*offsets[0].tolist(), *offsets[1].tolist()}) == 2 * 999


def test_a_second_moment_shrinks_where_rounding_to_nearest_would_hold_it() -> None:
    """Large gradients, then small ones, at a beta2 whose step is a quarter of bf16's."""
    means = {}
    nearest = torch.zeros(32, 32, dtype=torch.bfloat16)
    for states in ("fp32", "bf16"):
        module = nn.Linear(32, 32, bias=False)
        optimizer = optimizer_for(module, states, beta2=0.999)
        for step in range(900):
            gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(step))
            module.weight.grad = gradient * (1.0 if step < 60 else 0.01)
            optimizer.step()
            if states == "bf16":
                nearest = (nearest.float() * 0.999 + module.weight.grad.square() * 0.001).bfloat16()
        means[states] = float(optimizer.state[module.weight]["exp_avg_sq"].float().mean())
    assert means["bf16"] == pytest.approx(means["fp32"], rel=0.02)
    assert nearest.float().mean() > 2 * means["fp32"], "rounding to nearest never forgets the large gradients"


# 8-bit quantization.


def test_codes_stand_for_256_values_over_seven_decades() -> None:
    for signed in (True, False):
        book = codebook(CPU, signed=signed)
        assert book.unique().numel() == 256
        assert torch.equal(book, book.sort().values)
        assert book[-1] == 1
        assert 0 in book
        assert book[book > 0].min() < 1e-6
    signed = codebook(CPU, signed=True)
    assert torch.equal(signed[:127], -signed[128:255].flip(0)), "every value but the largest has its negative"


@pytest.mark.parametrize("width", [256, 512, 300, 7])
@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_quantized_values_are_within_a_few_percent(width: int, scale: float) -> None:
    values = torch.randn(40, width, generator=torch.Generator().manual_seed(0)) * scale
    book = codebook(CPU, signed=True)
    codes, scales = quantize(values, book)
    assert codes.shape == values.shape
    assert scales.shape == (40, -(-width // 256))
    back = dequantize(codes, scales, book)
    assert (back - values).norm() < 0.02 * values.norm()
    assert (back - values).abs().amax() < 0.01 * values.abs().amax()


def test_quantizing_twice_changes_nothing() -> None:
    book = codebook(CPU, signed=False)
    once = quantize(torch.rand(40, 300, generator=torch.Generator().manual_seed(0)), book)
    twice = quantize(dequantize(*once, book), book)
    assert torch.equal(once[0], twice[0])
    assert torch.equal(once[1], twice[1])


def test_a_block_of_zeros_stays_zero_and_a_block_with_a_nan_keeps_one() -> None:
    values = torch.zeros(2, 512)
    values[1, 3] = torch.nan
    book = codebook(CPU, signed=True)
    back = dequantize(*quantize(values, book), book)
    assert (back[0] == 0).all()
    assert back[1, :256].isnan().any()
    assert (back[1, 256:] == 0).all()


def test_blocks_end_with_their_row() -> None:
    values = torch.ones(2, 300)
    values[1] = 1000.0
    _, scales = quantize(values, codebook(CPU, signed=True))
    assert scales.tolist() == [[1, 1], [1000, 1000]]


def test_a_weight_without_further_gradients_does_not_jump() -> None:
    """A gradient of 1/10000 of its block's largest: 8 bits cannot represent its square."""
    second = torch.full((1, 256), 1e-8)
    second[0, 0] = 1.0
    assert quantize(second, codebook(CPU, signed=False))[0][0, 1] == 0
    weights = {}
    for states in ("fp32", "8bit"):
        module = nn.Linear(256, 16, bias=False)
        nn.init.zeros_(module.weight)
        optimizer = optimizer_for(module, states, lr=1e-3)
        for step in range(20):
            module.weight.grad = torch.zeros(16, 256)
            if step < 5:
                module.weight.grad[:, 0], module.weight.grad[:, 1:] = 0.1, 1e-5
            optimizer.step()
        weights[states] = module.weight.detach()
    # Twenty steps of at most lr each. Divided by epsilon alone, one step would be a hundred times lr.
    assert weights["fp32"].abs().max() < 0.02
    assert weights["8bit"].abs().max() < 0.02
