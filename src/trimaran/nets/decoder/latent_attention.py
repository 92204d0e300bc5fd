"""Multi-head latent attention (DeepSeek-V2 and V3, Kimi-K2): keys and values of all heads from one narrow vector."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import LatentSpec, LayerSpec, ModelSpec
from trimaran.nets.decoder.attention import RMSNorm, rotate, yarn_scale
from trimaran.nets.decoder.attention_context import AttentionScope, Context
from trimaran.nets.decoder.joint_projections import Rotation
from trimaran.nets.decoder.key_value_cache import CachedLayer
from trimaran.nets.local_shards import multiplied_weight
from trimaran.nets.paged_cache import (
    HostLengthsNeededError,
    PagedLayer,
    attend_causally,
    attend_decodes,
    pages_of_decodes,
    pages_of_one,
)
from trimaran.nets.varlen_attention import AttentionOptions

MAX_KERNEL_RANK, MAX_KERNEL_ROPE = 512, 64  # wider tiles do not fit into registers and shared memory


@dataclass(frozen=True, slots=True, eq=False)
class LatentHeads:
    """The heads of this rank. `weight` [heads * (nope_dim + value_dim), kv_rank] is that of `kv_b_proj`.

    What is cached of a token are kv_rank + rope_dim features: its normalised latent vector, and the rotated features
    that the keys of all heads share. There are two ways to attend to them. `expand` makes keys and values. Or queries
    are multiplied by the weight instead of the latent vectors (they absorb it), and attend to what is cached as if it
    were the key, and its first kv_rank features the value, of a single head; `project` then makes the output.
    """

    latent: LatentSpec
    weight: Tensor

    def expand(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, heads, T, width] of cached tokens [B, 1, T, kv_rank + rope_dim]."""
        narrow, shared = cached.split([self.latent.kv_rank, self.latent.rope_dim], dim=-1)
        return expanded_heads(F.linear(narrow[:, 0], self.weight), shared, self.latent)

    def absorb(self, query: Tensor) -> Tensor:
        """Return queries [heads, N, head_dim] as queries of what is cached, [heads, N, kv_rank + rope_dim]."""
        plain, turned = query.split([self.latent.nope_dim, self.latent.rope_dim], dim=-1)
        absorbed = torch.bmm(plain, self._by_head[:, : self.latent.nope_dim])
        return torch.cat((absorbed, turned.to(absorbed.dtype)), dim=-1)

    def project(self, out: Tensor) -> Tensor:
        """Return the output [heads, N, value_dim], given what queries that have absorbed the weight attended to."""
        return torch.bmm(out, self._by_head[:, self.latent.nope_dim :].transpose(1, 2))

    @property
    def _by_head(self) -> Tensor:
        return self.weight.unflatten(0, (-1, self.latent.nope_dim + self.latent.value_dim))


def expanded_heads(wide: Tensor, shared: Tensor, latent: LatentSpec) -> tuple[Tensor, Tensor]:
    """Return keys and values [B, heads, T, width] of `kv_b_proj`'s output and the keys' `shared` rotated features."""
    heads = wide.unflatten(-1, (-1, latent.nope_dim + latent.value_dim)).transpose(1, 2)
    key, value = heads.split([latent.nope_dim, latent.value_dim], dim=-1)
    shared = shared.to(value.dtype).expand(-1, key.shape[1], -1, -1)
    return torch.cat((key, shared), dim=-1), value


def attend_pages(
    query: Tensor, new: Tensor, layer: PagedLayer, heads: Sequence[LatentHeads], options: AttentionOptions
) -> Tensor:
    """Store the new tokens [1, 1, N, kv_rank + rope_dim], and return the output [1, heads, N, value_dim].

    `heads` are those of each sequence, which differ if sequences have adapters. The queries of sequences with one new
    token absorb the weight. A part of a prompt has so many queries that plain ones, which are narrower, take less time,
    although keys and values are made again from all that is cached of its sequence. In a step of a CUDA graph all
    queries absorb it: only the device knows the lengths, and no sequence has an adapter.
    """
    extension, latent = layer.extension, heads[0].latent
    is_graph = not extension.key_lengths
    if is_graph and not has_latent_kernel(new, latent):
        raise HostLengthsNeededError
    (pages,) = layer.stored(new)
    start, parts = query.shape[2] if is_graph else extension.num_decodes, []
    if start:
        absorbed = _of_sequences(LatentHeads.absorb, heads[:start], query[0, :, :start])
        if has_latent_kernel(pages, latent):
            from trimaran.nets.kernels.latent_pages import attend_latent_pages  # noqa: PLC0415 - only a GPU has Triton

            out = attend_latent_pages(absorbed, pages, extension, options, rank=latent.kv_rank)
        else:
            cached = pages_of_decodes(pages, extension)
            out = attend_decodes(absorbed[None], cached, cached[..., : latent.kv_rank], extension, options)[0]
        parts.append(_of_sequences(LatentHeads.project, heads[:start], out)[None])
    for number in range(extension.num_decodes, len(extension.query_lengths)):
        stop = start + extension.query_lengths[number]
        is_new = extension.key_lengths[number] == stop - start
        cached = new[:, :, start:stop] if is_new else pages_of_one(number, pages, extension)
        parts.append(attend_causally(query[:, :, start:stop], *heads[number].expand(cached), options))
        start = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def has_latent_kernel(cached: Tensor, latent: LatentSpec) -> bool:
    """Return whether our kernel attends to pages of tensors like what is cached, [..., kv_rank + rope_dim].

    It needs more shared memory than GPUs before Ampere have, and widths that are powers of two: on an H200 it read
    misaligned addresses with 24 + 12 features in bf16.
    """
    if not cached.is_cuda or torch.version.hip or torch.cuda.get_device_capability(cached.device) < (8, 0):
        return False
    fits = latent.kv_rank <= MAX_KERNEL_RANK and latent.rope_dim <= MAX_KERNEL_ROPE
    return fits and latent.kv_rank.bit_count() == latent.rope_dim.bit_count() == 1


def _of_sequences(change: Callable[[LatentHeads, Tensor], Tensor], heads: Sequence[LatentHeads], x: Tensor) -> Tensor:
    """Return `x` [heads, S, width] after `change`, which gets the heads of each sequence."""
    groups: dict[int, list[int]] = {}
    for number, each in enumerate(heads):
        groups.setdefault(id(each), []).append(number)
    if len(groups) == 1:
        return change(heads[0], x)
    parts = torch.cat([change(heads[rows[0]], x[:, rows]) for rows in groups.values()], dim=1)
    order = torch.tensor([number for rows in groups.values() for number in rows], device=x.device)
    return parts[:, order.argsort()]


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
        scale, rope = latent.head_dim**-0.5, layer.rope
        if rope is not None and rope.yarn is not None and rope.yarn.mscale_all_dim and rope.factor > 1:
            scale = scale * yarn_scale(rope.factor, rope.yarn.mscale_all_dim) ** 2
        self.options = AttentionOptions(scale=scale, window=layer.window)
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
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if latent.query_rank else self.q_proj(x)
        query = query.unflatten(-1, (-1, latent.head_dim)).transpose(1, 2)
        narrow, shared = self.kv_a_proj_with_mqa(x).split([latent.kv_rank, latent.rope_dim], dim=-1)
        narrow = self.kv_a_layernorm(narrow)
        plain, turned = query.split([latent.nope_dim, latent.rope_dim], dim=-1)
        turned, shared = (rotate(each, rotation, self.rope) for each in (turned, shared.unsqueeze(1)))
        query = torch.cat((plain, turned.to(plain.dtype)), dim=-1)
        if not isinstance(scope, CachedLayer | PagedLayer):
            key, value = expanded_heads(self.kv_b_proj(narrow), shared, latent)
            out = self.context.attend(query, key, value, scope, self.options)
            return self.o_proj(out.transpose(1, 2).flatten(2))
        new = torch.cat((narrow.unsqueeze(1), shared.to(narrow.dtype)), dim=-1)
        weight = multiplied_weight(self.kv_b_proj, new)
        if isinstance(scope, CachedLayer):
            # A single query of each row absorbs the weight; more do not: see `attend_pages`.
            own, (cached,) = LatentHeads(latent, weight), scope.stored(new)
            if query.shape[2] > 1:
                out = scope.attend_to(query, *own.expand(cached), self.options)
            else:
                absorbed = own.absorb(query[:, :, 0].transpose(0, 1)).transpose(0, 1)[:, :, None]
                out = scope.attend_to(absorbed, cached, cached[..., : latent.kv_rank], self.options)
                out = own.project(out[:, :, 0].transpose(0, 1)).transpose(0, 1)[:, :, None]
        else:
            count, change = len(scope.extension.context_lengths), self.weights_of_sequences
            weights = [weight] * count if change is None else change(weight, count)
            heads = {id(each): LatentHeads(latent, each) for each in weights}
            out = attend_pages(query, new, scope, [heads[id(each)] for each in weights], self.options)
        return self.o_proj(out.transpose(1, 2).flatten(2))
