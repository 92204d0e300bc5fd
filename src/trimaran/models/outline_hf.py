"""The outline of any Hugging Face config.json: decoders, vision transformers and vision-language models."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimaran.models.config_fields import Fields, bad_field, unknown_network
from trimaran.models.hf_language import language_tower, longest
from trimaran.models.hf_vision import (
    DYNAMIC_SIZE,
    VISION_TRAITS,
    View,
    head_parameters,
    patches_of,
    vision_tower,
    with_vision_traits,
)
from trimaran.models.outline import Outline, OutlineLayer, Tower
from trimaran.models.vlm_spec import ImageLimits

ONE_IMAGE = ImageLimits()
MOST_TILES = 12  # default of InternVL's processor


def outline_from_hf(config: Mapping[str, Any], *, where: str, name: str, images: ImageLimits = ONE_IMAGE) -> Outline:
    """Return the outline of the network that `config` describes. `where` names the configuration in errors.

    An unknown family is read by the most common field names, as a Llama.
    """
    fields = Fields(config, where)
    kind = fields.word("model_type", default="")
    if kind in VISION_TRAITS and not fields.has("vision_config"):
        return Outline(name=name, towers=(_vision_alone(fields, images),))
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


def _vision_alone(fields: Fields, images: ImageLimits) -> Tower:
    fields, traits = with_vision_traits(fields)
    dynamic = DYNAMIC_SIZE if images.size is None and not fields.has("image_size") else images.size
    tower = vision_tower(fields, traits, View(images.count, patches_of(fields, dynamic), traits.tokens))
    return replace(tower, extras=tower.extras + head_parameters(fields, tower.hidden))


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
    """InternVL: as many tiles as cover at least half of the image's pixels, plus a thumbnail if there are several."""
    base = max(model.sides("force_image_size") if model.has("force_image_size") else vision.sides("image_size"))
    most, side = model.size("max_dynamic_patch", default=MOST_TILES), images.size or base
    across = max((k for k in range(1, math.isqrt(most) + 1) if 2 * side * side > k * k * base * base), default=1)
    tiles = across * across + (across > 1)
    return View(images.count * tiles, patches_of(vision, base), tokens)


def _any_size(vision: Fields, model: Fields, images: ImageLimits, tokens: int) -> View:
    """Qwen-VL and Pixtral: native resolution."""
    merge = vision.size("spatial_merge_size", default=model.size("spatial_merge_size", default=2))
    return View(images.count, patches_of(vision, images.size or DYNAMIC_SIZE, multiple=merge), tokens)


def _feed_forward(weights: int, width: int, extras: int) -> OutlineLayer:
    """Return a feed-forward with this many weights and input `width`; the remainder of two equal matmuls is extra."""
    ffn = weights // (2 * width)
    return OutlineLayer(
        hidden=width, heads=0, kv_heads=0, head_dim=0, ffn=ffn, gated=False, causal=False,
        extras=extras + weights - 2 * width * ffn,
    )  # fmt: skip


def _two_matmuls(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    layers = vision_width(vision) * max(1, len(model.numbers("vision_feature_layer")))
    bias = 2 * width * model.boolean("multimodal_projector_bias", default=True)
    whole = model.word("vision_feature_select_strategy", default="default") == "full"
    return ((_feed_forward(width * (layers + width), width, bias), 1),), view.segment if whole else view.patches, 0


def _two_products_and_newline(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    runs, tokens, _ = _two_matmuls(model, vision, width, view)
    return runs, tokens, width


def _shuffled(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """InternVL: pixel shuffle, a norm, two matmuls."""
    ratio = model.number("downsample_ratio", default=0.5)
    if not 0 < ratio <= 1:
        raise bad_field("downsample_ratio", f"{ratio} is not between 0 and 1", model.where)
    wide = vision_width(vision) * round(1 / ratio) ** 2
    return ((_feed_forward(width * (wide + width), width, 2 * wide + 2 * width), 1),), int(view.patches * ratio**2), 0


def _one_matmul(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """Gemma 3 pools and normalises before its matmul; PaliGemma's has a bias and its own width."""
    wide = vision_width(vision)
    if model.word("model_type", default="") == "gemma3":
        return ((_feed_forward(wide * width, width, wide), 1),), model.size("mm_tokens_per_image", default=256), 0
    width = model.size("projection_dim", default=width)
    return ((_feed_forward(wide * width, width, width), 1),), view.patches, 0


def _merged_and_two_matmuls(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """Mistral 3: a norm, merged patches, two matmuls."""
    wide, merge = vision_width(vision), model.size("spatial_merge_size", default=2) ** 2
    bias = 2 * width * model.boolean("multimodal_projector_bias", default=False)
    weights = wide * wide * merge + width * (wide + width)
    return ((_feed_forward(weights, width, wide + bias), 1),), view.patches // merge, 0


def _merger(model: Fields, vision: Fields, width: int, view: View) -> tuple[Runs, int, int]:
    """Qwen-VL: merged patches, two matmuls; Qwen3-VL has another merger for each tapped layer."""
    wide, merge = vision_width(vision), vision.size("spatial_merge_size", default=2) ** 2
    merged = wide * merge
    shifted = 1 if model.word("model_type", default="") == "qwen2_5_vl" else 2
    weights, bias = merged * (merged + width), merged + width
    taps = len(vision.numbers("deepstack_visual_indexes"))
    runs = (
        (_feed_forward(weights, merged, bias + shifted * wide), 1),
        (_feed_forward(weights, merged, bias + 2 * merged), taps),
    )
    return tuple(run for run in runs if run[1]), view.patches // merge, 0


def vision_width(vision: Fields) -> int:
    return vision.size("embed_dim", "hidden_size")


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
