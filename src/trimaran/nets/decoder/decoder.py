"""The decoder: Llama and every family that `models/families` describes, under Hugging Face's parameter names."""

from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor, nn

from trimaran.models import ModelSpec, NormSpec, Rope, TemperatureSpec, norm_names
from trimaran.nets.decoder import cpu_kernels
from trimaran.nets.decoder.attention import Attention, Norm, RMSNorm, Rotation, norm_of, rotation_at
from trimaran.nets.decoder.attention_context import (
    AttentionScope,
    Context,
    document_lengths,
    document_positions,
    last_indices,
    split_documents,
)
from trimaran.nets.decoder.cpu_layer import AttendedFeedForward, normed_heads
from trimaran.nets.decoder.joint_projections import norm_and_residual
from trimaran.nets.decoder.key_value_cache import CacheExtension
from trimaran.nets.decoder.latent_attention import LatentAttention
from trimaran.nets.decoder.moe import FeedForward, MoeLayer, as_autocast
from trimaran.nets.local_shards import own_dtype
from trimaran.nets.paged_cache import PagedExtension
from trimaran.nets.varlen_attention import Segments, has_flash

IGNORED = -100
# The norms before and after the feed-forward, by the placement of norms.
FEED_FORWARD_NORMS = {
    "before": ("post_attention_layernorm", ""),
    "after": ("", "post_feedforward_layernorm"),
    "both": ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
}


def tokens_ahead(tokens: Tensor, documents: Tensor | None, places: int) -> Tensor:
    """Return the token `places` after each one; the document's last token, which has no label, where it has ended."""
    indices, last = _indices(tokens, documents)
    return tokens.gather(1, torch.minimum(indices + places, last))


def labels_ahead(labels: Tensor, documents: Tensor | None, places: int) -> Tensor:
    """Return the label `places` after each of `labels` [B, T], `IGNORED` where the document of that place has ended."""
    indices, last = _indices(labels, documents)
    found = labels.gather(1, torch.minimum(indices + places, last))
    return found.masked_fill(indices + places > last, IGNORED)


def _indices(tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the index of each token in its row, and that of the last token of its document."""
    indices = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if documents is None:
        return indices, torch.full_like(indices, tokens.shape[1] - 1)
    return indices, last_indices(documents)


class DecoderLayer(nn.Module):
    """One block: attention, then feed-forward, each added to the residual stream."""

    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def __init__(self, spec: ModelSpec, number: int = 0) -> None:
        super().__init__()
        layer, self.norms = spec.layer(number), spec.block.norm
        before, *others = norm_names(self.norms) if self.norms.placement != "after" else ("", *norm_names(self.norms))
        if before:
            self.add_module(before, norm_of(self.norms, spec.hidden, spec.block.norm_eps))
        latent = spec.block.attention.latent
        self.self_attn = Attention(spec, layer) if latent is None else LatentAttention(spec, layer, latent)
        for name in others:
            self.add_module(name, norm_of(self.norms, spec.hidden, spec.block.norm_eps))
        experts, activation = layer.experts, spec.block.activation
        self.mlp = MoeLayer(experts, spec.hidden) if experts else FeedForward(spec.hidden, layer.ffn, activation)
        self.has_plain_norms = self.norms == NormSpec()
        self.joint = self.fused = False

    @property
    def plain_norms(self) -> tuple[RMSNorm, ...]:
        """The norms if they are those of Llama, which have fast kernels; else none."""
        return (self.input_layernorm, self.post_attention_layernorm) if self.has_plain_norms else ()

    @property
    def is_fusible(self) -> bool:
        """Whether the CPU's fused functions compute this layer, if all its projections are joint."""
        plain = isinstance(self.mlp, FeedForward) and self.mlp.activation == "silu"
        return plain and bool(self.plain_norms and self.self_attn.projections) and self.self_attn.o_proj.bias is None

    def forward(self, x: Tensor, rotation: Rotation | None, scope: AttentionScope) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream after this layer, and the layer's balance loss, None without experts.

        The stream keeps its dtype, even if a module inside has its own precision. A `fused` layer does not call the
        modules inside it; it is one whose projections are all joint.
        """
        if not self.has_plain_norms:
            # The norms are not where Llama has them, or are others.
            inner = self._norm("input_layernorm", x)
            attended = self.self_attn(inner, rotation, scope)
            if self.norms.parallel:
                out, balance = self._feed_forward(inner)
                return x + attended.to(x.dtype) + out.to(x.dtype), balance
            names = FEED_FORWARD_NORMS[self.norms.placement]
            if self.norms.placement != "before":
                attended = self._norm("post_attention_layernorm", attended)
            x = x + attended.to(x.dtype)
            out, balance = self._feed_forward(self._norm(names[0], x))
            return x + self._norm(names[1], out).to(x.dtype), balance
        if self.fused and isinstance(self.mlp, FeedForward) and cpu_kernels.is_supported(x):
            assert rotation is not None, "a fused layer has rotary positions"
            attention = self.self_attn
            assert isinstance(attention, Attention), "latent attention is not fused"
            projections, heads = attention.projections, attention.num_heads
            x, query, key, value = normed_heads(x, self.input_layernorm, projections, rotation, heads)
            attended = attention.context.attend(query, key, value, scope, attention.options).transpose(1, 2).flatten(2)
            weights = (each.weight for each in (self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj))
            norm = self.post_attention_layernorm
            out = AttendedFeedForward.apply(attended, x, attention.o_proj.weight, norm.weight, norm.eps, *weights)
            return out, None
        norm = self.input_layernorm
        x, inner = norm_and_residual(x, norm) if self.joint else (x, norm(x))
        x = x + self.self_attn(inner, rotation, scope).to(x.dtype)
        norm = self.post_attention_layernorm
        x, inner = norm_and_residual(x, norm) if self.joint else (x, norm(x))
        out, balance = self._feed_forward(inner)
        return x + out.to(x.dtype), balance

    def _feed_forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.mlp(x) if isinstance(self.mlp, MoeLayer) else (self.mlp(x), None)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = getattr(self, name, None)
        return x if norm is None else norm(x)


class PredictionLayer(DecoderLayer):
    """A layer that predicts a later token (multi-token prediction), with the names of DeepSeek's folders.

    Its input is a projection of the embedding of a later token beside the stream of the layer before it, each with a
    norm. The folders have the embedding first, although the DeepSeek-V3 report writes it second.
    """

    def __init__(self, spec: ModelSpec, number: int) -> None:
        super().__init__(spec, number)
        self.enorm, self.hnorm = (norm_of(spec.block.norm, spec.hidden, spec.block.norm_eps) for _ in range(2))
        self.eh_proj = nn.Linear(2 * spec.hidden, spec.hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": norm_of(spec.block.norm, spec.hidden, spec.block.norm_eps)})

    def forward(  # pyrefly: ignore[bad-override]
        self, x: Tensor, rotation: Rotation | None, scope: AttentionScope, embedded: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return the input of the head, which is also that of the next such layer, and the layer's balance loss.

        `x` is the normed stream of the decoder, or the output of the prediction layer before; `embedded` are the
        embeddings of the later tokens.
        """
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), dim=-1))
        stream, balance = super().forward(joined.to(embedded.dtype), rotation, scope)
        return self.shared_head["norm"](stream), balance


class Decoder(nn.Module):
    """Maps tokens to logits; or one pipeline stage, which holds only some of the layers.

    A tied head is the embedding's own parameter and stays tied when the module is moved. The last stage of a tied model
    has its own embedding for that, under the same name; so does the last stage of a model that predicts later tokens.
    """

    def __init__(self, spec: ModelSpec, layers: range | None = None, *, embeds: bool | None = None) -> None:
        """`embeds`: whether this stage has the embedding; by default the stage with the first layer does."""
        super().__init__()
        held = range(spec.num_blocks) if layers is None else layers
        self.spec, self.context = spec, Context()
        self.is_first, self.is_last = held.start == 0 if embeds is None else embeds, held.stop == spec.num_blocks
        self.place: nn.Module | None = None  # inserts image tokens into the stream, in a vision-language model
        needs_embedding = self.is_first or (self.is_last and spec.shares_embedding)
        self.embed_tokens: nn.Embedding | None = None
        if needs_embedding and torch.get_default_device().type != "meta":
            self.embed_tokens = nn.Embedding(spec.vocab, spec.hidden)
        elif needs_embedding:  # torch would import its compiler to draw values on the meta device
            self.embed_tokens = nn.Embedding.from_pretrained(torch.empty(spec.vocab, spec.hidden), freeze=False)
        self.layers = nn.ModuleList()
        for number in range(spec.num_blocks):  # layers of other stages are None, so that names do not change
            kind = DecoderLayer if number < spec.layers else PredictionLayer
            self.layers.add_module(str(number), kind(spec, number) if number in held else None)
        self.norm: Norm | None = norm_of(spec.block.norm, spec.hidden, spec.block.norm_eps) if self.is_last else None
        self.lm_head = nn.Linear(spec.hidden, spec.vocab, bias=False) if self.is_last else None
        # Of multi-token prediction: the summed loss, from the input of the head and labels, and the sums of loss and
        # labels of each layer since they were last taken. Not a buffer: these are broadcast from rank 0 and saved.
        self.loss_of_later: Callable[[Tensor, Tensor], Tensor] | None = None
        self.later_sums = torch.zeros(spec.prediction_layers, 2, dtype=torch.float64)
        self._tie()

    @property
    def blocks(self) -> tuple[DecoderLayer, ...]:
        """The layers of this stage, also those that predict later tokens."""
        return tuple(layer for layer in self.layers if isinstance(layer, DecoderLayer))

    @property
    def prediction_layers(self) -> tuple[PredictionLayer, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, PredictionLayer))

    def take_later_sums(self) -> Tensor:
        """Return the summed loss and the number of labels of each prediction layer since the last call."""
        taken = self.later_sums.clone()
        self.later_sums.zero_()
        return taken

    def use_context(self, context: Context) -> None:
        """Use `context` in every layer: from now on each rank holds a part of each sequence."""
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
        added: Sequence[Tensor] = (),
        extension: CacheExtension | PagedExtension | None = None,
        labels: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, T, vocab] and the balance loss, an fp32 scalar summed over sequences and layers.

        `tokens` and `documents` [B, T] are unsharded under every plan. `documents` numbers the documents that share a
        sequence; attention and positions stay inside each. `lengths` are their lengths, row after row, if the host has
        them: a GPU then needs no mask. A stage other than the last returns hidden states instead of logits, and the
        next takes them as `stream`. The balance loss is that of this stage's layers. `rotation` overrides that of this
        rank's tokens; `placed` are the arguments of `place`; `added` are added to the stream after the first layers.
        With an `extension` of a cache the tokens follow the cached ones, and the logits are those of each row's last
        token, [B, 1, vocab]; with pages, of `kept` tokens. With `labels` [B, T] the weighted loss of later tokens is
        added to the balance loss, if the model predicts them.
        """
        scope: AttentionScope = None
        if extension is not None:
            positions = extension.positions
        elif documents is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
            # Each row is one segment if only the kernel for segments has windows.
            has_windows = any(self.spec.block.attention.windows)
            if has_windows and type(self.context) is Context and has_flash(tokens.device):
                scope = Segments.of_documents(torch.zeros_like(tokens), [tokens.shape[1]] * tokens.shape[0])
        else:
            positions, scope = document_positions(documents), self.context.scope(documents, lengths)
        rotations = self._rotations(positions, documents, extension) if rotation is None else {}
        scopes: dict[int | None, AttentionScope] = {None: scope}  # by the layers' chunk, None for layers without one
        for chunk in dict.fromkeys(layer.self_attn.chunk for layer in self.blocks) if extension is None else ():
            if chunk is not None:
                scopes[chunk] = scope
                if tokens.shape[1] > chunk:
                    inside = split_documents(positions.expand_as(tokens), documents, lengths, chunk)
                    scopes[chunk] = self.context.scope(*inside)
        x = stream[0] if stream else self._embed(tokens)
        if placed is not None and self.place is not None:
            x = self.place(x, *placed)
        balance = torch.zeros((), device=tokens.device)
        num_layers = len(self.blocks) - len(self.prediction_layers)
        for number, layer in enumerate(self.blocks[:num_layers]):
            attention = layer.self_attn
            turned = rotations.get(attention.rope or attention.temperature) if rotation is None else rotation
            seen = scopes[attention.chunk] if extension is None else extension.layer(number)
            x, of_layer = layer(x, turned, seen)
            x = x + added[number].to(x.dtype) if number < len(added) else x
            balance = balance if of_layer is None else balance + of_layer
        if self.norm is None or self.lm_head is None:
            return x, balance
        x = self.norm(x if extension is None else extension.last_of(x))
        logits = self.ended(self.lm_head(x))
        if labels is not None and self.loss_of_later is not None:
            balance = balance + self._later_loss(x, (tokens, labels, documents), rotations, scopes)
        return logits, balance

    def _later_loss(
        self,
        stream: Tensor,
        full: tuple[Tensor, Tensor, Tensor | None],
        rotations: Mapping[Rope | TemperatureSpec | None, Rotation],
        scopes: Mapping[int | None, AttentionScope],
    ) -> Tensor:
        """Return the weighted loss of the prediction layers, summed over labels; `full` are unsharded sequences."""
        prediction, compute_loss = self.spec.block.prediction, self.loss_of_later
        assert prediction is not None
        assert compute_loss is not None
        (tokens, labels, documents), sums = full, []
        total = torch.zeros((), device=tokens.device)
        for places, layer in enumerate(self.prediction_layers, 1):
            attention = layer.self_attn
            turned = rotations.get(attention.rope or attention.temperature)
            embedded = self._embed(tokens_ahead(tokens, documents, places))
            stream, balance = layer(stream, turned, scopes[attention.chunk], embedded)
            targets = self.context.shard(labels_ahead(labels, documents, places))
            loss = compute_loss(stream, targets)
            sums.append(torch.stack([loss.detach(), (targets != IGNORED).sum()]))
            total = total + loss * (prediction.weight / prediction.layers)
            total = total if balance is None else total + balance
        self.later_sums = self.later_sums.to(tokens.device).add_(torch.stack(sums))
        return total

    def _rotations(
        self, positions: Tensor, documents: Tensor | None, extension: CacheExtension | PagedExtension | None
    ) -> dict[Rope | TemperatureSpec | None, Rotation]:
        """Return the rotation of each rope here, and by temperature the query factors of layers without a rope."""
        ropes = dict.fromkeys(each.self_attn.rope for each in self.blocks)
        local, lengths = self.context.shard(positions), None
        if any(rope is not None and rope.longrope is not None for rope in ropes):
            if extension is None:
                lengths = self.context.shard(document_lengths(positions, documents))
            elif isinstance(extension, CacheExtension):  # sequences in pages never become so long
                lengths = torch.full_like(positions, extension.stop)
        head_dim = self.spec.head_dim
        rotations: dict[Rope | TemperatureSpec | None, Rotation] = {
            rope: rotation_at(local, rope, head_dim, lengths) for rope in ropes if rope is not None
        }
        for each in dict.fromkeys(layer.self_attn.temperature for layer in self.blocks):
            if each is not None:
                steps = torch.floor((local.float() + 1.0) / each.interval)  # more for late positions
                rotations[each] = ((torch.log1p(steps) * each.scale + 1.0)[:, None, :, None],) * 2
        return rotations

    def ended(self, logits: Tensor) -> Tensor:
        """Return the logits, scaled and capped as the spec says."""
        ends = self.spec.block.ends
        if ends.logit_scale != 1:
            logits = logits * ends.logit_scale
        return logits if not ends.logit_softcap else torch.tanh(logits / ends.logit_softcap) * ends.logit_softcap

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.embed_tokens is not None, "a later stage takes a stream"
        stream = self.embed_tokens(self.context.shard(tokens))
        if (scale := self.spec.embedding_scale) != 1:
            stream = stream * scale
        # From here on the stream has the matmul dtype, on every plan: it dominates the memory traffic.
        return stream if own_dtype(self.embed_tokens) == torch.float32 else as_autocast(stream)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Moving off the meta device creates a new parameter for each name, which unties them.
        super()._apply(fn, recurse)
        self._tie()
        self.later_sums = torch.zeros(self.later_sums.shape, dtype=torch.float64, device=next(self.parameters()).device)
        return self

    def _tie(self) -> None:
        if self.spec.tied and self.lm_head is not None and self.embed_tokens is not None:
            self.lm_head.weight = self.embed_tokens.weight
