"""A vision transformer for concatenated images of any shape, or for square tiles; and the projector after it."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trimaran.models import CHANNELS, VisionEnds, VisionSpec, VlmSpec
from trimaran.nets.decoder.attention import RMSNorm, Rotation, rotate
from trimaran.nets.varlen_attention import Segments, segment_attention
from trimaran.nets.vlm.patch_layout import PatchLayout

MAX_PIXEL = 255.0


class VisionLayerNorm(nn.LayerNorm):
    """LayerNorm that accumulates in fp32 and returns the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = (each.to(input.dtype) for each in (self.weight, self.bias))
        # The kernel accumulates in fp32. Autocast would cast its input before and its output after, and save the cast.
        with torch.autocast(input.device.type, enabled=False):
            return F.layer_norm(input, self.normalized_shape, weight, bias, self.eps)


def norm_of(spec: VisionSpec, width: int) -> nn.Module:
    return (RMSNorm if spec.block.rms_norm else VisionLayerNorm)(width, eps=spec.block.norm_eps)


def activate(x: Tensor, kind: str) -> Tensor:
    """Return `x` after the activation that a spec calls `kind`."""
    if kind == "quick-gelu":
        return F.silu(1.702 * x) / 1.702  # x * sigmoid(1.702 x), which saves less for backward
    if kind == "gelu-tanh":
        return F.gelu(x, approximate="tanh")
    return F.silu(x) if kind == "silu" else F.gelu(x)


class VisionAttention(nn.Module):
    """Attention inside each segment. The number of heads follows from its projections, so a TP slice works."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        block, width = spec.block, spec.hidden
        self.head_dim = spec.head_dim
        self.q_proj = nn.Linear(width, width, bias=block.qkv_bias)
        self.k_proj = nn.Linear(width, width, bias=block.qkv_bias)
        self.v_proj = nn.Linear(width, width, bias=block.qkv_bias)
        self.o_proj = nn.Linear(width, width, bias=block.bias)
        self.q_norm = norm_of(spec, width) if block.qk_norm else nn.Identity()
        self.k_norm = norm_of(spec, width) if block.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        """Return the attention output for `x` [1, T, hidden]; each position attends to its own segment."""
        heads = (*x.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(x)).view(heads).transpose(1, 2)
        key = self.k_norm(self.k_proj(x)).view(heads).transpose(1, 2)
        value = self.v_proj(x).view(heads).transpose(1, 2)
        if rotation is not None:
            query, key = (rotate(each, rotation) for each in (query, key))
        query, key = (each.to(value.dtype) for each in (query, key))
        out = segment_attention(query, key, value, segments, causal=False)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class VisionFeedForward(nn.Module):
    """Two linear layers around an activation; a third one gates it if the spec says so."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        bias, self.activation = spec.block.bias, spec.block.activation
        self.gate_proj = nn.Linear(spec.hidden, spec.ffn, bias=bias) if spec.block.gated else None
        self.up_proj = nn.Linear(spec.hidden, spec.ffn, bias=bias)
        self.down_proj = nn.Linear(spec.ffn, spec.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(activate(up, self.activation))
        return self.down_proj(activate(self.gate_proj(x), self.activation) * up)


class VisionLayer(nn.Module):
    """One block: attention, then feed-forward, each added to the residual stream."""

    def __init__(self, spec: VisionSpec) -> None:
        super().__init__()
        self.input_layernorm = norm_of(spec, spec.hidden)
        self.self_attn = VisionAttention(spec)
        self.post_attention_layernorm = norm_of(spec, spec.hidden)
        self.mlp = VisionFeedForward(spec)
        scaled = spec.block.scaled
        self.attn_scale = nn.Parameter(torch.ones(spec.hidden)) if scaled else None
        self.mlp_scale = nn.Parameter(torch.ones(spec.hidden)) if scaled else None

    def forward(self, x: Tensor, rotation: Rotation | None, segments: Segments) -> Tensor:
        """Return the stream [1, T, hidden] after this layer."""
        x = x + _scaled(self.self_attn(self.input_layernorm(x), rotation, segments), self.attn_scale)
        return x + _scaled(self.mlp(self.post_attention_layernorm(x)), self.mlp_scale)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x * scale.to(x.dtype)


def normalise_patches(patches: Tensor, ends: VisionEnds) -> Tensor:
    """Return `patches` u8 [P, channel x row x column] in fp32, normalised per channel with the tower's mean and std."""
    # Python numbers instead of tensors: a tensor of three values would be copied to the device each time.
    channels = patches.unflatten(1, (CHANNELS, -1)).float().div(MAX_PIXEL).unbind(1)
    scaled = [(channel - mean) / std for channel, mean, std in zip(channels, ends.mean, ends.std, strict=True)]
    return torch.stack(scaled, 1).flatten(1)


class Stem(nn.Module):
    """Embeds patches and adds learnt positions, if there are any; a tiled tower also has a class token."""

    def __init__(self, spec: VisionSpec, merge: int) -> None:
        super().__init__()
        self.spec, self.merge, ends = spec, merge, spec.ends
        pixels = CHANNELS * spec.frames * spec.patch * spec.patch
        self.patch_embed = nn.Linear(pixels, spec.hidden, bias=ends.stem_bias)
        self.class_token = nn.Parameter(torch.zeros(1, spec.hidden)) if ends.class_token else None
        rows = spec.table_side**2 + ends.class_token
        self.positions = nn.Parameter(torch.zeros(rows, spec.hidden)) if spec.table_side else None
        self.norm = norm_of(spec, spec.hidden) if ends.first_norm else None

    def forward(self, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Return the stream [1, T, hidden] of `patches` u8 [P, channel x (frame x) row x column], as laid out."""
        weight = self.patch_embed.weight
        if patches.shape[1] != weight.shape[1]:  # an image is a video of equal frames: their weights add up
            weight = weight.unflatten(1, (CHANNELS, self.spec.frames, -1)).sum(2).flatten(1)
        x = F.linear(normalise_patches(patches, self.spec.ends).to(weight.dtype), weight, self.patch_embed.bias)
        if self.spec.variant == "native":
            if self.positions is not None:  # a weighted mean of the four nearest rows of the table
                assert layout.table is not None, "the layout of a tower with a table has the neighbours of each patch"
                rows, weights = layout.table
                x = x + (self.positions[rows] * weights.unsqueeze(-1)).sum(1).to(x.dtype)
            x = x if layout.order is None else x[layout.order]
        else:
            x, positions = x.unflatten(0, (layout.num_tiles, -1)), self.position_table(layout.patches_per_tile)
            if self.class_token is not None:  # before each tile
                x = torch.cat([self.class_token.to(x.dtype).expand(len(x), 1, -1), x], 1)
            x = (x if positions is None else x + positions.to(x.dtype)).flatten(0, 1)
        if self.norm is not None:
            x = self.norm(x)
        return x.unsqueeze(0)

    def position_table(self, patches: int) -> Tensor | None:
        """Return the learnt positions of one tile in the order of its patches, after that of the class token."""
        if self.positions is None:
            return None
        first = self.positions[: int(self.spec.ends.class_token)]
        table = self.positions[len(first) :].unflatten(0, (self.spec.table_side, -1))
        side, merge = self.spec.tile_side, self.merge
        if side != self.spec.table_side:
            wide = table.permute(2, 0, 1)[None].float()
            wide = F.interpolate(wide, size=(side, side), mode="bicubic", align_corners=False)
            table = wide[0].permute(1, 2, 0).to(table.dtype)
        blocks = table.unflatten(0, (-1, merge)).unflatten(2, (-1, merge)).transpose(1, 2)
        return torch.cat([first, blocks.reshape(-1, table.shape[-1])[:patches]])


class VisionTower(nn.Module):
    """Maps patches to the vision stream; or some of its layers, which take the stream of the previous stage.

    The stream after the layers in `taps` is kept beside it: its last dimension then has the parts (stream, first tap,
    second tap and so on), zeros for those to come.
    """

    def __init__(self, spec: VisionSpec, merge: int, held: range, taps: Sequence[int] = ()) -> None:
        super().__init__()
        self.spec, self.is_complete, self.taps = spec, held == range(spec.layers), tuple(taps)
        self.stem = Stem(spec, merge) if held.start == 0 else None
        self.layers = nn.ModuleList()
        for number in range(spec.layers):  # layers of other stages are None, so that names do not change
            self.layers.add_module(str(number), VisionLayer(spec) if number in held else None)

    @property
    def blocks(self) -> tuple[VisionLayer, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, VisionLayer))

    def forward(self, *stream: Tensor, patches: Tensor, layout: PatchLayout) -> Tensor:
        """Return the stream [1, T, hidden] after the layers of this stage. Attention stays inside each image."""
        if self.stem is not None:
            x = self.stem(patches, layout)
            kept = [torch.zeros_like(x)] * len(self.taps)
        else:
            x, *kept = stream[0].split(self.spec.hidden, -1) if self.taps else (stream[0],)
        for number, layer in self.layers.named_children():
            if isinstance(layer, VisionLayer):
                full = layout.window_segments is None or int(number) in self.spec.full_layers
                x = layer(x, layout.rotation, layout.image_segments if full else layout.window_segments)
                if int(number) in self.taps:
                    kept[self.taps.index(int(number))] = x
        return torch.cat([x, *kept], -1) if kept else x


class DeepProjector(nn.Module):
    """Maps the features of an early vision layer to what is added to the image tokens after a decoder layer."""

    def __init__(self, spec: VlmSpec) -> None:
        super().__init__()
        self.norm = VisionLayerNorm(spec.feature_width, eps=spec.vision.block.norm_eps)
        self.linear_1 = nn.Linear(spec.feature_width, spec.projector_middle)
        self.linear_2 = nn.Linear(spec.projector_middle, spec.hidden)

    def forward(self, features: Tensor) -> Tensor:
        """Return [M, hidden] of `features` [M, width]."""
        return self.linear_2(F.gelu(self.linear_1(self.norm(features))))


class Projector(nn.Module):
    """Maps patch features to image tokens of the language model."""

    def __init__(self, spec: VlmSpec) -> None:
        super().__init__()
        self.patch_width, self.norm = spec.vision.hidden, None
        if spec.projector.kind == "pixel-shuffle":
            self.norm, self.patch_width = VisionLayerNorm(spec.feature_width), spec.feature_width
        elif spec.projector.normed:
            self.norm = norm_of(spec.vision, self.patch_width)
        self.linear_1 = nn.Linear(spec.feature_width, spec.projector_middle)
        self.linear_2 = nn.Linear(spec.projector_middle, spec.hidden)
        taps = spec.projector.deepstack
        self.deep = nn.ModuleList(DeepProjector(spec) for _ in taps) if taps else None

    def forward(self, features: Tensor) -> Tensor:
        """Return the tokens [M, hidden] of merged patches [M, width]; with deepstack, those of its layers follow."""
        deep: list[Tensor] = []
        if self.deep is not None:
            features, *others = features.chunk(1 + len(self.deep), -1)
            deep = [module(each) for module, each in zip(self.deep, others, strict=True)]
        if self.norm is not None:
            features = self.norm(features.unflatten(1, (-1, self.patch_width))).flatten(1)
        tokens = self.linear_2(F.gelu(self.linear_1(features)))
        return torch.cat([tokens, *deep], -1) if deep else tokens


class InsertImageTokens(nn.Module):
    """Inserts image tokens into the text stream. It has no parameters; it is a module so that a TP plan can name it."""

    def forward(self, stream: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """Return `stream` [B, T, hidden] with row `index` [B, T] of `rows` [M, hidden] wherever it is not negative.

        M is at least 1. A row that no position uses gets a zero gradient, so that the vision tower and the projector
        take part in the collectives of backward.
        """
        chosen = rows[index.clamp(min=0)].to(stream.dtype)
        return torch.where((index >= 0).unsqueeze(-1), chosen, stream)


def image_token_index(tokens: Tensor, image_token: int) -> Tensor:
    """Return the number of the image token at each position of `tokens` [B, T], counted row by row; -1 for text."""
    is_image = tokens == image_token
    counted = is_image.flatten().cumsum(0).view_as(tokens) - 1
    return counted.masked_fill(~is_image, -1)
