"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi-K2): keys and values of all heads from one narrow vector."""

import math

import torch
from torch import Tensor, nn

from trimaran.models import LayerSpec, ModelSpec, Rope
from trimaran.models.expert_variations import LatentSpec
from trimaran.nets.attention import RMSNorm, rotate
from trimaran.nets.attention_context import AttentionScope, Context
from trimaran.nets.attention_options import AttentionOptions
from trimaran.nets.joint_projections import Rotation


class LatentAttention(nn.Module):
    """Self-attention of one layer. The number of heads follows from its projections, so a TP slice works.

    With tp each rank has some heads of `q_b_proj`, `kv_b_proj` and `o_proj`, and all of the narrow projections before
    them. The cache holds the keys and values of all heads, which have different widths.
    """

    joint = False  # there are no projections that may be one matmul
    chunk = temperature = None

    def __init__(self, spec: ModelSpec, layer: LayerSpec, latent: LatentSpec) -> None:
        super().__init__()
        hidden, heads, width = spec.hidden, spec.heads, spec.heads * latent.head_dim
        self.latent, self.rope = latent, layer.rope
        self.options = AttentionOptions(scale=_scale(latent, layer.rope), window=layer.window)
        if latent.query_rank:
            self.q_a_proj = nn.Linear(hidden, latent.query_rank, bias=latent.bias)
            self.q_a_layernorm = RMSNorm(latent.query_rank, eps=latent.norm_eps)
            self.q_b_proj = nn.Linear(latent.query_rank, width, bias=False)
        else:
            self.q_proj = nn.Linear(hidden, width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, latent.kv_rank + latent.rope_dim, bias=latent.bias)
        self.kv_a_layernorm = RMSNorm(latent.kv_rank, eps=latent.norm_eps)
        self.kv_b_proj = nn.Linear(latent.kv_rank, heads * (latent.nope_dim + latent.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * latent.value_dim, hidden, bias=latent.bias)
        self.context = Context()

    @property
    def projections(self) -> tuple[nn.Linear, ...]:
        """None: see `joint`."""
        return ()

    def forward(self, x: Tensor, rotation: Rotation | None, scope: AttentionScope) -> Tensor:
        """Return the attention output for `x` [B, T, hidden]."""
        assert rotation is not None, "every layer has rotary positions"
        assert self.rope is not None
        latent, heads = self.latent, (*x.shape[:-1], -1)
        query = self._query(x).view(*heads, latent.head_dim).transpose(1, 2)
        narrow, shared = self.kv_a_proj_with_mqa(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        wide = self.kv_b_proj(self.kv_a_layernorm(narrow)).view(*heads, latent.nope_dim + latent.value_dim)
        key, value = wide.transpose(1, 2).split([latent.nope_dim, latent.value_dim], dim=-1)
        plain, turned = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        turned, shared = (rotate(each, rotation, self.rope).to(value.dtype) for each in (turned, shared.unsqueeze(1)))
        query = torch.cat((plain, turned), dim=-1)
        key = torch.cat((key, shared.expand(-1, key.shape[1], -1, -1)), dim=-1)
        out = self.context.attend(query, key, value, scope, self.options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _query(self, x: Tensor) -> Tensor:
        if not self.latent.query_rank:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))


def _scale(latent: LatentSpec, rope: Rope | None) -> float:
    """Return the factor of the scores. YaRN with `mscale_all_dim` raises it with the factor of the positions."""
    scale = latent.head_dim**-0.5
    if rope is None or rope.yarn is None or not rope.yarn.mscale_all_dim or rope.factor <= 1:
        return scale
    return scale * (0.1 * rope.yarn.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
