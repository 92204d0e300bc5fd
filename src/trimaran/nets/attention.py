"""Causal attention with rotary positions and grouped heads."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import LayerSpec, ModelSpec, NormSpec, Rope
from trimaran.models.rope import PLAIN_ROPE
from trimaran.nets.attention_context import AttentionScope, Context
from trimaran.nets.attention_options import AttentionOptions
from trimaran.nets.joint_projections import Rotation, fused_norm, rotary_projection
from trimaran.nets.local_shards import local_for_compute


class RMSNorm(nn.RMSNorm):
    """RMSNorm that accumulates in fp32 and returns the input's dtype.

    If `fused`, it is one kernel outside compiled code too; its weight must then be a plain tensor.
    """

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        if self.fused:
            return fused_norm(x, self)
        # On CUDA, autocast would return fp32.
        weight = local_for_compute(self.weight)
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose weight is the difference from one (Gemma); it is never fused."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        scale = 1 + local_for_compute(self.weight).float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


class BiaslessLayerNorm(nn.LayerNorm):
    """LayerNorm without a bias (Cohere), in fp32. It returns the input's dtype."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__(width, eps=eps, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        weight = local_for_compute(self.weight).float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, None, self.eps).to(input.dtype)


Norm = RMSNorm | BiaslessLayerNorm


def norm_of(spec: NormSpec, width: int, eps: float) -> Norm:
    """Return a norm of that kind over the last dim."""
    if spec.kind == "layer":
        return BiaslessLayerNorm(width, eps=eps)
    return (OffsetRMSNorm if spec.unit_offset else RMSNorm)(width, eps=eps)


class Attention(nn.Module):
    """Self-attention of one layer. The number of heads follows from its projections, so a TP slice works."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        block, varied, self.head_dim = spec.block, spec.block.attention, spec.head_dim
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden, width, bias=block.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden, kv_width, bias=block.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden, kv_width, bias=block.qkv_bias)
        self.o_proj = nn.Linear(width, spec.hidden, bias=varied.out_bias)
        widths = (width, kv_width) if varied.wide_qk_norm else (spec.head_dim, spec.head_dim)
        norms = [norm_of(block.norm, each, block.norm_eps) if block.qk_norm else nn.Identity() for each in widths]
        self.q_norm, self.k_norm = norms
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if varied.sinks else None
        self.rope, self._wide_norm = layer.rope, varied.wide_qk_norm
        self._options = AttentionOptions(varied.scale or None, layer.window, varied.softcap or None)
        self.context, self.joint = Context(), False

    @property
    def options(self) -> AttentionOptions:
        """What the scores of this layer have beyond plain attention."""
        if self.sinks is None:
            return self._options
        return replace(self._options, sinks=local_for_compute(self.sinks))

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections that may be one matmul; they are if `joint` is set (see `nets/joint_projections.py`)."""
        plain = isinstance(self.q_norm, nn.Identity) and self.rope is not None and self.rope.is_plain
        return (self.q_proj, self.k_proj, self.v_proj) if plain else ()

    @property
    def num_heads(self) -> tuple[int, int]:
        """The numbers of query heads and of key heads on this rank."""
        return self.q_proj.out_features // self.head_dim, self.k_proj.out_features // self.head_dim

    def forward(self, x: Tensor, rotation: Rotation | None, scope: AttentionScope) -> Tensor:
        """Return the attention output for `x` [B, T, hidden]. Without a rotation queries and keys are not rotated."""
        if self.joint:
            assert rotation is not None, "only layers with rotary positions have joint projections"
            query, key, value = self._joint_heads(x, rotation)
        else:
            query, key, value = self._heads(x, rotation)
        out = self.context.attend(query, key, value, scope, self.options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _joint_heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return rotary_projection(x, self.projections, rotation, self.num_heads)

    def _heads(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*x.shape[:-1], -1, self.head_dim)
        if self._wide_norm:
            query = self.q_norm(self.q_proj(x)).view(heads).transpose(1, 2)
            key = self.k_norm(self.k_proj(x)).view(heads).transpose(1, 2)
        else:
            query = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
            key = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if rotation is not None:
            assert self.rope is not None
            query, key = (rotate(each, rotation, self.rope).to(value.dtype) for each in (query, key))
        return query, key, value


def rotate(x: Tensor, rotation: Rotation, rope: Rope = PLAIN_ROPE) -> Tensor:
    """Return `x` [B, heads, T, head_dim] with RoPE applied, in the wider of its dtype and the rotation's."""
    cos, sin = rotation
    if rope.rotary_dim and rope.rotary_dim < x.shape[-1]:
        rotated, kept = x.split([rope.rotary_dim, x.shape[-1] - rope.rotary_dim], dim=-1)
        turned = rotate(rotated, rotation, replace(rope, rotary_dim=0))
        return torch.cat((turned, kept.to(turned.dtype)), dim=-1)
    if rope.interleaved:
        front, back = x[..., 0::2], x[..., 1::2]
        return x * cos + torch.stack((-back, front), dim=-1).flatten(-2) * sin
    front, back = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-back, front), dim=-1) * sin


def rotation_at(positions: Tensor, rope: Rope, head_dim: int) -> Rotation:
    """Return fp32 cosines and sines [B, 1, T, rotary_dim] for `positions` [B, T].

    Computed in each forward: a few small kernels, and no buffer that a meta device or a cast could corrupt.
    """
    angles = positions[:, None, :, None] * _frequencies(rope, head_dim, positions.device)
    angles = angles.repeat_interleave(2, dim=-1) if rope.interleaved else torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def grid_rotation_at(positions: Tensor, rope: Rope, head_dim: int, sections: Sequence[int]) -> Rotation:
    """Return the M-RoPE rotation for `positions` [3, B, T] of time, row and column (Qwen2-VL).

    The first section of a head's feature pairs uses time, the next row, and so on. If the three are equal, as in text,
    the result equals `rotation_at`.
    """
    angles = positions[:, :, None, :, None] * _frequencies(rope, head_dim, positions.device)
    pairs = torch.cat([part[axis % 3] for axis, part in enumerate(angles.split(list(sections), -1))], -1)
    angles = torch.cat((pairs, pairs), dim=-1)
    return angles.cos(), angles.sin()


def _frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    width = rope.rotary_dim or head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / rope.theta**exponents
    if rope.factor == 1:
        return frequencies
    # Llama 3.1: wavelengths much shorter than the original context stay, longer ones are scaled by `factor`, and those
    # in between are interpolated.
    turns = rope.original_max_seq_len * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)
