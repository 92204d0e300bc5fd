"""The outline of any Hugging Face config.json: decoders, vision transformers and vision-language models."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trimaran.models.config_fields import Fields, bad_field, unknown_network
from trimaran.models.hf_language import HEADS, LAYERS, Switch, is_on, language_tower, longest
from trimaran.models.outline import Outline, OutlineLayer, Tower
from trimaran.models.validate_spec import MOST_LAYERS
from trimaran.models.vlm_spec import DYNAMIC_SIZE, ImageLimits, feed_forward_of, num_tiles

HIDDEN = ("embed_dim", "hidden_size")  # Qwen2-VL has both, and means the language's width by the second
DEPTH = (*LAYERS, "depth")
NEEDED = {"width": HIDDEN, "layers": DEPTH, "heads": HEADS, "patch": ("patch_size",)}


class View(NamedTuple):
    """How the images of a sample enter the tower: number of tiles, and patches and other tokens of each."""

    pieces: int
    patches: int
    tokens: int = 0

    @property
    def segment(self) -> int:
        return self.patches + self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTraits:
    """What all sizes of a vision family have in common; see `FamilyTraits` for the switches.

    `scaled` layers have a learned factor for each feature of their two branches. `tokens` are learned and added to the
    patches, `spare` ones are learned and only swapped in. `outer_norms` are before or after the layers.
    """

    gated: bool = False
    shifted: bool = True
    qkv_bias: Switch = True
    bias: Switch = True
    scaled: bool = False
    wide_norms: bool = False
    stem_bias: bool = True
    table: bool = True
    tokens: int = 1
    spare: int = 0
    outer_norms: int = 1


_QWEN_VISION = VisionTraits(stem_bias=False, table=False, tokens=0, outer_norms=0)

VISION_TRAITS: dict[str, VisionTraits] = {
    "vit": VisionTraits(qkv_bias="qkv_bias"),
    "yolos": VisionTraits(qkv_bias="qkv_bias"),
    "dinov2": VisionTraits(qkv_bias="qkv_bias", scaled=True, spare=1),
    "siglip_vision_model": VisionTraits(tokens=0),
    "clip_vision_model": VisionTraits(stem_bias=False, outer_norms=2),
    "internvl_vision": VisionTraits(qkv_bias="attention_bias", scaled=True, outer_norms=0),
    "intern_vit_6b": VisionTraits(qkv_bias="qkv_bias", scaled=True, outer_norms=0),
    "pixtral": VisionTraits(
        gated=True, shifted=False, qkv_bias=False, bias=False, stem_bias=False, table=False, tokens=0
    ),
    "qwen2_vl": _QWEN_VISION,
    "qwen2_5_vl": replace(_QWEN_VISION, gated=True, shifted=False),
    "qwen3_vl": replace(_QWEN_VISION, stem_bias=True),
    "qwen3_vl_moe": replace(_QWEN_VISION, stem_bias=True),
}

# Defaults of the configuration classes: a nested config.json may leave them out.
_BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
USUAL = {
    "vit": {"qkv_bias": True, "image_size": 224, "patch_size": 16},
    "yolos": {"qkv_bias": True, "num_detection_tokens": 100, "patch_size": 16},
    "dinov2": {"qkv_bias": True, "image_size": 224, "patch_size": 14, "mlp_ratio": 4},
    "siglip_vision_model": {**_BASE, "image_size": 224, "patch_size": 16, "vision_use_head": True},
    "clip_vision_model": {**_BASE, "image_size": 224, "patch_size": 32},
    "internvl_vision": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "image_size": [448, 448], "patch_size": [14, 14], "use_mean_pooling": True,
    },
    "intern_vit_6b": {
        "hidden_size": 3200, "num_hidden_layers": 48, "num_attention_heads": 25, "intermediate_size": 12800,
        "image_size": 224, "patch_size": 14, "qk_normalization": True, "norm_type": "rms_norm",
    },
    "pixtral": {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "patch_size": 16,
    },
    "qwen2_vl": {
        "depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14, "temporal_patch_size": 2,
    },
    "qwen2_5_vl": {
        "depth": 32, "hidden_size": 3584, "num_heads": 16, "intermediate_size": 3420, "patch_size": 14,
        "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": {
        "depth": 27, "hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "patch_size": 16,
        "temporal_patch_size": 2, "num_position_embeddings": 2304,
    },
}  # fmt: skip
USUAL["qwen3_vl_moe"] = USUAL["qwen3_vl"]


def with_vision_traits(fields: Fields, kind: str | None = None) -> tuple[Fields, VisionTraits]:
    """Return the fields with their family's defaults, and its traits; an unknown family is treated as a plain ViT."""
    kind = kind or fields.word("model_type", default="vit")
    fields = fields.assuming(USUAL.get(kind, {}))
    if missing := fields.missing(NEEDED):
        raise unknown_network(f"its vision lacks {', '.join(missing)}", fields.where)
    traits = VISION_TRAITS.get(kind, VisionTraits())
    if kind in ("internvl_vision", "intern_vit_6b"):
        traits = replace(
            traits,
            shifted=fields.word("norm_type", default="layer_norm") == "layer_norm",
            wide_norms=fields.boolean("use_qk_norm", "qk_normalization", default=False),
            outer_norms=0 if fields.boolean("use_mean_pooling", default=True) else 1,
            table=fields.boolean("use_absolute_position_embeddings", default=True),
            spare=int(fields.boolean("use_mask_token", default=False)),
        )
    return fields, replace(traits, tokens=traits.tokens + fields.size("num_detection_tokens", default=0, least=0))


def patches_of(fields: Fields, size: int | None, *, multiple: int = 1) -> int:
    """Return the number of patches of an image of `size` pixels per side, or of the size in the fields.

    `multiple` is how many patches per side are merged: sizes are rounded to it, as the processors do.
    """
    patch = fields.sides("patch_size")[0] * multiple
    sides = fields.sides("image_size") if size is None else (size, size)
    if min(sides) < patch:
        raise bad_field("patch_size", f"{min(sides)} pixels cannot be split into patches of {patch}", fields.where)
    tall, wide = (round(side / patch) if multiple > 1 else side // patch for side in sides)
    return tall * wide * multiple * multiple


def vision_tower(fields: Fields, traits: VisionTraits, view: View) -> Tower:
    """Return the vision tower for samples with this `view`."""
    hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
    head_dim = fields.divided(hidden, heads)
    own_ffn = int(hidden * fields.number("mlp_ratio")) if fields.has("mlp_ratio") else fields.size("intermediate_size")
    gated, ffn = traits.gated, own_ffn
    if fields.boolean("use_swiglu_ffn", default=False):  # Dinov2 giant: two thirds as wide, rounded to a multiple of 8
        gated, ffn = True, (ffn * 2 // 3 + 7) // 8 * 8
    matrices = 3 if gated else 2
    extras = hidden * (2 * (1 + traits.shifted) + 2 * traits.scaled + 2 * traits.wide_norms)
    extras += 3 * hidden * is_on(traits.qkv_bias, fields)
    extras += (hidden + ffn * (matrices - 1) + hidden) * is_on(traits.bias, fields)
    layer = OutlineLayer(
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=ffn,
        gated=gated,
        causal=False,
        extras=extras,
    )
    layers = fields.size(*DEPTH, most=MOST_LAYERS)
    # Outside the layers: patch embedding, tokens, positions, norms, head.
    pixels = fields.size("num_channels", "in_channels", "in_chans", default=3) * fields.sides("patch_size")[0] ** 2
    pixels *= fields.size("temporal_patch_size", default=1)
    total = hidden * (pixels + traits.stem_bias + traits.tokens + traits.spare)
    total += hidden * traits.outer_norms * (1 + traits.shifted)
    if fields.has("num_position_embeddings"):
        total += hidden * fields.size("num_position_embeddings")
    elif traits.table:
        rows = patches_of(fields, None) + traits.tokens
        middle = fields.boolean("use_mid_position_embeddings", default=fields.has("num_detection_tokens"))
        total += hidden * rows * (layers if middle else 1)
    if fields.boolean("vision_use_head", default=False):
        # SigLIP's pooling head: a query, attention, a norm, a feed-forward.
        total += hidden * (1 + 4 * hidden + 4 + 2 + 2 * own_ffn + 1) + own_ffn
    return Tower(
        name="vision",
        runs=_runs(layer, fields, layers),
        hidden=hidden,
        extras=total,
        positions=view.pieces * view.segment,
        segment=view.segment,
    )


def _runs(layer: OutlineLayer, fields: Fields, layers: int) -> tuple[tuple[OutlineLayer, int], ...]:
    """Return the layers; in Qwen2.5-VL all but a few attend within windows."""
    if not fields.has("fullatt_block_indexes", "window_size"):
        return ((layer, layers),)
    side = fields.size("window_size") // fields.sides("patch_size")[0]
    windowed, runs, before = replace(layer, window=side * side), [], 0
    for full in sorted(set(fields.numbers("fullatt_block_indexes"))):
        if before <= full < layers:
            runs += [(windowed, full - before), (layer, 1)]
            before = full + 1
    return tuple(run for run in [*runs, (windowed, layers - before)] if run[1])


ONE_IMAGE = ImageLimits()
MOST_TILES = 12  # default of InternVL's processor


def outline_from_hf(config: Mapping[str, Any], *, where: str, name: str, images: ImageLimits = ONE_IMAGE) -> Outline:
    """Return the outline that `config` describes; an unknown family is read as a Llama. `where` names it in errors."""
    fields = Fields(config, where)
    kind = fields.word("model_type", default="")
    if kind in VISION_TRAITS and not fields.has("vision_config"):
        fields, traits = with_vision_traits(fields)
        dynamic = DYNAMIC_SIZE if images.size is None and not fields.has("image_size") else images.size
        tower = vision_tower(fields, traits, View(images.count, patches_of(fields, dynamic), traits.tokens))
        # A stand-alone model's head: classes, boxes, a pooler, or nothing.
        built, labels, hidden = fields.config.get("architectures"), fields.config.get("id2label"), tower.hidden
        network = str(built[0]) if isinstance(built, list) and built else ""
        num_labels = len(labels) if isinstance(labels, dict) else fields.size("num_labels", default=2)
        head = 0
        if network.endswith("ForImageClassification"):
            head = num_labels * ((2 if network.startswith("Dinov2") else 1) * hidden + 1)
        elif network.endswith("ForObjectDetection"):
            # Two feed-forwards of three matmuls: classes with "no object", and four box sides.
            head = 4 * hidden * (hidden + 1) + (num_labels + 1 + 4) * (hidden + 1)
        elif network in ("ViTModel", "YolosModel"):
            head = hidden * (hidden + 1)
        return Outline(name=name, towers=(replace(tower, extras=tower.extras + head),))
    text, nested = _text_of(fields, kind), fields.has("text_config", "llm_config")
    if not fields.has("vision_config"):
        tower = language_tower(text, nested=nested)
        return Outline(name=name, towers=(tower,), max_seq_len=longest(text))
    if kind in ("clip", "siglip", "siglip2"):
        raise unknown_network(f"{kind} is two encoders side by side; its vision_config by itself is a network", where,
                              fix="train it in your own loop with trimaran.prepare")  # fmt: skip
    vision_config = VISION_OUTLINES.get(kind, VisionOutline(traits=None, view=_one_tile, join=_two_matmuls))
    vision, traits = with_vision_traits(fields.below("vision_config"), vision_config.traits)
    view = vision_config.view(vision, fields, images, traits.tokens)
    language = language_tower(text, tied=_tied(fields, text, kind), nested=nested)
    runs, tokens, extras = vision_config.join(fields, vision, language.hidden, view)
    projector = Tower(
        name="projector", runs=runs, hidden=language.hidden, extras=extras, positions=view.pieces * tokens
    )
    return Outline(
        name=name, towers=(vision_tower(vision, traits, view), projector, language), max_seq_len=longest(text)
    )


Runs = tuple[tuple[OutlineLayer, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionOutline:
    """The vision side of a VLM family: its vision tower, how images are tiled, and how it joins the language model.

    `join` returns the blocks of the projector, its tokens per tile, and parameters outside the blocks.
    """

    traits: str | None
    view: Callable[[Fields, Fields, ImageLimits, int], View]
    join: Callable[[Fields, Fields, int, View], tuple[Runs, int, int]]


def _text_of(fields: Fields, kind: str) -> Fields:
    """Return the fields of the language model: a nested mapping, or all fields, as in early Qwen2-VL."""
    own = f"{kind}_text" if kind.startswith(("qwen", "gemma3")) else {"paligemma": "gemma"}.get(kind, "llama")
    if fields.has("text_config", "llm_config"):
        text = fields.below("text_config", "llm_config")
        return text if text.has("model_type") else replace(text, config={**text.config, "model_type": own})
    if fields.has("vision_config"):
        return replace(fields, config={**fields.config, "model_type": own})
    return fields


def _tied(fields: Fields, text: Fields, kind: str) -> bool | None:
    """Return whether the head is tied to the embedding; None if neither part says so and the family decides."""
    name = "tie_word_embeddings"
    above, below = (each.boolean(name, default=False) for each in (fields, text))
    if fields.has(name):
        # Before transformers 5, these configs stated it in their language part only.
        return above or (below and kind in ("llava", "qwen2_vl", "qwen2_5_vl"))
    if text.has(name):
        return below
    return True if kind in ("internvl", "gemma3", "paligemma", "mistral3") else None


def _one_tile(vision: Fields, _: Fields, images: ImageLimits, tokens: int) -> View:
    """Resize every image to the tower's own size."""
    return View(images.count, patches_of(vision, None), tokens)


def _grid_of_tiles(vision: Fields, model: Fields, images: ImageLimits, tokens: int) -> View:
    """LLaVA-NeXT: a thumbnail, and the image in the grid of tiles that wastes least."""
    base = max(vision.sides("image_size"))
    side = images.size or base
    pinpoints = model.config.get("image_grid_pinpoints") or [[base, 2 * base], [2 * base, base], [2 * base, 2 * base]]
    try:
        grids = [(int(tall), int(wide)) for tall, wide in pinpoints]
        best = max(grids, key=lambda grid: (min(*grid, side), -grid[0] * grid[1]))
        tiles = 1 + best[0] * best[1] // (base * base)
    except (TypeError, ValueError):
        raise bad_field("image_grid_pinpoints", "it is not a list of heights and widths", model.where) from None
    return View(images.count * tiles, patches_of(vision, None), tokens)


def _square_tiles(vision: Fields, model: Fields, images: ImageLimits, tokens: int) -> View:
    base = max(model.sides("force_image_size") if model.has("force_image_size") else vision.sides("image_size"))
    tiles = num_tiles(model.size("max_dynamic_patch", default=MOST_TILES), images.size or base, base)
    return View(images.count * tiles, patches_of(vision, base), tokens)


def _any_size(vision: Fields, model: Fields, images: ImageLimits, tokens: int) -> View:
    """Qwen-VL and Pixtral: native resolution."""
    merge = vision.size("spatial_merge_size", default=model.size("spatial_merge_size", default=2))
    return View(images.count, patches_of(vision, images.size or DYNAMIC_SIZE, multiple=merge), tokens)


def _two_matmuls(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    layers = vision.size(*HIDDEN) * max(1, len(model.numbers("vision_feature_layer")))
    bias = 2 * width * model.boolean("multimodal_projector_bias", default=True)
    whole = model.word("vision_feature_select_strategy", default="default") == "full"
    return ((feed_forward_of(width * (layers + width), width, bias), 1),), view.segment if whole else view.patches, 0


def _two_products_and_newline(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    runs, tokens, _ = _two_matmuls(model, vision, width, view)
    return runs, tokens, width


def _shuffled(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """InternVL: pixel shuffle, a norm, two matmuls."""
    ratio = model.number("downsample_ratio", default=0.5)
    if not 0 < ratio <= 1:
        raise bad_field("downsample_ratio", f"{ratio} is not between 0 and 1", model.where)
    wide = vision.size(*HIDDEN) * round(1 / ratio) ** 2
    return ((feed_forward_of(width * (wide + width), width, 2 * wide + 2 * width), 1),), int(view.patches * ratio**2), 0


def _one_matmul(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """Gemma 3 pools and normalises before its matmul; PaliGemma's has a bias and its own width."""
    wide = vision.size(*HIDDEN)
    if model.word("model_type", default="") == "gemma3":
        return ((feed_forward_of(wide * width, width, wide), 1),), model.size("mm_tokens_per_image", default=256), 0
    width = model.size("projection_dim", default=width)
    return ((feed_forward_of(wide * width, width, width), 1),), view.patches, 0


def _merged_and_two_matmuls(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """Mistral 3: a norm, merged patches, two matmuls."""
    wide, merge = vision.size(*HIDDEN), model.size("spatial_merge_size", default=2) ** 2
    bias = 2 * width * model.boolean("multimodal_projector_bias", default=False)
    weights = wide * wide * merge + width * (wide + width)
    return ((feed_forward_of(weights, width, wide + bias), 1),), view.patches // merge, 0


def _merger(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """Qwen-VL: merged patches, two matmuls; Qwen3-VL has another merger for each tapped layer."""
    wide, merge = vision.size(*HIDDEN), vision.size("spatial_merge_size", default=2) ** 2
    merged = wide * merge
    shifted = 1 if model.word("model_type", default="") == "qwen2_5_vl" else 2
    weights, bias = merged * (merged + width), merged + width
    taps = len(vision.numbers("deepstack_visual_indexes"))
    runs = (
        (feed_forward_of(weights, merged, bias + shifted * wide), 1),
        (feed_forward_of(weights, merged, bias + 2 * merged), taps),
    )
    return tuple(run for run in runs if run[1]), view.patches // merge, 0


VISION_OUTLINES: dict[str, VisionOutline] = {
    "llava": VisionOutline(traits=None, view=_one_tile, join=_two_matmuls),
    "llava_next": VisionOutline(traits=None, view=_grid_of_tiles, join=_two_products_and_newline),
    "llava_onevision": VisionOutline(traits=None, view=_grid_of_tiles, join=_two_products_and_newline),
    "internvl": VisionOutline(traits="internvl_vision", view=_square_tiles, join=_shuffled),
    "internvl_chat": VisionOutline(traits="intern_vit_6b", view=_square_tiles, join=_shuffled),
    "gemma3": VisionOutline(traits="siglip_vision_model", view=_one_tile, join=_one_matmul),
    "paligemma": VisionOutline(traits="siglip_vision_model", view=_one_tile, join=_one_matmul),
    "mistral3": VisionOutline(traits="pixtral", view=_any_size, join=_merged_and_two_matmuls),
    **{
        kind: VisionOutline(traits=kind, view=_any_size, join=_merger)
        for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
    },
}
