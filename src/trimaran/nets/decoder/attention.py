"""Causal attention with rotary positions and grouped heads."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import PLAIN_ROPE, LayerSpec, ModelSpec, NormSpec, Rope, Yarn
from trimaran.nets.decoder.attention_context import AttentionScope, Context
from trimaran.nets.decoder.joint_projections import FusedNorm, Rotation, join_weights, rotary_projection, rotate_halves
from trimaran.nets.local_shards import local_for_compute
from trimaran.nets.varlen_attention import AttentionOptions


def frequencies(rope: Rope, head_dim: int, device: torch.device, *, long: bool = False) -> Tensor:
    """Return one fp32 frequency for each pair of rotated features. `long`: LongRoPE's, of sequences beyond training."""
    width = rope.rotary_dim or head_dim
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    plain = 1.0 / rope.theta**exponents
    if rope.longrope is not None:
        factors = rope.longrope.long_factors if long else rope.longrope.short_factors
        return plain / torch.tensor(factors, dtype=torch.float32, device=device)
    if rope.factor == 1:
        return plain
    match rope.scaling:
        case "linear":
            return plain / rope.factor
        case "yarn":
            # The frequencies of YaRN: fast ones stay, slow ones are divided by the factor, with a ramp in between.
            yarn = rope.yarn or Yarn()

            def pair_with(turns: float) -> float:
                return width * math.log(rope.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            low, high = pair_with(yarn.beta_fast), pair_with(yarn.beta_slow)
            if yarn.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, width - 1)
            high = high + 0.001 if low == high else high
            pairs = torch.arange(width // 2, dtype=torch.float32, device=plain.device)
            slow = ((pairs - low) / (high - low)).clamp(0, 1)
            return plain / rope.factor * slow + plain * (1 - slow)
        case _:
            # Wavelengths much shorter than the original context stay, longer ones are scaled by `factor`, and those in
            # between are interpolated.
            turns = rope.original_max_seq_len * plain / (2 * math.pi)
            kept = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
            return plain * (kept + (1 - kept) / rope.factor)


def rotation_scale(rope: Rope) -> float:
    """Return what cosines and sines are multiplied by."""
    if rope.longrope is not None:
        if rope.longrope.attention_factor or rope.factor <= 1:
            return rope.longrope.attention_factor or 1.0
        return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_seq_len))
    if rope.scaling != "yarn" or rope.factor == 1:
        return 1.0
    yarn = rope.yarn or Yarn()
    if yarn.attention_factor:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return yarn_scale(rope.factor, yarn.mscale) / yarn_scale(rope.factor, yarn.mscale_all_dim)
    return yarn_scale(rope.factor)


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's scale of attention for positions that are stretched by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class RMSNorm(nn.RMSNorm):
    """RMSNorm in fp32 that returns the input's dtype; one kernel if `fused`, which needs a plain tensor as weight."""

    fused = False

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        if self.fused:
            return FusedNorm.apply(x, self.weight, self.eps)
        # On CUDA, autocast would return fp32.
        weight = local_for_compute(self.weight)
        return F.rms_norm(x, self.normalized_shape, weight.to(x.dtype), self.eps).to(x.dtype)


class OffsetRMSNorm(RMSNorm):
    """RMSNorm whose weight is the difference from one (Gemma); it is never fused."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        scale = 1 + local_for_compute(self.weight).float()
        return F.rms_norm(x.float(), self.normalized_shape, scale, self.eps).to(x.dtype)


class WideRMSNorm(RMSNorm):
    """RMSNorm over all heads together (OLMo-2), never fused; `total` sums over the heads of other tp ranks."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.width = width
        self.total: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        assert self.eps is not None
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)
        mean = (squares if self.total is None else self.total(squares)) / self.width
        return (wide * torch.rsqrt(mean + self.eps) * local_for_compute(self.weight).float()).to(x.dtype)


class BiaslessLayerNorm(nn.LayerNorm):
    """LayerNorm without a bias (Cohere), in fp32. It returns the input's dtype."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__(width, eps=eps, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        weight = local_for_compute(self.weight).float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, None, self.eps).to(input.dtype)


Norm = RMSNorm | BiaslessLayerNorm


def norm_of(spec: NormSpec, width: int, eps: float) -> Norm:
    if spec.kind == "layer":
        return BiaslessLayerNorm(width, eps=eps)
    return (OffsetRMSNorm if spec.unit_offset else RMSNorm)(width, eps=eps)


class UnitNorm(nn.Module):
    """RMSNorm without a weight (Llama-4's queries and keys), in fp32. It commutes with rotary positions."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype)


def _head_norm(spec: ModelSpec, heads: int) -> nn.Module:
    """Return the norm of so many heads: of each of them, of all together, or none."""
    block = spec.block
    if not block.qk_norm:
        return nn.Identity()
    if block.attention.wide_qk_norm:
        return WideRMSNorm(heads * spec.head_dim, eps=block.norm_eps)
    return norm_of(block.norm, spec.head_dim, block.norm_eps)


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
        self.q_norm, self.k_norm = (_head_norm(spec, heads) for heads in (spec.heads, spec.kv_heads))
        self.sinks = nn.Parameter(torch.empty(spec.heads)) if varied.sinks else None
        self.rope, self._wide_norm = layer.rope, varied.wide_qk_norm
        if varied.unit_qk_norm and layer.rope is not None:
            self.q_norm = self.k_norm = UnitNorm(block.norm_eps)
        self.chunk = layer.chunk
        self.temperature = varied.temperature if layer.rope is None else None
        self._options = AttentionOptions(varied.scale or None, layer.window, varied.softcap or None, chunk=layer.chunk)
        self.context, self.joint = Context(), False

    @property
    def options(self) -> AttentionOptions:
        """What the scores of this layer have beyond plain attention."""
        if self.sinks is None:
            return self._options
        return replace(self._options, sinks=local_for_compute(self.sinks))

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """The projections that may be one matmul, see `join_projections`."""
        plain = isinstance(self.q_norm, nn.Identity) and self.rope is not None and self.rope.is_plain
        return (self.q_proj, self.k_proj, self.v_proj) if plain else ()

    def join_projections(self) -> None:
        """Compute `projections` as one matmul from now on. Their parameters become rows of one tensor."""
        join_weights(self.projections)
        self.joint = True

    @property
    def num_heads(self) -> tuple[int, int]:
        """The numbers of query heads and of key heads on this rank."""
        return self.q_proj.out_features // self.head_dim, self.k_proj.out_features // self.head_dim

    def forward(self, x: Tensor, rotation: Rotation | None, scope: AttentionScope) -> Tensor:
        """Return the attention output for `x` [B, T, hidden]. Without a rotation queries and keys are not rotated.

        A layer without rotary positions multiplies its queries by the first part of a rotation.
        """
        if self.joint:
            assert rotation is not None, "only layers with rotary positions have joint projections"
            query, key, value = rotary_projection(x, self.projections, rotation, self.num_heads)
        else:
            query, key, value = self._heads(x, rotation)
        out = self.context.attend(query, key, value, scope, self.options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head. A served layer, whose projections are one, overrides it."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        if self._wide_norm:
            query = self.q_norm(self.q_proj(x)).view(heads).transpose(1, 2)
            key = self.k_norm(self.k_proj(x)).view(heads).transpose(1, 2)
        else:
            query = self.q_norm(self.q_proj(x).view(heads)).transpose(1, 2)
            key = self.k_norm(self.k_proj(x).view(heads)).transpose(1, 2)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if rotation is not None and self.rope is None:
            query = (query * rotation[0]).to(value.dtype)
        elif rotation is not None:
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
    return rotate_halves(x, cos, sin)


def rotation_at(positions: Tensor, rope: Rope, head_dim: int, lengths: Tensor | None = None) -> Rotation:
    """Return fp32 cosines and sines [B, 1, T, rotary_dim] for `positions` [B, T].

    `lengths` [B, T] are those of each token's document, which only LongRoPE needs. Computed in each forward: a few
    small kernels, and no buffer that a meta device or a cast could corrupt.
    """
    angles = positions[:, None, :, None] * frequencies(rope, head_dim, positions.device)
    if rope.longrope is not None and lengths is not None:
        beyond = positions[:, None, :, None] * frequencies(rope, head_dim, positions.device, long=True)
        angles = torch.where(lengths[:, None, :, None] > rope.original_max_seq_len, beyond, angles)
    angles = angles.repeat_interleave(2, dim=-1) if rope.interleaved else torch.cat((angles, angles), dim=-1)
    cos, sin, scale = angles.cos(), angles.sin(), rotation_scale(rope)
    return (cos, sin) if scale == 1 else (cos * scale, sin * scale)


def grid_rotation_at(positions: Tensor, rope: Rope, head_dim: int, sections: Sequence[int]) -> Rotation:
    """Return the M-RoPE rotation for `positions` [3, B, T] of time, row and column (Qwen2-VL).

    The first section of a head's feature pairs uses time, the next row, and so on. If the three are equal, as in text,
    the result equals `rotation_at`.
    """
    angles = positions[:, :, None, :, None] * frequencies(rope, head_dim, positions.device)
    pairs = torch.cat([part[axis % 3] for axis, part in enumerate(angles.split(list(sections), -1))], -1)
    angles = torch.cat((pairs, pairs), dim=-1)
    return angles.cos(), angles.sin()
