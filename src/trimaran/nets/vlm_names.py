"""The names of our vision-language model's parameters on disk, in each format that we read and write."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trimaran.models.to_hf_vlm import Form
from trimaran.models.vlm_spec import CHANNELS, VlmSpec


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """The tensor on disk that holds a parameter: part number `part` of `parts`, split along the rows.

    `shape` is the shape on disk, if the parameter's is different. `sizes` are the rows of the parts, if unequal.
    """

    name: str
    part: int = 0
    parts: int = 1
    shape: tuple[int, ...] | None = None
    sizes: tuple[int, ...] = ()

    def rows(self, count: int) -> slice:
        """Return the rows of this part, which has `count` of them."""
        start = sum(self.sizes[: self.part]) if self.sizes else self.part * count
        return slice(start, start + count)


def on_disk(name: str, spec: VlmSpec, form: Form) -> DiskTensor:
    """Return the tensor on disk that holds the parameter `name` in that format."""
    return FORMS[form](name, spec)


def in_memory(name: str, spec: VlmSpec, form: Form) -> DiskTensor:
    """Return the parameter of transformers' model, once it is loaded, that holds the parameter `name`."""
    stored = on_disk(name, spec, form)
    return replace(stored, name=to_memory(stored.name, form))


def to_memory(name: str, form: Form) -> str:
    """Return the name that a tensor, given its name on disk, has in transformers' model."""
    for pattern, better in MEMORY_NAMES.get(form, {}).items():
        renamed, found = re.subn(pattern, better, name)
        if found:
            return renamed
    return name


def canonical(name: str, form: Form) -> str:
    """Return the name that `on_disk` gives a tensor; transformers releases have had several names for the same one."""
    for pattern, better in OTHER_NAMES.get(form, {}).items():
        name = re.sub(pattern, better, name)
    return name


def may_be_ignored(name: str, form: Form) -> bool:
    """Return whether a tensor may be on disk without being read: a tied head, or one that LLaVA does not use."""
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


MEMORY_NAMES: Mapping[str, Mapping[str, str]] = {  # the first pattern that matches counts
    "qwen2_vl": {r"^visual\.": "model.visual.", r"^model\.": "model.language_model."},
    "qwen2_5_vl": {r"^visual\.": "model.visual.", r"^model\.": "model.language_model."},
    "llava": {
        r"^(vision_tower|multi_modal_projector)\.": r"model.\1.",
        r"^language_model\.lm_head\.": "lm_head.",
        r"^language_model\.model\.": "model.language_model.",
    },
}


def _own(name: str, spec: VlmSpec) -> DiskTensor:
    return DiskTensor(name)


def _qwen(name: str, spec: VlmSpec) -> DiskTensor:
    tower, _, rest = name.partition(".")
    if tower == "language":
        return DiskTensor(rest if rest.startswith("lm_head") else f"model.{rest}")
    if tower == "projector":
        return DiskTensor("visual.merger." + _renamed(rest, {"norm": "ln_q", "linear_1": "mlp.0", "linear_2": "mlp.2"}))
    if rest == "stem.patch_embed.weight":
        vision = spec.vision
        shape = (vision.hidden, CHANNELS, vision.frames, vision.patch, vision.patch)
        return DiskTensor("visual.patch_embed.proj.weight", shape=shape)
    layer_name = f"visual.blocks.{rest.removeprefix('layers.')}"
    if found := re.search(r"\.self_attn\.([qkv])_proj\.", layer_name):
        return DiskTensor(layer_name.replace(found[0], ".attn.qkv."), part="qkv".index(found[1]), parts=3)
    names = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "self_attn.o_proj": "attn.proj"}
    if not spec.vision.block.gated:
        names |= {"mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
    return DiskTensor(_renamed(layer_name, names))


def _llava(name: str, spec: VlmSpec) -> DiskTensor:
    tower, _, rest = name.partition(".")
    if tower == "language":
        return DiskTensor(f"language_model.{rest}" if rest.startswith("lm_head") else f"language_model.model.{rest}")
    if tower == "projector":
        return DiskTensor(f"multi_modal_projector.{rest}")
    vision = spec.vision
    match rest:
        case "stem.patch_embed.weight":
            shape = (vision.hidden, CHANNELS, vision.patch, vision.patch)
            return DiskTensor("vision_tower.embeddings.patch_embedding.weight", shape=shape)
        case "stem.class_token":
            return DiskTensor("vision_tower.embeddings.class_embedding", shape=(vision.hidden,))
        case "stem.positions":
            return DiskTensor("vision_tower.embeddings.position_embedding.weight")
    names = {
        "stem.norm": "pre_layrnorm",
        "layers.": "encoder.layers.",
        "input_layernorm": "layer_norm1",
        "post_attention_layernorm": "layer_norm2",
        "self_attn.o_proj": "self_attn.out_proj",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
    }
    return DiskTensor(f"vision_tower.{_renamed(rest, names)}")


def _renamed(name: str, parts: Mapping[str, str]) -> str:
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


FORMS: Mapping[Form, Callable[[str, VlmSpec], DiskTensor]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "llava": _llava,
    "trimaran_vlm": _own,
}
