"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi-K2): keys and values of all heads from one narrow vector."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from trimaran.models import LayerSpec, ModelSpec, Rope
from trimaran.models.layer_variations import LatentSpec
from trimaran.nets.attention_options import AttentionOptions
from trimaran.nets.decoder.attention import RMSNorm, rotate
from trimaran.nets.decoder.attention_context import AttentionScope, Context
from trimaran.nets.decoder.joint_projections import Rotation
from trimaran.nets.decoder.key_value_cache import CachedLayer
from trimaran.nets.decoder.latent_heads import LatentHeads, attend_cached, attend_pages, expanded_heads
from trimaran.nets.local_shards import multiplied_weight
from trimaran.nets.paged_cache import PagedLayer


class LatentAttention(nn.Module):
    """Self-attention of one layer. The number of heads follows from its projections, so a TP slice works.

    With tp each rank has some heads of `q_b_proj`, `kv_b_proj` and `o_proj`, and all of the narrow projections before
    them. A cache holds the narrow vectors, on every rank, and not the keys and values of its heads: see `LatentHeads`.
    `weights_of_sequences` is set by adapters of `kv_b_proj`: given its weight and the number of sequences of a step, it
    returns the weight that each of them has.
    """

    joint = False  # there are no projections that may be one matmul
    chunk = temperature = None
    weights_of_sequences: Callable[[Tensor, int], Sequence[Tensor]] | None = None

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
        latent = self.latent
        query = self._query(x).unflatten(-1, (-1, latent.head_dim)).transpose(1, 2)
        narrow, shared = self.kv_a_proj_with_mqa(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        narrow = self.kv_a_layernorm(narrow)
        plain, turned = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        turned, shared = (rotate(each, rotation, self.rope) for each in (turned, shared.unsqueeze(1)))
        query = torch.cat((plain, turned.to(plain.dtype)), dim=-1)
        if isinstance(scope, CachedLayer | PagedLayer):
            new = torch.cat((narrow.unsqueeze(1), shared.to(narrow.dtype)), dim=-1)
            out = self._attend_cached(query, new, scope)
        else:
            key, value = expanded_heads(self.kv_b_proj(narrow), shared, latent)
            out = self.context.attend(query, key, value, scope, self.options)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _attend_cached(self, query: Tensor, new: Tensor, scope: CachedLayer | PagedLayer) -> Tensor:
        """Store what is `new` of each token, and return the attention output [B, heads, T, value_dim]."""
        weight = multiplied_weight(self.kv_b_proj, new)
        if isinstance(scope, CachedLayer):
            return attend_cached(query, new, scope, LatentHeads(self.latent, weight), self.options)
        count = len(scope.extension.context_lengths)
        weights = [weight] * count if self.weights_of_sequences is None else self.weights_of_sequences(weight, count)
        heads = {id(each): LatentHeads(self.latent, each) for each in weights}
        return attend_pages(query, new, scope, [heads[id(each)] for each in weights], self.options)

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
