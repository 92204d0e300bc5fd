"""A vision transformer of any family that Hugging Face knows, as a tower: read from the vision part of its config."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from trimaran.models.config_fields import Fields, bad_field, unknown_network
from trimaran.models.hf_language import HEADS, LAYERS, Switch
from trimaran.models.outline import OutlineLayer, Tower
from trimaran.models.validate_spec import MOST_LAYERS

HIDDEN = ("embed_dim", "hidden_size")  # Qwen2-VL has both, and means the language's width by the second
DEPTH = (*LAYERS, "depth")
NEEDED = {"width": HIDDEN, "layers": DEPTH, "heads": HEADS, "patch": ("patch_size",)}
DYNAMIC_SIZE = 448  # pixels a side where a model takes any and nobody says: our choice, one tile of InternVL


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """The images of one sample: how many, and how many pixels a side; None is the size that the model is made for."""

    count: int = 1
    size: int | None = None


class View(NamedTuple):
    """What of a sample's images the tower sees: so many pieces, of so many patches and other tokens each."""

    pieces: int
    patches: int
    tokens: int = 0

    @property
    def segment(self) -> int:
        return self.patches + self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """What a family of vision transformers does alike in every size; see `Habit` for the switches.

    `scaled` layers have a learnt factor for each feature of their two branches. `tokens` are learnt and stand beside
    the patches, `spare` ones are learnt and only swapped in. `outer_norms` stand before or behind the layers.
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


_QWEN = Sight(stem_bias=False, table=False, tokens=0, outer_norms=0)

SIGHTS: dict[str, Sight] = {
    "vit": Sight(qkv_bias="qkv_bias"),
    "yolos": Sight(qkv_bias="qkv_bias"),
    "dinov2": Sight(qkv_bias="qkv_bias", scaled=True, spare=1),
    "siglip_vision_model": Sight(tokens=0),
    "clip_vision_model": Sight(stem_bias=False, outer_norms=2),
    "internvl_vision": Sight(qkv_bias="attention_bias", scaled=True, outer_norms=0),
    "intern_vit_6b": Sight(qkv_bias="qkv_bias", scaled=True, outer_norms=0),
    "pixtral": Sight(gated=True, shifted=False, qkv_bias=False, bias=False, stem_bias=False, table=False, tokens=0),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": replace(_QWEN, gated=True, shifted=False),
    "qwen3_vl": replace(_QWEN, stem_bias=True),
    "qwen3_vl_moe": replace(_QWEN, stem_bias=True),
}

# What the classes assume: a config.json leaves it out where it is a part of a larger one.
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


def sighted(fields: Fields, kind: str | None = None) -> tuple[Fields, Sight]:
    """Return the fields with what their family assumes, and its profile; an unknown family is taken for a plain ViT."""
    kind = kind or fields.word("model_type", default="vit")
    fields = fields.assuming(USUAL.get(kind, {}))
    if missing := fields.missing(NEEDED):
        raise unknown_network(f"its vision lacks {', '.join(missing)}", fields.where)
    sight = SIGHTS.get(kind, Sight())
    if kind in ("internvl_vision", "intern_vit_6b"):
        sight = replace(
            sight,
            shifted=fields.word("norm_type", default="layer_norm") == "layer_norm",
            wide_norms=fields.boolean("use_qk_norm", "qk_normalization", default=False),
            outer_norms=0 if fields.boolean("use_mean_pooling", default=True) else 1,
            table=fields.boolean("use_absolute_position_embeddings", default=True),
            spare=int(fields.boolean("use_mask_token", default=False)),
        )
    return fields, replace(sight, tokens=sight.tokens + fields.size("num_detection_tokens", default=0, least=0))


def patches_of(fields: Fields, size: int | None, *, multiple: int = 1) -> int:
    """Return how many patches an image has, `size` pixels a side or as large as the fields say.

    `multiple` is how many patches a side are merged: sizes are rounded to it, as the processors do.
    """
    patch = fields.sides("patch_size")[0] * multiple
    sides = fields.sides("image_size") if size is None else (size, size)
    if min(sides) < patch:
        raise bad_field("patch_size", f"{min(sides)} pixels cannot be cut into patches of {patch}", fields.where)
    tall, wide = (round(side / patch) if multiple > 1 else side // patch for side in sides)
    return tall * wide * multiple * multiple


def vision_tower(fields: Fields, sight: Sight, view: View) -> Tower:
    """Return the tower that sees `view` of each sample."""
    hidden, heads = fields.size(*HIDDEN), fields.size(*HEADS)
    if hidden % heads:
        raise bad_field("num_attention_heads", f"{heads} heads do not divide hidden_size {hidden}", fields.where)
    layer = _layer(fields, sight, hidden, heads)
    layers = fields.size(*DEPTH, most=MOST_LAYERS)
    return Tower(
        name="vision",
        runs=_runs(layer, fields, layers),
        hidden=hidden,
        extras=_around(fields, sight, hidden, layers),
        positions=view.pieces * view.segment,
        segment=view.segment,
    )


def _layer(fields: Fields, sight: Sight, hidden: int, heads: int) -> OutlineLayer:
    gated, ffn = sight.gated, _ffn(fields, hidden)
    if fields.boolean("use_swiglu_ffn", default=False):  # Dinov2's giant: two thirds as wide, and whole eights
        gated, ffn = True, (ffn * 2 // 3 + 7) // 8 * 8
    matrices = 3 if gated else 2
    extras = hidden * (2 * (1 + sight.shifted) + 2 * sight.scaled + 2 * sight.wide_norms)
    extras += 3 * hidden * _on(sight.qkv_bias, fields) + (hidden + ffn * (matrices - 1) + hidden) * _on(
        sight.bias, fields
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
    """Return the layers; in Qwen2.5-VL all but a few attend in windows of so many pixels."""
    if not fields.has("fullatt_block_indexes", "window_size"):
        return ((layer, layers),)
    side = fields.size("window_size") // fields.sides("patch_size")[0]
    windowed, runs, before = replace(layer, window=side * side), [], 0
    for full in sorted(set(fields.numbers("fullatt_block_indexes"))):
        if before <= full < layers:
            runs += [(windowed, full - before), (layer, 1)]
            before = full + 1
    return tuple(run for run in [*runs, (windowed, layers - before)] if run[1])


def _around(fields: Fields, sight: Sight, hidden: int, layers: int) -> int:
    """Return the parameters in no layer: patches in, tokens, positions, norms, and whatever head there is."""
    patch = fields.sides("patch_size")[0]
    pixels = fields.size("num_channels", "in_channels", "in_chans", default=3) * patch * patch
    pixels *= fields.size("temporal_patch_size", default=1)
    total = hidden * (pixels + sight.stem_bias + sight.tokens + sight.spare)
    total += hidden * sight.outer_norms * (1 + sight.shifted)
    if fields.has("num_position_embeddings"):
        total += hidden * fields.size("num_position_embeddings")
    elif sight.table:
        rows = patches_of(fields, None) + sight.tokens
        middle = fields.boolean("use_mid_position_embeddings", default=fields.has("num_detection_tokens"))
        total += hidden * rows * (layers if middle else 1)
    if fields.boolean("vision_use_head", default=False):  # SigLIP's pooling: a query, attention, a norm, a feed-forward
        ffn = _ffn(fields, hidden)
        total += hidden * (1 + 4 * hidden + 4 + 2 + 2 * ffn + 1) + ffn
    return total


def head_parameters(fields: Fields, hidden: int) -> int:
    """Return the parameters of what a vision model by itself ends in: classes, boxes, a pooler, or nothing."""
    built = fields.config.get("architectures")
    name = str(built[0]) if isinstance(built, list) and built else ""
    told = fields.config.get("id2label")
    labels = len(told) if isinstance(told, dict) else fields.size("num_labels", default=2)
    if name.endswith("ForImageClassification"):
        return labels * ((2 if name.startswith("Dinov2") else 1) * hidden + 1)
    if name.endswith(
        "ForObjectDetection"
    ):  # two feed-forwards of three products: classes and no object, and four sides
        return 4 * hidden * (hidden + 1) + (labels + 1 + 4) * (hidden + 1)
    return hidden * (hidden + 1) if name in ("ViTModel", "YolosModel") else 0
