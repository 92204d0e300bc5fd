"""Causal attention with rotary positions and grouped heads."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import ModelSpec, Rope
from trimaran.nets.attention_context import AttentionScope, Context
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


class Attention(nn.Module):
    """Self-attention of one layer. The number of heads follows from its projections, so a TP slice works."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        block, self.head_dim = spec.block, spec.head_dim
        width, kv_width = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden, width, bias=block.qkv_bias)
        self.k_proj = nn.Linear(spec.hidden, kv_width, bias=block.qkv_bias)
        self.v_proj = nn.Linear(spec.hidden, kv_width, bias=block.qkv_bias)
        self.o_proj = nn.Linear(width, spec.hidden, bias=False)
        self.q_norm = RMSNorm(spec.head_dim, eps=block.norm_eps) if block.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(spec.head_dim, eps=block.norm_eps) if block.qk_norm else nn.Identity()
        self.context, self.joint = Context(), False

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections that may be one matmul; they are if `joint` is set (see `nets/joint_projections.py`)."""
        plain = isinstance(self.q_norm, nn.Identity)
        return (self.q_proj, self.k_proj, self.v_proj) if plain else ()

    @property
    def num_heads(self) -> tuple[int, int]:
        """The numbers of query heads and of key heads on this rank."""
        return self.q_proj.out_features // self.head_dim, self.k_proj.out_features // self.head_dim

    def forward(self, x: Tensor, rotation: Rotation, scope: AttentionScope) -> Tensor:
        """Return the attention output for `x` [B, T, hidden]."""
        query, key, value = self._joint_heads(x, rotation) if self.joint else self._heads(x, rotation)
        out = self.context.attend(query, key, value, scope)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _joint_heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        return rotary_projection(x, self.projections, rotation, self.num_heads)

    def _heads(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        query, key = (rotate(each, rotation).to(value.dtype) for each in (query, key))
        return query, key, value


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return `x` [B, heads, T, head_dim] with RoPE applied, in the wider of its dtype and the rotation's."""
    cos, sin = rotation
    front, back = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-back, front), dim=-1) * sin


def rotation_at(positions: Tensor, rope: Rope, head_dim: int) -> Rotation:
    """Return fp32 cosines and sines [B, 1, T, head_dim] for `positions` [B, T].

    Computed in each forward: a few small kernels, and no buffer that a meta device or a cast could corrupt.
    """
    angles = positions[:, None, :, None] * _frequencies(rope, head_dim, positions.device)
    angles = torch.cat((angles, angles), dim=-1)
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
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.factor == 1:
        return frequencies
    # Llama 3.1: wavelengths much shorter than the original context stay, longer ones are scaled by `factor`, and those
    # in between are interpolated.
    turns = rope.original_max_seq_len * frequencies / (2 * math.pi)
    kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / rope.factor)
