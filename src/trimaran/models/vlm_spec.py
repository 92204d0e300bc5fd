"""The shape of a vision-language model: a vision tower, a projector and our decoder; and its outline."""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

from trimaran.core import ImageRules, RowSizes
from trimaran.models.outline import LayerOperators, Outline, OutlineLayer, Tower, outline_of
from trimaran.models.spec import InitialRules, ModelSpec

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CHANNELS = 3
DYNAMIC_SIZE = 448  # pixels per side if the model takes any size and none is given: one tile of InternVL

INTERNVL_CHAT = "internvl_chat"  # the model type of InternVL folders whose code is in the folder


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlock:
    """The options of a vision layer in which Qwen, CLIP and InternViT differ.

    `qk_norm` normalises the queries and the keys of all heads together; `scaled` layers have a learned factor for each
    feature of their two branches. `bias` applies to every matmul except Q, K and V.
    """

    gated: bool = False
    rms_norm: bool = False
    activation: Literal["gelu", "gelu-tanh", "quick-gelu", "silu"] = "gelu"
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    bias: bool = True
    qk_norm: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEnds:
    """What precedes the vision layers, how pixels are normalised: (value / 255 - mean) / std, and how time counts.

    `table` is the number of patches per side of the learned positions, which are interpolated for other sizes; 0 is the
    number of a tile, and none in a native tower. A tiled tower may have a `class_token` before each tile. If an image
    has several tiles, a `thumbnail` of it precedes or follows them. A video of Qwen2.5-VL has `positions_per_second` in
    the decoder; 0 is the architecture's own number.
    """

    class_token: bool = False
    first_norm: bool = False
    stem_bias: bool = False
    table: int = 0
    thumbnail: Literal["none", "first", "last"] = "first"
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    positions_per_second: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A vision transformer.

    `native` takes images of any shape, packed as patches, with rotary positions by row and column; `tiled` takes
    squares of `tile` pixels, with a table of learned positions, and so does `anyres` (see `ImageRules`). `window` is in
    pixels per side; 0 is full attention in every layer; with windows, only the `full_layers` have it. A patch spans
    `frames` of a video; an image repeats.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    variant: Literal["native", "tiled", "anyres"] = "native"
    tile: int = 0
    window: int = 0
    full_layers: tuple[int, ...] = ()
    frames: int = 1
    block: VisionBlock = VisionBlock()
    ends: VisionEnds = VisionEnds()

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tile_side(self) -> int:
        """Patches per side of a tile."""
        return self.tile // self.patch

    @property
    def table_side(self) -> int:
        """Patches per side of the learned positions; 0 without a table."""
        return self.ends.table if self.variant == "native" else self.ends.table or self.tile_side

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 if self.block.rms_norm else 2)

    @property
    def layer_extras(self) -> int:
        """Parameters of one layer outside matmuls: norms, biases, factors."""
        block = self.block
        middle = self.ffn * (2 if block.gated else 1)
        biases = 3 * self.hidden * block.qkv_bias + (2 * self.hidden + middle) * block.bias
        return 2 * self.norm_parameters + biases + 2 * self.hidden * (block.qk_norm + block.scaled)

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: patch embedding, class token, positions, first norm."""
        ends = self.ends
        pixels = CHANNELS * self.frames * self.patch * self.patch
        rows = pixels + ends.stem_bias + ends.class_token * 2 + self.table_side**2  # the class token has a position too
        return self.hidden * rows + self.norm_parameters * ends.first_norm

    @property
    def num_parameters(self) -> int:
        matrices = 3 if self.block.gated else 2
        of_layer = self.hidden * (4 * self.hidden + matrices * self.ffn) + self.layer_extras
        return self.layers * of_layer + self.outer_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSpec:
    """From `merge` x `merge` patches to one token: concatenated, then two matmuls around a GELU.

    `mlp` normalises each patch before, if `normed`; `pixel-shuffle` normalises the concatenation. `hidden` is the width
    between the matmuls; 0 is the language model's. The features after the vision layers in `deepstack` have projectors
    of their own, of the kind `pixel-shuffle`: the first one's tokens are added to the stream after the first decoder
    layer, and so on (Qwen3-VL).
    """

    kind: Literal["mlp", "pixel-shuffle"] = "mlp"
    merge: int = 2
    hidden: int = 0
    normed: bool = True
    deepstack: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmSpec:
    """The shape of a vision-language model. Blocks in forward order: vision layers, projector, decoder layers.

    `sections` are the M-RoPE sections: the numbers of adjacent pairs of a head's features that follow time, row,
    column, and again time, and so on: three in Qwen2-VL, many in Qwen3-VL. Without them positions are plain indices.
    `layout` is the folder layout that weights are written in, where the shape alone does not decide it. The other
    fields describe image preprocessing: see `ImageRules`.
    """

    name: str
    vision: VisionSpec
    projector: ProjectorSpec
    language: ModelSpec
    image_token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    sections: tuple[int, ...] = ()
    min_pixels: int = 56 * 56
    max_pixels: int = 1280 * 28 * 28
    max_tiles: int = 12
    layout: Literal["", "internvl_chat", "internvl_internlm2"] = ""

    @property
    def layers(self) -> int:
        """Number of blocks that a pipeline can be split between; the projector is one."""
        return self.vision.layers + 1 + self.language.layers

    @property
    def num_blocks(self) -> int:
        return self.layers

    @property
    def tower_names(self) -> tuple[str, ...]:
        """The towers, in forward order."""
        return ("vision", "projector", "language")

    @property
    def hidden(self) -> int:
        return self.language.hidden

    @property
    def vocab(self) -> int:
        return self.language.vocab

    @property
    def max_seq_len(self) -> int:
        return self.language.max_seq_len

    @property
    def tied(self) -> bool:
        return self.language.tied

    @property
    def feature_width(self) -> int:
        """Input width of the projector for one token: the concatenated patches that it merges."""
        return self.vision.hidden * self.projector.merge**2

    @property
    def projector_middle(self) -> int:
        return self.projector.hidden or self.language.hidden

    @property
    def projector_extras(self) -> int:
        """Parameters of the projector outside matmuls."""
        kind, normed = self.projector.kind, self.projector.normed
        norm = 2 * self.feature_width if kind == "pixel-shuffle" else self.vision.norm_parameters * normed
        biases = self.projector_middle + self.hidden
        return norm + biases + len(self.projector.deepstack) * (2 * self.feature_width + biases)

    @property
    def num_parameters(self) -> int:
        """All distinct weights; a tied head counts once."""
        return vlm_outline(self, ImageLimits()).num_parameters

    def scenes(self) -> None:
        """Return the rules by which the data renders scenes: none."""

    def initial_rules(self, name: str) -> InitialRules:
        """Return how the parameter `name` starts.

        Narrow vision towers take long to start learning with a constant deviation. In large ones both are about equal.
        """
        tower, _, rest = name.partition(".")
        if tower == "language":
            return self.language.initial_rules(rest)
        depth = self.vision.layers if tower == "vision" else self.language.layers
        return InitialRules(depth=depth, by_fan_in=name.endswith(".weight"))

    def tensor_sizes(self, whole: Collection[str] = ()) -> dict[str, int]:
        """Return what tensor parallelism splits, by name. `whole` towers are not split; the decoder always is."""
        sizes = self.language.tensor_sizes()
        if "vision" not in whole:
            sizes |= {"heads of the vision": self.vision.heads}
            sizes |= {"features of the vision's feed-forward": self.vision.ffn}
        if "projector" not in whole:
            sizes |= {"features of the projector": self.projector_middle}
        return sizes

    def images(self) -> ImageRules:
        """Return the rules by which the data preprocesses images for this model."""
        vision = self.vision
        return ImageRules(
            patch=vision.patch,
            merge=self.projector.merge,
            image_token=self.image_token,
            variant=vision.variant,
            tile=vision.tile or 448,
            max_tiles=self.max_tiles,
            thumbnail=vision.ends.thumbnail,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            before=self.before,
            after=self.after,
            positions="grid" if self.sections else "line",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The images of one sample: how many, and how many pixels per side; None is the model's own size."""

    count: int = 1
    size: int | None = None


def interleaved_sections(parts: tuple[int, ...], pairs: int) -> tuple[int, ...]:
    """Return Qwen3-VL's sections: time, row and column take turns, `parts` of each; time also has the rest."""
    axes = (number % 3 if number < 3 * parts[number % 3] else 0 for number in range(pairs))
    sections: list[int] = []
    for axis, run in groupby(axes):
        while len(sections) % 3 != axis:  # an axis whose turn it is has none left
            sections.append(0)
        sections.append(len(list(run)))
    return tuple(sections)


# Kernels of a vision layer's forward and backward: counted in a trace of Qwen2-VL's on one H200 (torch 2.11).
VISION_LAUNCHES = 100
# Moved per feature by x * sigmoid(1.702 x): three operators, each of which reads and writes 16 bits.
QUICK_GELU_BYTES = 12


def vlm_outline(spec: VlmSpec, images: ImageLimits) -> Outline:
    """Return the outline of `spec` for sequences with these images: vision, projector and language."""
    vision, merge = spec.vision, spec.projector.merge
    if vision.variant == "tiled":
        has_thumbnail = vision.ends.thumbnail != "none"
        tiles = images.count * num_tiles(
            spec.max_tiles, images.size or vision.tile, vision.tile, thumbnail=has_thumbnail
        )
        patches = vision.tile_side**2  # of each tile
    else:
        side = images.size or min(DYNAMIC_SIZE, math.isqrt(spec.max_pixels))
        tiles, patches = images.count, (max(1, round(side / (vision.patch * merge))) * merge) ** 2
    quick = vision.block.activation == "quick-gelu"
    layer = OutlineLayer(
        operators=LayerOperators(
            launches=VISION_LAUNCHES,
            rotary=vision.variant == "native",
            activation_bytes=QUICK_GELU_BYTES if quick else 4,
        ),
        hidden=vision.hidden,
        heads=vision.heads,
        kv_heads=vision.heads,
        head_dim=vision.head_dim,
        ffn=vision.ffn,
        gated=vision.block.gated,
        causal=False,
        extras=vision.layer_extras,
    )
    runs = ((layer, vision.layers),)
    if vision.window:
        windowed = replace(layer, window=(vision.window // vision.patch) ** 2)
        layers = (layer if number in vision.full_layers else windowed for number in range(vision.layers))
        runs = tuple((each, len(list(run))) for each, run in groupby(layers))
    segment = patches + vision.ends.class_token
    tower = Tower(
        name="vision",
        runs=runs,
        hidden=vision.hidden,
        extras=vision.outer_parameters,
        positions=tiles * segment,
        segment=segment,
    )
    # Two matmuls of each projector, modelled as one feed-forward of its own width.
    weights = (1 + len(spec.projector.deepstack)) * spec.projector_middle * (spec.feature_width + spec.hidden)
    block = feed_forward_of(weights, spec.feature_width, spec.projector_extras)
    projector = Tower(name="projector", runs=((block, 1),), hidden=spec.hidden, positions=tiles * patches // merge**2)
    towers = (tower, projector, *outline_of(spec.language).towers)
    return Outline(name=spec.name, towers=towers, max_seq_len=spec.max_seq_len)


def with_row_sizes(outline: Outline, spec: VlmSpec, sizes: RowSizes) -> Outline:
    """Return the outline for rows that hold what `sizes` says. A rank without images encodes one group of patches."""
    merged = spec.projector.merge**2
    patches = max(merged, round(sizes.patches))
    segment = max(merged, round(sizes.image_patches)) + spec.vision.ends.class_token
    images = max(1, round(patches / (segment - spec.vision.ends.class_token)))
    own = {  # positions and segment
        "vision": (patches + images * spec.vision.ends.class_token, segment),
        "projector": (patches // merged, 0),
        outline.main.name: (outline.main.positions, max(1, round(sizes.attended_tokens))),
    }
    pairs = ((each, own.get(each.name, (each.positions, each.segment))) for each in outline.towers)
    towers = tuple(replace(each, positions=positions, segment=segment) for each, (positions, segment) in pairs)
    return replace(outline, towers=towers)


def equals_but(value: Any, plain: Any, *names: str) -> bool:
    """Return whether a spec equals a plain one in all fields but these."""
    return value == replace(plain, **{name: getattr(value, name) for name in names})


def feed_forward_of(weights: int, width: int, extras: int) -> OutlineLayer:
    """Return a feed-forward with this many weights and input `width`; the remainder of two equal matmuls is extra."""
    ffn, rest = divmod(weights, 2 * width)
    return OutlineLayer(
        hidden=width, heads=0, kv_heads=0, head_dim=0, ffn=ffn, gated=False, causal=False, extras=extras + rest
    )


def num_tiles(most: int, side: int, tile: int, *, thumbnail: bool = True) -> int:
    """Return InternVL's tiles of an image: as many as cover at least half of its pixels, and a thumbnail of several."""
    across = max((k for k in range(1, math.isqrt(most) + 1) if 2 * side * side > k * k * tile * tile), default=1)
    return across * across + (thumbnail and across > 1)
