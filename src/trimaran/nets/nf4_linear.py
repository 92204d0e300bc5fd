"""Frozen linear layers with 4-bit weights: NF4, the format of QLoRA, packed and unpacked by bitsandbytes."""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimaran.core import UserError
from trimaran.nets.adapters.lora_linear import LoraLinear, is_adapter_parameter
from trimaran.nets.operators import define_operator

BLOCK = 64  # consecutive weights of a row that share one scale, as in QLoRA
CODES, SCALES = "weight_codes", "weight_scales"


class Nf4Weight(nn.Linear):
    """A linear layer whose weight is held in NF4: two values in a byte, and one fp32 scale for each `BLOCK` of a row.

    The parameters `weight_codes` and `weight_scales` replace `weight`. They are frozen, and neither forward nor
    backward keeps an unpacked weight: each unpacks it for its one matmul.
    """

    weight_codes: nn.Parameter
    weight_scales: nn.Parameter
    weight_dtype: torch.dtype

    def base_weight(self) -> Tensor:
        return _unpack(self.weight_codes, self.weight_scales, self.weight_dtype)

    def base_forward(self, x: Tensor) -> Tensor:
        """Return the frozen layer's output, with its bias."""
        device = x.device.type
        if torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        out = _Nf4Matmul.apply(x, self.weight_codes, self.weight_scales)
        return out if self.bias is None else out + self.bias.to(out.dtype)


class Nf4Linear(Nf4Weight):
    """A frozen 4-bit layer without an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return self.base_forward(input)


class Nf4LoraLinear(Nf4Weight, LoraLinear):
    """A frozen 4-bit layer with an adapter: one layer of QLoRA."""


def pack_frozen_weights(linears: Iterable[nn.Linear]) -> None:
    """Give frozen layers whose rows are whole blocks 4-bit weights, not yet filled. Runs before the plan is applied."""
    try:
        importlib.import_module("bitsandbytes")  # defines the operators; takes a second, so only a 4-bit base does it
    except ImportError:
        raise UserError("M057.bit-base-weights", where="model.adapter.base") from None
    for each in linears:
        if each.in_features % BLOCK == 0 and not each.weight.requires_grad:
            rows, columns, weight = each.out_features, each.in_features, each.weight
            each.__class__ = Nf4LoraLinear if isinstance(each, LoraLinear) else Nf4Linear
            assert isinstance(each, Nf4Weight)
            del each.weight
            each.weight_dtype = weight.dtype
            codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
            scales = torch.empty(rows, columns // BLOCK, dtype=torch.float32, device=weight.device)
            each.weight_codes = nn.Parameter(codes, requires_grad=False)
            each.weight_scales = nn.Parameter(scales, requires_grad=False)


def packed_parameters(module: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that hold 4-bit weights. No plan shards them."""
    layers = (each for each in module.modules() if isinstance(each, Nf4Weight))
    return {each for layer in layers for each in (layer.weight_codes, layer.weight_scales)}


def loadable_weights(module: nn.Module, *, remove_duplicate: bool = True) -> dict[str, Tensor]:
    """Return parameters outside the adapter, 4-bit ones as unpacked meta tensors, which `weight_to_fill` fills too."""
    found: dict[str, Tensor] = {}
    for name, each in module.named_parameters(remove_duplicate=remove_duplicate):
        owner, _, leaf = name.rpartition(".")
        if leaf == CODES:
            layer = module.get_submodule(owner)
            assert isinstance(layer, Nf4Weight)
            shape = (layer.out_features, layer.in_features)
            found[f"{owner}.weight"] = torch.empty(shape, dtype=layer.weight_dtype, device="meta")
        elif leaf != SCALES and not is_adapter_parameter(name):
            found[name] = each
    return found


@contextmanager
def weight_to_fill(module: nn.Module, name: str, weight: Tensor) -> Iterator[Tensor]:
    """Yield the tensor to write the weight to. `name` and `weight` are an item of `loadable_weights`."""
    layer = module.get_submodule(name.rpartition(".")[0])
    if isinstance(layer, Nf4Weight) and weight.is_meta:  # is packed when the context ends
        unpacked = torch.empty(weight.shape, dtype=weight.dtype, device=layer.weight_codes.device)
        yield unpacked
        codes, scales = torch.ops.bitsandbytes.quantize_4bit(unpacked, BLOCK, "nf4", torch.uint8)
        layer.weight_codes.data.copy_(codes.view_as(layer.weight_codes))
        layer.weight_scales.data.copy_(scales.view_as(layer.weight_scales))
    else:
        yield weight


class _Nf4Matmul(torch.autograd.Function):
    """The matmul of a frozen layer: backward computes the gradient of the input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scales)
        return torch.ops.trimaran.nf4_matmul(x, codes, scales)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None]:
        return torch.ops.trimaran.nf4_matmul_backward(gradients[0].contiguous(), *ctx.saved_tensors), None, None


# Two operators that are opaque to torch's compiler, which would otherwise unpack once and keep the weight for backward.
define_operator(
    "nf4_matmul(Tensor x, Tensor codes, Tensor scales) -> Tensor",
    lambda x, codes, scales: x @ _unpack(codes, scales, x.dtype).t(),
    lambda x, codes, scales: x.new_empty(*x.shape[:-1], len(codes)),
)
define_operator(
    "nf4_matmul_backward(Tensor gradient, Tensor codes, Tensor scales) -> Tensor",
    lambda gradient, codes, scales: gradient @ _unpack(codes, scales, gradient.dtype),
    lambda gradient, codes, scales: gradient.new_empty(*gradient.shape[:-1], 2 * codes.shape[1]),
)


def _unpack(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    shape = (len(codes), 2 * codes.shape[1])
    return torch.ops.bitsandbytes.dequantize_4bit(codes.view(-1, 1), scales.view(-1), BLOCK, "nf4", shape, dtype)
