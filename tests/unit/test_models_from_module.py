"""Outlines of live modules: exact parameters, FLOPs computed by hand, and the bytes that autograd really saves."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from trimaran.core import UserError
from trimaran.models import Opaque, Outline, outline_from_hf, outline_from_module


class Convolutions(nn.Module):
    """Two convolutions and a head, with a parameter outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU()
        )
        self.head = nn.Linear(16, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.features(pixels).mean((2, 3))) * self.scale


def encoder(layers: int = 3, **place: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, **place)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def llama(kind: type = LlamaForCausalLM) -> Any:
    shape = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    return kind(LlamaConfig(**shape, intermediate_size=48, vocab_size=64))


def bytes_saved_by_autograd(module: nn.Module, *inputs: Tensor) -> int:
    """Return the bytes that a real forward saves for backward, without the weights."""
    weights = {each.untyped_storage()._cdata for each in [*module.parameters(), *module.buffers()]}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage()._cdata, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return sum(each.untyped_storage().nbytes() for key, each in saved.items() if key not in weights)


def blocks(outline: Outline) -> list[Opaque]:
    return [step.block for step in outline.steps() if isinstance(step.block, Opaque)]


CASES = [
    (Convolutions, torch.randn(4, 3, 16, 16)),
    (encoder, torch.randn(2, 10, 32)),
    (lambda: llama(LlamaModel), torch.zeros(2, 16, dtype=torch.long)),
]


@pytest.mark.parametrize(("build", "example"), CASES, ids=["convolutions", "encoder", "llama"])
def test_parameters_are_exact_and_saved_bytes_equal_what_autograd_saves(build: Any, example: Tensor) -> None:
    module = build()
    outline = outline_from_module(module, example)
    assert outline.num_parameters == sum(each.numel() for each in module.parameters())
    saved = sum(block.saved_bytes for block in blocks(outline)) * len(example)
    assert saved == bytes_saved_by_autograd(module, example)


def test_the_blocks_of_a_convolutional_network_are_in_order_with_their_flops() -> None:
    outline = outline_from_module(Convolutions(), torch.randn(4, 3, 16, 16))
    assert [block.name for block in blocks(outline)] == ["Conv2d", "BatchNorm2d", "Conv2d", "Linear"]
    # Two operations for each output, input channel and tap of a 3 x 3 kernel, over 16 x 16 pixels.
    flops = [2 * 256 * 8 * 3 * 9, 0, 2 * 256 * 16 * 8 * 9, 2 * 16 * 10]
    assert [block.sample_flops for block in blocks(outline)] == flops
    assert [block.output_bytes for block in blocks(outline)] == [4 * 8 * 256, 4 * 8 * 256, 4 * 16 * 256, 40]
    # Pixels, and a quarter of the weights.
    assert blocks(outline)[0].moved_bytes == 4 * (3 * 256 + 8 * 256) + 4 * 224 / 4
    assert outline.main.extras == 1


def test_equal_layers_are_one_run_and_their_flops_are_the_textbook_ones() -> None:
    outline = outline_from_module(encoder(), torch.randn(2, 10, 32))
    ((layer, count),) = outline.main.runs
    matmuls = 2 * 10 * (4 * 32 * 32 + 2 * 32 * 64)
    attention = 2 * 2 * 10 * 10 * 32
    assert (count, layer.flops(1, 1)) == (3, matmuls + attention)


def test_a_large_network_is_traced_without_memory_and_not_changed() -> None:
    big = encoder(device="meta", dtype=torch.bfloat16)
    before = {name: id(each) for name, each in big.named_parameters()}
    outline = outline_from_module(big, torch.empty(1, 2**20, 32, device="meta", dtype=torch.bfloat16))
    assert blocks(outline)[0].output_bytes == 2**20 * 32 * 2
    assert {name: id(each) for name, each in big.named_parameters()} == before
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in big.modules())


def test_a_transformers_model_gets_the_outline_of_its_configuration() -> None:
    module = llama()
    outline = outline_from_module(module)
    assert outline == outline_from_hf(module.config.to_dict(), where="", name="LlamaForCausalLM")
    assert [block.name for block in blocks(outline_from_module(llama(LlamaModel), torch.zeros(1, 8).long()))] == [
        "Embedding", "LlamaDecoderLayer", "LlamaDecoderLayer", "LlamaDecoderLayer", "LlamaDecoderLayer", "LlamaRMSNorm",
    ]  # fmt: skip


def test_frozen_blocks_are_a_separate_tower() -> None:
    module = nn.Sequential(encoder(2), nn.Linear(32, 4))
    module[0].requires_grad_(False)
    first, second = outline_from_module(module, torch.randn(2, 10, 32)).towers
    assert (first.frozen, first.layers, second.frozen, second.layers) == (True, 2, False, 1)
    assert blocks(outline_from_module(module, torch.randn(2, 10, 32)))[0].saved_bytes == 0


def test_the_weights_of_a_block_that_runs_twice_count_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, values: Tensor) -> Tensor:
            for layer in [*self.layers, *self.layers]:
                values = layer(values)
            return values

    outline = outline_from_module(Twice(), torch.randn(2, 8))
    assert [block.parameters for block in blocks(outline)] == [72, 72, 0, 0]
    assert {block.sample_flops for block in blocks(outline)} == {128.0}


def test_modules_that_read_values_or_have_no_example_are_refused() -> None:
    class Peeking(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum().item() > 0 else input

    with pytest.raises(UserError, match=r"M030.*Peeking does not run on fake tensors"):
        outline_from_module(Peeking(4, 4), torch.randn(2, 4))
    with pytest.raises(UserError, match="M031"):
        outline_from_module(nn.Linear(4, 4))
