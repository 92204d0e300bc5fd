"""Decoder layers that compute projections of the same input as one matmul, for inference on a GPU.

A decode step reads every weight for a few tokens, so its time is that of reading the weights and of starting kernels:
fewer and larger kernels are faster.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trimaran.nets import Network
from trimaran.nets.decoder.attention import Attention, RMSNorm
from trimaran.nets.decoder.decoder import Decoder, DecoderLayer
from trimaran.nets.decoder.joint_projections import Rotation
from trimaran.nets.decoder.moe import FeedForward


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
    """Return one linear layer with the rows of all of `parts`."""
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
        from trimaran.nets.kernels.rotary_projection import rotate_in_place  # noqa: PLC0415 - only a GPU has Triton

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
        from trimaran.nets.kernels.swiglu import gated_forward  # noqa: PLC0415 - only a GPU has Triton

        packed = self.joined(x)
        return self.down_proj(gated_forward(packed.flatten(0, -2)).unflatten(0, packed.shape[:-1]))


def _joinable_parts(layer: DecoderLayer) -> list[Attention | FeedForward]:
    parts = [each for each in layer.modules() if isinstance(each, Attention | FeedForward)]
    return [each for each in parts if each.projections and _may_be_joined(each)]


def _may_be_joined(part: Attention | FeedForward) -> bool:
    down = [part.down_proj] if isinstance(part, FeedForward) else []
    linears = [*part.projections, *down]
    if not all(type(each) is nn.Linear for each in linears) or not _are_plain(linears):
        return False
    return all(each.weight.is_cuda and each.weight.dtype == linears[0].weight.dtype for each in linears)


def _are_plain(modules: Iterable[nn.Module]) -> bool:
    """Return whether the modules have no hooks, which would not run, and no sharded parameters."""
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return not any(
        any(getattr(each, kind) for kind in kinds) or any(isinstance(own, DTensor) for own in each.parameters())
        for each in modules
    )
