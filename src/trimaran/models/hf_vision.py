"""The outline of any Hugging Face vision transformer, from the vision part of a config.json."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from trimaran.models.config_fields import Fields, bad_field, unknown_network
from trimaran.models.hf_language import HEADS, LAYERS, Switch
from trimaran.models.outline import OutlineLayer, Tower
from trimaran.models.validate_spec import MOST_LAYERS

HIDDEN = ("embed_dim", "hidden_size")  # Qwen2-VL has both, and means the language's width by the second
DEPTH = (*LAYERS, "depth")
NEEDED = {"width": HIDDEN, "layers": DEPTH, "heads": HEADS, "patch": ("patch_size",)}
DYNAMIC_SIZE = 448  # pixels per side if the model takes any size and none is given: one tile of InternVL


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


_QWEN = VisionTraits(stem_bias=False, table=False, tokens=0, outer_norms=0)

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
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": replace(_QWEN, gated=True, shifted=False),
    "qwen3_vl": replace(_QWEN, stem_bias=True),
    "qwen3_vl_moe": replace(_QWEN, stem_bias=True),
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
    if hidden % heads:
        raise bad_field("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", fields.where)
    layer = _layer(fields, traits, hidden, heads)
    layers = fields.size(*DEPTH, most=MOST_LAYERS)
    return Tower(
        name="vision",
        runs=_runs(layer, fields, layers),
        hidden=hidden,
        extras=_around(fields, traits, hidden, layers),
        positions=view.pieces * view.segment,
        segment=view.segment,
    )


def _layer(fields: Fields, traits: VisionTraits, hidden: int, heads: int) -> OutlineLayer:
    gated, ffn = traits.gated, _ffn(fields, hidden)
    if fields.boolean("use_swiglu_ffn", default=False):  # Dinov2 giant: two thirds as wide, rounded to a multiple of 8
        gated, ffn = True, (ffn * 2 // 3 + 7) // 8 * 8
    matrices = 3 if gated else 2
    extras = hidden * (2 * (1 + traits.shifted) + 2 * traits.scaled + 2 * traits.wide_norms)
    extras += 3 * hidden * _on(traits.qkv_bias, fields) + (hidden + ffn * (matrices - 1) + hidden) * _on(
        traits.bias, fields
    )
    return OutlineLayer(
        hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads, ffn=ffn, gated=gated, causal=False,
        extras=extras,
    )  # fmt: skip


def _ffn(fields: Fields, hidden: int) -> int:
    if fields.has("mlp_ratio"):
        return int(hidden * fields.number("mlp_ratio"))
    return fields.size("intermediate_size")


def _on(switch: Switch, fields: Fields) -> bool:
    return fields.boolean(switch, default=False) if isinstance(switch, str) else switch


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


def _around(fields: Fields, traits: VisionTraits, hidden: int, layers: int) -> int:
    """Return the parameters outside the layers: patch embedding, tokens, positions, norms, head."""
    patch = fields.sides("patch_size")[0]
    pixels = fields.size("num_channels", "in_channels", "in_chans", default=3) * patch * patch
    pixels *= fields.size("temporal_patch_size", default=1)
    total = hidden * (pixels + traits.stem_bias + traits.tokens + traits.spare)
    total += hidden * traits.outer_norms * (1 + traits.shifted)
    if fields.has("num_position_embeddings"):
        total += hidden * fields.size("num_position_embeddings")
    elif traits.table:
        rows = patches_of(fields, None) + traits.tokens
        middle = fields.boolean("use_mid_position_embeddings", default=fields.has("num_detection_tokens"))
        total += hidden * rows * (layers if middle else 1)
    if fields.boolean(
        "vision_use_head", default=False
    ):  # SigLIP's pooling head: a query, attention, a norm, a feed-forward
        ffn = _ffn(fields, hidden)
        total += hidden * (1 + 4 * hidden + 4 + 2 + 2 * ffn + 1) + ffn
    return total


def head_parameters(fields: Fields, hidden: int) -> int:
    """Return the parameters of a stand-alone vision model's head: classes, boxes, a pooler, or nothing."""
    built = fields.config.get("architectures")
    name = str(built[0]) if isinstance(built, list) and built else ""
    names = fields.config.get("id2label")
    labels = len(names) if isinstance(names, dict) else fields.size("num_labels", default=2)
    if name.endswith("ForImageClassification"):
        return labels * ((2 if name.startswith("Dinov2") else 1) * hidden + 1)
    # Two feed-forwards of three matmuls: classes with "no object", and four box sides.
    if name.endswith("ForObjectDetection"):
        return 4 * hidden * (hidden + 1) + (labels + 1 + 4) * (hidden + 1)
    return hidden * (hidden + 1) if name in ("ViTModel", "YolosModel") else 0
