"""What a network that sees and reads is, on paper: a vision tower, a projector and our decoder."""

from dataclasses import dataclass
from typing import Literal

from trimaran.core import ImageRules
from trimaran.models.spec import ModelSpec

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionBlock:
    """The choices inside a vision layer that Qwen, CLIP and InternViT make differently.

    `qk_norm` norms the queries and the keys of all heads together; `scaled` layers have a learnt factor for each
    feature of their two branches. `bias` is that of every product but the three into attention.
    """

    gated: bool = False
    rms_norm: bool = False
    activation: Literal["gelu", "quick-gelu", "silu"] = "gelu"
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    bias: bool = True
    qk_norm: bool = False
    scaled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEnds:
    """What stands before the vision layers, and how pixels are normed: (share of full brightness - mean) / std.

    `table` is how many patches a side the learnt positions of a tiled tower are for, 0 for as many as a tile has; they
    are interpolated where a tile has another number. A tiled tower may have a `class_token` before each tile.
    """

    class_token: bool = False
    first_norm: bool = False
    stem_bias: bool = False
    table: int = 0
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """A vision transformer.

    `native` takes images of any shape, their patches one behind the other, with rotary positions of row and column;
    `tiled` takes squares of `tile` pixels, with a table of learnt positions. `window` is in pixels a side, and 0 means
    that every layer sees the whole image; with windows, the `full_layers` still do. `frames` of a film go into one
    patch; an image is taken for a film that stands still.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    patch: int
    variant: Literal["native", "tiled"] = "native"
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
        """Patches a side of a tile."""
        return self.tile // self.patch

    @property
    def table_side(self) -> int:
        """Patches a side that the learnt positions are for; 0 without a table."""
        return (self.ends.table or self.tile_side) if self.variant == "tiled" else 0

    @property
    def norm_parameters(self) -> int:
        return self.hidden * (1 if self.block.rms_norm else 2)

    @property
    def layer_extras(self) -> int:
        """Parameters of one layer that belong to no product: norms, biases, factors."""
        block = self.block
        middle = self.ffn * (2 if block.gated else 1)
        biases = 3 * self.hidden * block.qkv_bias + (2 * self.hidden + middle) * block.bias
        return 2 * self.norm_parameters + biases + 2 * self.hidden * (block.qk_norm + block.scaled)

    @property
    def layer_parameters(self) -> int:
        matrices = 3 if self.block.gated else 2
        return self.hidden * (4 * self.hidden + matrices * self.ffn) + self.layer_extras

    @property
    def outer_parameters(self) -> int:
        """Parameters in no layer: patches in, the class token, positions, the first norm."""
        ends = self.ends
        pixels = CHANNELS * self.frames * self.patch * self.patch
        rows = pixels + ends.stem_bias + ends.class_token * 2 + self.table_side**2  # the class token has a place too
        return self.hidden * rows + self.norm_parameters * ends.first_norm

    @property
    def num_parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorSpec:
    """From `merge` x `merge` patches to one token: what they hold side by side, and two products around a GELU.

    `mlp` norms each patch before, if `normed`; `pixel-shuffle` norms what was put side by side. `hidden` is the width
    between the products: 0 is the language's.
    """

    kind: Literal["mlp", "pixel-shuffle"] = "mlp"
    merge: int = 2
    hidden: int = 0
    normed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class VlmSpec:
    """A model that sees. Its blocks, in the order of the forward: vision layers, the projector, decoder layers.

    `sections` says how many pairs of a head's features turn by time, row and column (Qwen2-VL); without it positions
    are numbers. The rest tells the data how images come in: see `ImageRules`.
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

    @property
    def layers(self) -> int:
        """Blocks that a pipeline can be cut between; the projector is one."""
        return self.vision.layers + 1 + self.language.layers

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
        """What the projector takes in for one token: the patches that it merges, side by side."""
        return self.vision.hidden * self.projector.merge**2

    @property
    def projector_middle(self) -> int:
        return self.projector.hidden or self.language.hidden

    @property
    def projector_extras(self) -> int:
        """Parameters of the projector that belong to no product."""
        kind, normed = self.projector.kind, self.projector.normed
        norm = 2 * self.feature_width if kind == "pixel-shuffle" else self.vision.norm_parameters * normed
        return norm + self.projector_middle + self.hidden

    @property
    def projector_parameters(self) -> int:
        return self.projector_middle * (self.feature_width + self.hidden) + self.projector_extras

    @property
    def num_parameters(self) -> int:
        """All distinct weights; a tied head counts once."""
        return self.vision.num_parameters + self.projector_parameters + self.language.num_parameters

    def images(self) -> ImageRules:
        """Return what the data must know to bring images to this model."""
        vision = self.vision
        return ImageRules(
            patch=vision.patch,
            merge=self.projector.merge,
            image_token=self.image_token,
            variant=vision.variant,
            tile=vision.tile or 448,
            max_tiles=self.max_tiles,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            before=self.before,
            after=self.after,
            positions="grid" if self.sections else "line",
        )
