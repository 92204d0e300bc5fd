"""What the parameters of our model that sees are called on disk, in each form that we write and read."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimaran.models.to_hf_vlm import Form
from trimaran.models.vlm_spec import CHANNELS, VlmSpec


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Where a parameter lies: in the tensor `name`, of which it is one of several equal parts, row by row.

    `shape` is the whole tensor's where it has other dimensions than the parameter.
    """

    name: str
    part: int = 0
    parts: int = 1
    shape: tuple[int, ...] | None = None


def on_disk(name: str, spec: VlmSpec, form: Form) -> OnDisk:
    """Return where the parameter `name` lies in that form."""
    return FORMS[form](name, spec)


def canonical(name: str, form: Form) -> str:
    """Return the name that `on_disk` would give to a tensor: releases of transformers have had several for the same."""
    for pattern, better in OTHER_NAMES.get(form, {}).items():
        name = re.sub(pattern, better, name)
    return name


def expendable(name: str, form: Form) -> bool:
    """Return whether a tensor may lie there without being read: a tied head, and what LLaVA does not look at."""
    return "rotary" in name or name.endswith(("lm_head.weight", "position_ids")) or (
        form == "llava" and bool(re.match(r"vision_tower\.(post_layernorm|encoder\.layers)\.", name))
    )  # fmt: skip


OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen2_vl": {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."},
    "qwen2_5_vl": {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."},
    "llava": {
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^vision_tower\.vision_model\.": "vision_tower.",
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
    },
}


def _own(name: str, spec: VlmSpec) -> OnDisk:
    return OnDisk(name)


def _qwen(name: str, spec: VlmSpec) -> OnDisk:
    tower, _, rest = name.partition(".")
    if tower == "language":
        return OnDisk(rest if rest.startswith("lm_head") else f"model.{rest}")
    if tower == "projector":
        return OnDisk("visual.merger." + _renamed(rest, {"norm": "ln_q", "linear_1": "mlp.0", "linear_2": "mlp.2"}))
    if rest == "stem.patch_embed.weight":
        vision = spec.vision
        shape = (vision.hidden, CHANNELS, vision.frames, vision.patch, vision.patch)
        return OnDisk("visual.patch_embed.proj.weight", shape=shape)
    place = f"visual.blocks.{rest.removeprefix('layers.')}"
    if found := re.search(r"\.self_attn\.([qkv])_proj\.", place):
        return OnDisk(place.replace(found[0], ".attn.qkv."), part="qkv".index(found[1]), parts=3)
    names = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.o_proj": "attn.proj"}
    if not spec.vision.block.gated:
        names |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    return OnDisk(_renamed(place, names))


def _llava(name: str, spec: VlmSpec) -> OnDisk:
    tower, _, rest = name.partition(".")
    if tower == "language":
        return OnDisk(f"language_model.{rest}" if rest.startswith("lm_head") else f"language_model.model.{rest}")
    if tower == "projector":
        return OnDisk(f"multi_modal_projector.{rest}")
    vision = spec.vision
    match rest:
        case "stem.patch_embed.weight":
            shape = (vision.hidden, CHANNELS, vision.patch, vision.patch)
            return OnDisk("vision_tower.embeddings.patch_embedding.weight", shape=shape)
        case "stem.class_token":
            return OnDisk("vision_tower.embeddings.class_embedding", shape=(vision.hidden,))
        case "stem.positions":
            return OnDisk("vision_tower.embeddings.position_embedding.weight")
    names = {
        "stem.norm": "pre_layrnorm",
        "layers.": "encoder.layers.",
        "input_layernorm": "layer_norm1",
        "post_attention_layernorm": "layer_norm2",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
    return OnDisk(f"vision_tower.{_renamed(rest, names)}")


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


FORMS: Mapping[Form, Callable[[str, VlmSpec], OnDisk]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "llava": _llava,
    "trimaran_vlm": _own,
}
