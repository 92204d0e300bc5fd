"""The outline of our vision-language model."""

import math
from dataclasses import replace

from trimaran.core import RowSizes
from trimaran.models.hf_vision import DYNAMIC_SIZE
from trimaran.models.outline import LayerOperators, Outline, OutlineLayer, Tower, TowerLayer, outline_of
from trimaran.models.vlm_spec import ImageLimits, VisionSpec, VlmSpec

# Kernels of a vision layer's forward and backward: counted in a trace of Qwen2-VL's on one H200 (torch 2.11).
VISION_LAUNCHES = 100
# Moved per feature by x * sigmoid(1.702 x): three operators, each of which reads and writes 16 bits.
QUICK_GELU_BYTES = 12


def vlm_outline(spec: VlmSpec, images: ImageLimits) -> Outline:
    """Return the outline of `spec` for sequences with these images: vision, projector and language."""
    num_tiles, patches = _view(spec, images)
    segment = patches + spec.vision.ends.class_token
    language = outline_of(spec.language)
    vision = Tower(
        name="vision",
        runs=_runs(spec.vision),
        hidden=spec.vision.hidden,
        extras=spec.vision.outer_parameters,
        positions=num_tiles * segment,
        segment=segment,
    )
    return Outline(
        name=spec.name,
        towers=(vision, _projector(spec, num_tiles * patches), *language.towers),
        max_seq_len=spec.max_seq_len,
    )


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


def _view(spec: VlmSpec, images: ImageLimits) -> tuple[int, int]:
    """Return the number of tiles of a sequence's images, and the patches of each."""
    vision, cell = spec.vision, spec.vision.patch * spec.projector.merge
    if vision.variant == "tiled":
        side = images.size or vision.tile
        across = max(
            (k for k in range(1, math.isqrt(spec.max_tiles) + 1) if 2 * side * side > k * k * vision.tile**2), default=1
        )
        thumbnail = across > 1 and vision.ends.thumbnail != "none"
        return images.count * (across * across + thumbnail), vision.tile_side**2
    side = images.size or min(DYNAMIC_SIZE, math.isqrt(spec.max_pixels))
    return images.count, (max(1, round(side / cell)) * spec.projector.merge) ** 2


def _runs(vision: VisionSpec) -> tuple[tuple[OutlineLayer, int], ...]:
    quick = vision.block.activation == "quick-gelu"
    operators = LayerOperators(
        launches=VISION_LAUNCHES,
        rotary=vision.variant == "native",
        activation_bytes=QUICK_GELU_BYTES if quick else 4,
    )
    layer = TowerLayer(
        own_operators=operators,
        hidden=vision.hidden,
        heads=vision.heads,
        kv_heads=vision.heads,
        head_dim=vision.head_dim,
        ffn=vision.ffn,
        gated=vision.block.gated,
        causal=False,
        extras=vision.layer_extras,
    )
    if not vision.window:
        return ((layer, vision.layers),)
    windowed = replace(layer, window=(vision.window // vision.patch) ** 2)
    runs: list[tuple[OutlineLayer, int]] = []
    for number in range(vision.layers):
        each = layer if number in vision.full_layers else windowed
        if runs and runs[-1][0] == each:
            runs[-1] = each, runs[-1][1] + 1
        else:
            runs.append((each, 1))
    return tuple(runs)


def _projector(spec: VlmSpec, patches: int) -> Tower:
    """Return the projector: two matmuls, modelled as one feed-forward of its own width."""
    width, weights = spec.feature_width, spec.projector_weights
    ffn = weights // (2 * width)
    block = OutlineLayer(
        hidden=width,
        heads=0,
        kv_heads=0,
        head_dim=0,
        ffn=ffn,
        gated=False,
        causal=False,
        extras=spec.projector_extras + weights - 2 * width * ffn,
    )
    return Tower(name="projector", runs=((block, 1),), hidden=spec.hidden, positions=patches // spec.projector.merge**2)
