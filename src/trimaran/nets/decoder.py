"""The reference decoder: Llama and Qwen, dense or with experts, under Hugging Face's parameter names."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from trimaran.models import ModelSpec
from trimaran.nets.attention import Attention, RMSNorm, Rotation, document_mask, document_positions, rotation_at
from trimaran.nets.mixture import FeedForward, Mixture


class Layer(nn.Module):
    """One block: attention, then feed-forward, each added to the stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts = spec.block.experts
        self.input_layernorm = RMSNorm(spec.hidden, eps=spec.block.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden, eps=spec.block.norm_eps)
        self.mlp = Mixture(experts, spec.hidden) if experts else FeedForward(spec.hidden, spec.ffn)

    def forward(self, x: Tensor, rotation: Rotation, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the stream after this layer and the layer's balance loss, which is zero without experts."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, mask)
        inner = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Mixture):
            out, balance = self.mlp(inner)
            return x + out, balance
        return x + self.mlp(inner), torch.zeros((), device=x.device)


class Decoder(nn.Module):
    """Tokens in, logits out. A tied head is the embedding's own parameter and stays so when the module is moved."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.layers))
        self.norm = RMSNorm(spec.hidden, eps=spec.block.norm_eps)
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False)
        self._tie()

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, an fp32 scalar summed over sequences and layers.

        `documents` [B, T] numbers the documents that share a sequence; attention and positions stay inside each.
        """
        if documents is None:
            positions, mask = torch.arange(tokens.shape[1], device=tokens.device)[None], None
        else:
            positions, mask = document_positions(documents), document_mask(documents)
        rotation = rotation_at(positions, self.spec.block.rope, self.spec.head_dim)
        x = self.embed_tokens(tokens)
        balance = torch.zeros((), device=x.device)
        for layer in self.layers:
            x, of_layer = layer(x, rotation, mask)
            balance = balance + of_layer
        return self.lm_head(self.norm(x)), balance

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving off the meta device makes new parameters, one for each name.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.spec.tied:
            self.lm_head.weight = self.embed_tokens.weight
