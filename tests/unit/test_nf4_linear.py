from typing import Any

import pytest
import torch
from torch import nn

from trimaran.core import AdapterSection
from trimaran.nets import (
    Nf4Linear,
    Nf4LoraLinear,
    add_adapter,
    loadable_weights,
    merged_weight,
    pack_frozen_weights,
    packed_parameters,
    weight_to_fill,
)


def frozen_linear(inputs: int = 128, outputs: int = 96, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).requires_grad_(False)


def packed(linear: nn.Linear) -> nn.Module:
    """Return a module that holds the layer, with its weight packed."""
    weight = linear.weight.detach().clone()
    owner = nn.Sequential(linear)
    pack_frozen_weights([linear])
    with weight_to_fill(owner, "0.weight", loadable_weights(owner)["0.weight"]) as target:
        target.copy_(weight)
    return owner


def test_a_packed_layer_computes_what_bitsandbytes_computes() -> None:
    from bitsandbytes.nn import Linear4bit, Params4bit  # noqa: PLC0415  it imports torch's compiler

    linear = frozen_linear()
    theirs = Linear4bit(128, 96, compute_dtype=torch.float32, quant_type="nf4")
    weight = linear.weight.detach().clone()
    options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}
    theirs.weight = Params4bit(weight, requires_grad=False, **options)
    theirs.bias = linear.bias
    theirs.to("cpu")
    ours = packed(linear)
    assert isinstance(linear, Nf4Linear)
    x = torch.randn(2, 5, 128)
    rows = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(row) for layer, row in zip((ours, theirs), rows, strict=True)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(rows[0].grad, rows[1].grad)


def test_a_packed_weight_takes_a_little_over_half_a_byte_a_value() -> None:
    linear = frozen_linear(256, 64)
    packed(linear)
    num_bytes = sum(each.numel() * each.element_size() for each in packed_parameters(linear))
    assert num_bytes == 256 * 64 // 2 + 256 * 64 // 64 * 4


def test_names_and_shapes_of_the_base_do_not_change() -> None:
    linear = frozen_linear()
    owner = nn.Sequential(linear)
    names = {name: each.shape for name, each in owner.named_parameters()}
    add_adapter(linear, AdapterSection(rank=4))
    pack_frozen_weights([linear])
    assert {name: each.shape for name, each in loadable_weights(owner).items()} == names


def test_an_adapter_on_a_packed_layer_is_trained_and_merged_with_the_weight_that_computes() -> None:
    linear = frozen_linear(bias=False)
    add_adapter(linear, AdapterSection(rank=4, alpha=8))
    owner = packed(linear)
    assert isinstance(linear, Nf4LoraLinear)
    with torch.no_grad():
        linear.lora_A.normal_()
        linear.lora_B.normal_()
    x = torch.randn(3, 128)
    output = owner(x)
    torch.testing.assert_close(output, x @ merged_weight(linear).t(), rtol=1e-4, atol=1e-4)
    output.square().sum().backward()
    assert {name for name, each in owner.named_parameters() if each.grad is not None} == {"0.lora_A", "0.lora_B"}


def test_layers_whose_rows_have_no_whole_blocks_stay_unpacked() -> None:
    linear = frozen_linear(inputs=100)
    pack_frozen_weights([linear])
    assert type(linear) is nn.Linear


@pytest.mark.parametrize("compiled", [False, True])
def test_the_unpacked_weight_is_not_kept_for_backward(compiled: bool) -> None:
    owner = packed(frozen_linear())
    layer = torch.compile(owner, backend="aot_eager") if compiled else owner
    kept: list[torch.Tensor] = []
    x = torch.randn(3, 128, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x).sum().backward()
    assert kept
    assert all(each.numel() * each.element_size() <= 128 * 96 // 2 for each in kept)
