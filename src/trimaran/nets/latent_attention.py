"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi-K2): keys and values of all heads from one narrow vector."""

import torch
from torch import Tensor, nn

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

    def __init__(self, latent: LatentSpec, hidden: int, heads: int, options: AttentionOptions) -> None:
        super().__init__()
        self.latent, self.options = latent, options
        width = heads * latent.head_dim
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

    def forward(self, x: Tensor, rotation: Rotation, scope: AttentionScope) -> Tensor:
        """Return the attention output for `x` [B, T, hidden]."""
        latent, heads = self.latent, (*x.shape[:-1], -1)
        query = self._query(x).view(*heads, latent.head_dim).transpose(1, 2)
        narrow, shared = self.kv_a_proj_with_mqa(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        wide = self.kv_b_proj(self.kv_a_layernorm(narrow)).view(*heads, latent.nope_dim + latent.value_dim)
        key, value = wide.transpose(1, 2).split([latent.nope_dim, latent.value_dim], dim=-1)
        plain, turned = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        turned, shared = (rotate(each, rotation).to(value.dtype) for each in (turned, shared.unsqueeze(1)))
        query = torch.cat((plain, turned), dim=-1)
        key = torch.cat((key, shared.expand(-1, key.shape[1], -1, -1)), dim=-1)
        out = self.context.attend(query, key, value, scope, self.options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _query(self, x: Tensor) -> Tensor:
        if not self.latent.query_rank:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
