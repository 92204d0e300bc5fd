"""Layers as they are served: joined projections, and linear layers with quantised weights."""

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.core import UserError
from trimaran.core.traits import DEVICE_TRAITS
from trimaran.nets import Attention, Decoder, DecoderLayer, FeedForward, Network, RMSNorm, local_part
from trimaran.nets.decoder.joint_projections import Rotation
from trimaran.nets.local_shards import is_sharded_by_inputs

Quantisation = Literal["fp8", "int8", "int4"]
FP8 = torch.float8_e4m3fn
# An fp8 matmul with a scale for each row needs Hopper.
MIN_CAPABILITY = {"fp8": (9, 0), "int8": (8, 0), "int4": (8, 0)}
GROUP = 128  # int4 weights that share a scale and a zero point; our kernel reads so many inputs at a time
OUTPUTS = 16  # our kernels compute a multiple of so many
# More tokens than this are one matmul of torch, for int8 and int4 with a bf16 copy of the weight.
MAX_FEW_TOKENS = {"fp8": 64, "int8": 128, "int4": 128}
log = logging.getLogger(__name__)


@torch.no_grad()
def join_projections(network: Network) -> None:
    """Make projections of the same input slices of one weight, in place. Parameters and their names stay.

    Layers whose projections are not plain linear layers on a GPU, such as those with adapters, stay as they are.
    """
    for decoder in (each for each in network.module.modules() if isinstance(each, Decoder)):
        if type(decoder.norm) is RMSNorm and _are_plain([decoder.norm]):
            decoder.norm.fused = True
        for layer in decoder.blocks:
            norms = layer.plain_norms
            layer.joint = bool(norms) and _are_plain(norms)
            for part in _joinable_parts(layer):
                part.join_projections()


def replace_projections(layer: DecoderLayer) -> None:
    """Replace the projections of the same input by one linear layer, `joined`, which may then be quantised."""
    for part in _joinable_parts(layer):
        joined, heads = joined_linear(part.projections), part.num_heads if isinstance(part, Attention) else (0, 0)
        names = [name for name, child in part.named_children() if any(child is each for each in part.projections)]
        for name in names:
            delattr(part, name)
        part.add_module("joined", joined)
        if isinstance(part, Attention):
            part.__class__ = JoinedAttention
            assert isinstance(part, JoinedAttention)
            part.joined_heads = heads
        else:
            part.__class__ = JoinedFeedForward
    norms = layer.plain_norms
    layer.joint = bool(norms) and _are_plain(norms)


@torch.no_grad()
def joined_linear(parts: Sequence[nn.Linear]) -> nn.Linear:
    weight = torch.cat([each.weight for each in parts])
    biases: list[Tensor] = [each.bias for each in parts if each.bias is not None]
    joined = nn.Linear(weight.shape[1], len(weight), bias=bool(biases), device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined


class JoinedAttention(Attention):
    """Attention whose queries, keys and values come from one linear layer. Created by `replace_projections`."""

    joined: nn.Module
    joined_heads: tuple[int, int]

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return ()

    @property
    def num_heads(self) -> tuple[int, int]:
        return self.joined_heads

    def _heads(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        from trimaran.nets.kernels.layer_parts import rotate_in_place  # noqa: PLC0415 - only a GPU has Triton

        heads, kv_heads = self.joined_heads
        packed = self.joined(x)
        assert rotation is not None, "only layers with rotary positions have joint projections"
        rotate_in_place(packed, *rotation, heads=heads + kv_heads)
        query, key, value = (
            packed.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split([heads, kv_heads, kv_heads], dim=1)
        )
        return query, key, value


class JoinedFeedForward(FeedForward):
    """SwiGLU whose gate and up projections are one linear layer. Created by `replace_projections`."""

    joined: nn.Module

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        return ()

    def forward(self, x: Tensor) -> Tensor:
        from trimaran.nets.kernels.layer_parts import gated_forward  # noqa: PLC0415 - only a GPU has Triton

        packed = self.joined(x)
        return self.down_proj(gated_forward(packed.flatten(0, -2)).unflatten(0, packed.shape[:-1]))


def _joinable_parts(layer: DecoderLayer) -> list[Attention | FeedForward]:
    found = []
    for part in layer.modules():
        if not isinstance(part, Attention | FeedForward) or not part.projections:
            continue
        linears = [*part.projections, *([part.down_proj] if isinstance(part, FeedForward) else [])]
        if all(type(each) is nn.Linear for each in linears) and _are_plain(linears):
            weights = [each.weight for each in linears]
            if all(each.is_cuda and each.dtype == weights[0].dtype for each in weights):
                found.append(part)
    return found


def _are_plain(modules: Iterable[nn.Module]) -> bool:
    """Return whether the modules have no hooks, which would not run, and no sharded parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return not any(
        any(getattr(each, kind) for kind in kinds) or any(isinstance(own, DTensor) for own in each.parameters())
        for each in modules
    )


@torch.no_grad()
def quantise(network: Network, kind: Quantisation, device: torch.device) -> None:
    """Quantise the linear layers of the network's blocks in place. Embedding, head, norms and experts stay as they are.

    The weights must be on the GPU `device`. fp8: one scale for each row of a weight and for each token, matmuls in fp8.
    int8: one scale for each row of a weight; int4: a scale and a zero point for 128 inputs; both multiply in bf16.
    Layers that the kernels do not support are left out. Names change: load the weights before this.
    """
    refuse_device(kind, device)
    count = 0
    for block in network.blocks:
        if isinstance(block, DecoderLayer):
            replace_projections(block)
        layers = [each for each in block.modules() if type(each) is nn.Linear and is_supported(each)]
        for each in layers:
            quantise_linear(each, kind)
        count += len(layers)
    if not count:
        raise nothing_to_quantise(kind)
    torch.cuda.empty_cache()  # the cache of keys and values may have the memory of the old weights
    log.info("%d linear layers have %s weights", count, kind)


def quantise_linear(layer: nn.Linear, kind: Quantisation, row_maxima: Tensor | None = None) -> None:
    """Turn a linear layer, or this rank's slice of one, into a `QuantisedLinear` in place.

    `row_maxima` [outputs] are the largest absolute values of whole rows, if the slice has only a part of each.
    """
    is_partial_sum = is_sharded_by_inputs(layer)
    weight, scales, zeros = quantised_weight(local_part(layer.weight), kind, row_maxima)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        layer.bias = nn.Parameter(local_part(layer.bias).to(torch.bfloat16), requires_grad=False)
    layer.__class__ = QuantisedLinear
    assert isinstance(layer, QuantisedLinear)
    layer.kind, layer.is_partial_sum = kind, is_partial_sum
    layer.register_buffer("scales", scales, persistent=False)
    layer.register_buffer("zeros", zeros, persistent=False)


class QuantisedLinear(nn.Linear):
    """A linear layer with a quantised weight, bf16 inputs and outputs. Created by `quantise_linear`.

    If it `is_partial_sum`, the bias is added to the sum over ranks and not here. On a CPU, which has no kernel, it
    computes with the restored weight.
    """

    kind: Quantisation
    is_partial_sum: bool
    scales: Tensor
    zeros: Tensor | None

    @property
    def _own_bias(self) -> Tensor | None:
        return None if self.is_partial_sum else self.bias

    def forward(self, input: Tensor) -> Tensor:
        if not input.is_cuda:
            weight, bias = restored_weight(self.weight, self.scales, self.zeros).to(input.dtype), self._own_bias
            return F.linear(input, weight, None if bias is None else bias.to(input.dtype))
        rows = input.flatten(0, -2).to(torch.bfloat16)
        return self._on_gpu(rows).unflatten(0, input.shape[:-1])

    def _on_gpu(self, rows: Tensor) -> Tensor:
        """Return the output of bf16 rows: our kernel reads a weight for few of them, torch multiplies many."""
        from trimaran.nets.kernels.quantised_matmul import (  # noqa: PLC0415 - only a GPU has Triton
            dequantised,
            fp8_rows,
            quantised_matmul,
        )

        is_few, kind, bias = len(rows) <= MAX_FEW_TOKENS[self.kind], self.kind, self._own_bias
        if kind != "fp8":
            if is_few:
                return quantised_matmul(rows.contiguous(), self.weight, self.scales, kind=kind, x_scales=None,
                                        zeros=self.zeros, bias=bias)  # fmt: skip
            return F.linear(rows, dequantised(self.weight, self.scales, self.zeros, kind=kind), bias)
        rows, row_scales = fp8_rows(rows)
        if is_few:
            return quantised_matmul(rows, self.weight, self.scales, kind=kind, x_scales=row_scales, zeros=self.zeros,
                                    bias=bias)  # fmt: skip
        return torch._scaled_mm(
            rows, self.weight.t(), row_scales, self.scales[None], bias=bias, out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )  # fmt: skip


def quantised_weight(
    weight: Tensor, kind: Quantisation, row_maxima: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a weight [outputs, inputs] in `kind`, scales, zero points: `quantised_matmul`, `quantise_linear`."""
    weight = weight.float()
    if kind == "int4":
        groups = weight.unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-12).to(torch.bfloat16)
        zeros = (-low / scales.float()).round().clamp(0, 15)
        numbers = (groups / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
        first, second = numbers.chunk(2, dim=-1)
        packed = (first | (second << 4)).flatten(1).contiguous()
        return packed, scales.t().contiguous(), zeros.t().to(torch.uint8).contiguous()
    largest = torch.finfo(FP8).max if kind == "fp8" else 127.0
    maxima = weight.abs().amax(dim=1) if row_maxima is None else row_maxima
    scales = maxima.clamp(min=1e-12) / largest
    scaled = weight / scales[:, None]
    return (scaled.to(FP8) if kind == "fp8" else scaled.round().to(torch.int8)), scales, None


def restored_weight(weight: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    if zeros is None:
        return weight.float() * scales[:, None]
    grouped = weight.unflatten(1, (-1, GROUP // 2))
    values = torch.cat((grouped & 15, grouped >> 4), dim=-1).float()
    return ((values - zeros.t()[:, :, None].float()) * scales.t()[:, :, None].float()).flatten(1)


def refuse_device(kind: Quantisation, device: torch.device) -> None:
    if not DEVICE_TRAITS[device.type].has_kernels:
        raise UserError("E050.weights-need-nvidia", where="--quantise", kind=kind)
    if torch.cuda.get_device_capability(device) < MIN_CAPABILITY[kind]:
        name = torch.cuda.get_device_name(device)
        raise UserError("E051.too-old-weights", where="--quantise", name=name, kind=kind)


def is_supported(layer: nn.Linear) -> bool:
    return layer.in_features % GROUP == 0 and layer.out_features % OUTPUTS == 0


def nothing_to_quantise(kind: Quantisation) -> UserError:
    return UserError("E052.no-layer-model", where="--quantise", kind=kind, group=GROUP, outputs=OUTPUTS)
