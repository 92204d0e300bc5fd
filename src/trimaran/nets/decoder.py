"""The reference decoder: Llama and Qwen, dense or with experts, under Hugging Face's parameter names."""

from collections.abc import Callable, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from trimaran.models import ModelSpec
from trimaran.nets.attention import Attention, RMSNorm, Rotation, rotation_at
from trimaran.nets.attention_context import Context, Sight, document_positions
from trimaran.nets.joint_projections import normed
from trimaran.nets.module_dtype import own_dtype
from trimaran.nets.moe import FeedForward, MoeLayer, as_autocast


class DecoderLayer(nn.Module):
    """One block: attention, then feed-forward, each added to the stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        experts = spec.block.experts
        self.input_layernorm = RMSNorm(spec.hidden, eps=spec.block.norm_eps)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden, eps=spec.block.norm_eps)
        self.mlp = MoeLayer(experts, spec.hidden) if experts else FeedForward(spec.hidden, spec.ffn)
        self.joint = False

    def forward(self, x: Tensor, rotation: Rotation, sight: Sight) -> tuple[Tensor, Tensor]:
        """Return the stream after this layer and the layer's balance loss, which is zero without experts.

        The stream keeps its dtype, whatever arithmetic a module inside may have of its own.
        """
        x, inner = self._normed(x, self.input_layernorm)
        x = x + self.self_attn(inner, rotation, sight).to(x.dtype)
        x, inner = self._normed(x, self.post_attention_layernorm)
        if isinstance(self.mlp, MoeLayer):
            out, balance = self.mlp(inner)
            return x + out.to(x.dtype), balance
        return x + self.mlp(inner).to(x.dtype), torch.zeros((), device=x.device)

    def _normed(self, x: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        return normed(x, norm) if self.joint else (x, norm(x))


class Decoder(nn.Module):
    """Tokens in, logits out; or one stage of it, which holds only some of the layers.

    A tied head is the embedding's own parameter and stays so when the module is moved. The last stage of a tied model
    has an embedding of its own for that, under the same name.
    """

    def __init__(self, spec: ModelSpec, layers: range | None = None, *, embeds: bool | None = None) -> None:
        """`embeds`: whether this stage makes the stream; without it, the stage with the first layer does."""
        super().__init__()
        held = range(spec.layers) if layers is None else layers
        self.spec, self.context = spec, Context()
        self.is_first, self.is_last = held.start == 0 if embeds is None else embeds, held.stop == spec.layers
        self.place: nn.Module | None = None  # puts images into the stream, in a model that sees
        needs_embedding = self.is_first or (self.is_last and spec.tied)
        self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden) if needs_embedding else None
        self.layers = nn.ModuleList()
        for number in range(spec.layers):  # what another stage holds is None here, so that names stay what they are
            self.layers.add_module(str(number), DecoderLayer(spec) if number in held else None)
        self.norm = RMSNorm(spec.hidden, eps=spec.block.norm_eps) if self.is_last else None
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False) if self.is_last else None
        self._tie()

    @property
    def blocks(self) -> tuple[DecoderLayer, ...]:
        """The layers that are here."""
        return tuple(layer for layer in self.layers if isinstance(layer, DecoderLayer))

    def use_context(self, context: Context) -> None:
        """Hold a part of each sequence from now on."""
        self.context = context
        for layer in self.blocks:
            layer.self_attn.context = context
            if isinstance(layer.mlp, MoeLayer):
                layer.mlp.context = context

    def forward(
        self,
        *stream: Tensor,
        tokens: Tensor,
        documents: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        rotation: Rotation | None = None,
        placed: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, an fp32 scalar summed over sequences and layers.

        `tokens` and `documents` [B, T] are whole under every plan. `documents` numbers the documents that share a
        sequence; attention and positions stay inside each, and `lengths` tells how long they are, row after row, if the
        host knows: it spares a GPU a mask. A stage that is not the last returns hidden states in place of logits, and
        the next takes them as `stream`. The balance loss is always that of the layers that are here. A `rotation` of
        this rank's tokens takes the place of the usual one; what `placed` has is what `place` puts into the stream.
        """
        if documents is None:
            positions, sight = torch.arange(tokens.shape[1], device=tokens.device)[None], None
        else:
            positions, sight = document_positions(documents), self.context.sight(documents, lengths)
        if rotation is None:
            rotation = rotation_at(self.context.mine(positions), self.spec.block.rope, self.spec.head_dim)
        x = stream[0] if stream else self._embed(tokens)
        if placed is not None and self.place is not None:
            x = self.place(x, *placed)
        balance = torch.zeros((), device=tokens.device)
        for layer in self.blocks:
            x, of_layer = layer(x, rotation, sight)
            balance = balance + of_layer
        if self.norm is None or self.lm_head is None:
            return x, balance
        return self.lm_head(self.norm(x)), balance

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.embed_tokens is not None, "a later stage is given its stream"
        stream = self.embed_tokens(self.context.mine(tokens))
        # From here on it has the dtype of the products, on every plan: there is nothing that memory moves more often.
        return stream if own_dtype(self.embed_tokens) == torch.float32 else as_autocast(stream)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving off the meta device makes new parameters, one for each name.
        super()._apply(fn, recurse)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.spec.tied and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight
