"""fp8 linear layers: accuracy, saved tensors, and which layers are converted."""

import copy
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from trimaran.core import Plan, UserError
from trimaran.models import PRESETS, ModelSpec
from trimaran.nets import Network, decoder_network, initialise
from trimaran.parallel import (
    Fp8Linear,
    apply_recompute,
    autocast,
    convert_linears,
    linear,
    override_precision,
    require_fp8_device,
)

CPU = torch.device("cpu")
SPEC = replace(PRESETS["tiny"], layers=2, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, tied=False)
TOKENS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(7))
# The relative error of a matmul. e4m3 has 3 mantissa bits and e5m2 has 2, so an operand errs by up to 1/16 and 1/8;
# averaged over the values between two powers of two that is 2.6 % and 5.2 %.
FORWARD, BACKWARD = 0.042, 0.065


@pytest.fixture(autouse=True)
def fast_matmuls() -> Iterator[None]:
    """Disable oneDNN, whose fp8 matmul on a CPU is a hundred times slower than casting first."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(bias: bool = False, dtype: torch.dtype = torch.float32) -> nn.Linear:
    made = nn.Linear(256, 320, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(0.02 * numbers(320, 256, seed=1))
        if bias:
            made.bias.copy_(numbers(320, seed=2))
    return made


def in_fp8(module: nn.Linear) -> nn.Linear:
    module.__class__ = Fp8Linear
    return module


def relative_error(ours: Tensor | None, true: Tensor | None) -> float:
    assert ours is not None
    assert true is not None
    return float((ours.detach().double() - true).norm() / true.norm())


def network_of(spec: ModelSpec = SPEC, **patterns: str) -> Network:
    network = decoder_network(spec)
    initialise(network.module, seed=0, spec=spec)
    override_precision(network, {name.replace("__", "."): each for name, each in patterns.items()}, CPU)
    return network


def gradients(network: Network) -> list[Tensor]:
    """Return the gradient of each parameter, and the loss."""
    with autocast(Plan(precision="fp8"), CPU):
        logits, _ = network.forward({"tokens": TOKENS})
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), TOKENS.flatten())
    loss.backward()
    found = [each.grad for each in network.module.parameters()]
    return [*(each for each in found if each is not None), loss.detach()]


class Fp8MatmulCounter(TorchDispatchMode):
    """Counts the fp8 matmuls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))

    @property
    def num(self) -> int:
        return self.calls[torch.ops.aten._scaled_mm.default]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [32, 19])
def test_all_three_matmuls_are_close_to_the_exact_ones(rows: int, bias: bool, dtype: torch.dtype) -> None:
    ours, true = in_fp8(layer(bias, dtype)), layer(bias, dtype).double()
    x, y = numbers(2, rows, 256).requires_grad_(), numbers(2, rows, 256).double().requires_grad_()
    gradient = 1e-4 * numbers(2, rows, 320, seed=3)
    with Fp8MatmulCounter() as seen, autocast(Plan(precision="fp8"), CPU):
        out = ours(x)
        out.backward(gradient.bfloat16())
    (expected := true(y)).backward(gradient.double())
    assert seen.num == 3
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected.detach()) < FORWARD
    assert relative_error(x.grad, y.grad) < BACKWARD
    assert relative_error(ours.weight.grad, true.weight.grad) < BACKWARD
    assert ours.weight.grad is not None
    assert ours.weight.grad.dtype == dtype
    if bias:
        assert relative_error(ours.bias.grad, true.bias.grad) < 0.01


def test_powers_of_two_are_exact() -> None:
    """Values that fp8 represents exactly give exact results, so a wrong layout or scale would show."""

    def powers(*shape: int, seed: int) -> Tensor:
        drawn = torch.Generator().manual_seed(seed)
        return 2.0 ** torch.randint(-3, 3, shape, generator=drawn) * numbers(*shape, seed=seed).sign()

    x, weight = powers(48, 64, seed=1).requires_grad_(), powers(80, 64, seed=2).requires_grad_()
    gradient = powers(48, 80, seed=3)
    out = linear(x, weight)
    out.backward(gradient.bfloat16())
    ulp = {"rtol": 2**-8, "atol": 2**-8}  # bf16 rounds the sums
    torch.testing.assert_close(out.float(), x.detach() @ weight.detach().T, **ulp)
    torch.testing.assert_close(x.grad, gradient @ weight.detach(), **ulp)
    torch.testing.assert_close(weight.grad, gradient.T @ x.detach(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("size", [1e-12, 1e-5, 1e8])
def test_the_scale_follows_the_values(size: float) -> None:
    x, weight = numbers(32, 256), numbers(64, 256, seed=1)
    out = linear(x * size, weight)
    assert relative_error(out / size, x.double() @ weight.double().T) < FORWARD


def test_zeros_stay_zeros() -> None:
    x, weight = torch.zeros(32, 64, requires_grad=True), torch.zeros(64, 64, requires_grad=True)
    out = linear(x, weight)
    out.backward(torch.zeros_like(out))
    assert x.grad is not None
    assert weight.grad is not None
    assert not any(each.any() for each in (out, x.grad, weight.grad))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_nan_or_inf_is_never_hidden(bad: float) -> None:
    x, weight, gradient = numbers(32, 64), numbers(64, 64, seed=1), numbers(32, 64, seed=2).bfloat16()
    for spoilt in (0, 1, 2):
        tensors = [x.clone(), weight.clone(), gradient.clone()]
        tensors[spoilt][3, 5] = bad
        x_, weight_ = tensors[0].requires_grad_(), tensors[1].requires_grad_()
        out = linear(x_, weight_)
        out.backward(tensors[2])
        assert x_.grad is not None
        assert weight_.grad is not None
        assert out.isfinite().all() == (spoilt == 2)
        assert not (x_.grad.isfinite().all() and weight_.grad.isfinite().all())


def test_a_shard_whose_size_is_not_a_multiple_of_sixteen_uses_bf16() -> None:
    x, weight = numbers(5, 24), numbers(40, 24, seed=1)
    with Fp8MatmulCounter() as seen:
        out = linear(x, weight)
    assert seen.num == 0
    assert torch.equal(out, nn.functional.linear(x.bfloat16(), weight.bfloat16()))
    assert linear(numbers(0, 64), numbers(64, 64)).shape == (0, 64)


def test_saved_activations_are_one_byte_per_value_without_a_copy_of_the_weight() -> None:
    ours, saved = in_fp8(layer()), []
    x = numbers(64, 256).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        ours(x)
    large = [each for each in saved if each.numel() > 1]
    assert {(each.dtype, tuple(each.shape)) for each in large} == {
        (torch.float8_e4m3fn, (64, 256)),
        (torch.float32, (320, 256)),
    }
    assert any(each.data_ptr() == ours.weight.data_ptr() for each in large)


def test_frozen_tensors_cost_no_matmul_and_no_memory() -> None:
    ours = in_fp8(layer())
    ours.weight.requires_grad_(False)
    x, saved = numbers(64, 256).requires_grad_(), []
    with Fp8MatmulCounter() as seen:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
            out = ours(x)
        out.backward(torch.ones_like(out))
        assert seen.num == 2
    assert torch.float8_e4m3fn not in {each.dtype for each in saved}
    assert x.grad is not None
    assert ours.weight.grad is None
    ours.weight.requires_grad_(True)
    with Fp8MatmulCounter() as seen:
        out = ours(x.detach())
        out.backward(torch.ones_like(out))
    assert seen.num == 2
    assert ours.weight.grad is not None


def test_large_layers_of_the_blocks_become_fp8_with_unchanged_names() -> None:
    network, plain = network_of(layers__1__mlp="bf16"), network_of()
    convert_linears(network)
    names = {name for name, each in network.module.named_modules() if isinstance(each, Fp8Linear)}
    few = {f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")}
    # Two key-value heads of 64 give 128 features: too few.
    assert names == few | {f"layers.{layer}.self_attn.{part}_proj" for layer in range(2) for part in ("q", "o")}
    assert list(network.module.state_dict()) == list(plain.module.state_dict())
    ours, theirs = gradients(network), gradients(plain)
    assert 0 < abs(ours[-1] - theirs[-1]) < 0.01 * theirs[-1]
    assert max(relative_error(one, other) for one, other in zip(ours, theirs, strict=True)) < 0.15


def test_a_copied_network_is_independent() -> None:
    network = network_of()
    convert_linears(network)
    copied = copy.deepcopy(network.module)
    with torch.no_grad():
        copied.get_parameter("layers.0.mlp.gate_proj.weight").zero_()
    assert isinstance(copied.get_submodule("layers.0.mlp.gate_proj"), Fp8Linear)
    assert network.module.get_parameter("layers.0.mlp.gate_proj.weight").abs().max() > 0


@pytest.mark.slow
def test_a_compiled_layer_is_bitwise_equal() -> None:
    plain, compiled = in_fp8(layer()), in_fp8(layer())
    compiled.compile(backend="aot_eager", fullgraph=True)
    for ours, theirs in zip(*(all_of(each) for each in (compiled, plain)), strict=True):
        assert torch.equal(ours, theirs)


def all_of(module: nn.Linear) -> list[Tensor]:
    """Return the output of a layer and both gradients."""
    x = numbers(48, 256).bfloat16().requires_grad_()
    out = module(x)
    out.backward(numbers(48, 320, seed=3).bfloat16())
    assert x.grad is not None
    assert module.weight.grad is not None
    return [out, x.grad, module.weight.grad]


def test_a_compiled_block_is_one_graph_and_as_close_to_bf16_as_an_eager_one() -> None:
    spec = replace(SPEC, layers=1)
    plain, compiled = network_of(spec), network_of(spec)
    convert_linears(compiled)
    apply_recompute(compiled, Plan(recompute="selective"), None)
    compiled.blocks[0].compile(backend="aot_eager", fullgraph=True)
    ours, theirs = gradients(compiled), gradients(plain)
    assert 0 < abs(ours[-1] - theirs[-1]) < 0.01 * theirs[-1]
    assert max(relative_error(one, other) for one, other in zip(ours, theirs, strict=True)) < 0.15


# Five of a block's seven matmuls are large enough for fp8. With every second one saved, three are recomputed.
@pytest.mark.parametrize(("mode", "again"), [("none", 0), ("selective", 2 * 3), ("full", 2 * 5)])
def test_recompute_handles_fp8_matmuls_and_changes_no_bit(mode: Any, again: int) -> None:
    plain, network = network_of(), network_of()
    for each in (plain, network):
        convert_linears(each)
    apply_recompute(network, Plan(recompute=mode), None)
    with Fp8MatmulCounter() as seen:
        ours = gradients(network)
    assert seen.num == 2 * 5 * 3 + again
    with Fp8MatmulCounter():  # a dispatch mode changes which CPU kernels run
        theirs = gradients(plain)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_a_device_without_fp8_and_a_model_without_large_layers_are_refused() -> None:
    with pytest.raises(UserError, match="P031: a CPU does not compute in fp8"):
        require_fp8_device("cpu")
    with pytest.raises(UserError, match="P034"):
        convert_linears(network_of(replace(SPEC, hidden=64, head_dim=16, ffn=128)))
