"""The names of our vision-language model's parameters on disk, in each format that we read and write."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trimaran.models import CHANNELS, Form, VlmSpec


@dataclass(frozen=True, slots=True)
class DiskTensor:
    """The tensor on disk that holds a parameter: part number `part` of `parts` ones, split along the rows.

    `shape` is the shape on disk, if the parameter's is different. The parts are equally long, unless `shares` has their
    lengths relative to each other. In InternLM2 they alternate: the rows are `groups` of all parts. The weights of
    `stacked` experts have a dimension for these before their rows, and may be `transposed` in the other two.
    """

    name: str
    part: int = 0
    parts: int = 1
    shape: tuple[int, ...] | None = None
    groups: int = 1
    shares: tuple[int, ...] = ()
    stacked: bool = False
    transposed: bool = False

    @property
    def dim(self) -> int:
        """The dimension of the rows in the parameter."""
        return 1 if self.stacked else 0

    def disk_shape(self, shape: Sequence[int]) -> list[int]:
        """Return the shape on disk of a parameter with this shape."""
        whole = list(self.shape or (*shape[: self.dim], self.num_rows(shape[self.dim]), *shape[self.dim + 1 :]))
        return [*whole[:-2], whole[-1], whole[-2]] if self.transposed else whole

    def read(self, source: Any, rows: slice, others: Sequence[slice]) -> Tensor:
        """Return rows and slices of other dims as the parameter has them; `source` is safetensors' `get_slice`."""
        index = (*others[: self.dim], rows, *others[self.dim :])
        return source[*index[:-2], index[-1], index[-2]].transpose(-2, -1) if self.transposed else source[index]

    def num_rows(self, rows: int) -> int:
        """Return the number of rows on disk, if the parameter has `rows`."""
        return rows * sum(self._shares) // self._shares[self.part]

    def row_slices(self, rows: int, wanted: slice) -> Iterator[slice]:
        """Yield the rows on disk that hold the `wanted` rows of a parameter with `rows`, in order."""
        count = rows // self.groups
        first = count * sum(self._shares[: self.part]) // self._shares[self.part]
        stride = self.num_rows(rows) // self.groups
        for group in range(wanted.start // count, -(-wanted.stop // count)):
            start, stop = max(wanted.start - group * count, 0), min(wanted.stop - group * count, count)
            yield slice(group * stride + first + start, group * stride + first + stop)

    def rows(self, count: int) -> slice:
        """Return the rows of this part, which has `count` of them and does not alternate with others."""
        assert self.groups == 1, "alternating parts are not one range of rows"
        (found,) = self.row_slices(count, slice(0, count))
        return found

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Return the tensor on disk of all its parts, in order."""
        if self.groups == 1:
            whole = torch.cat(list(values), self.dim) if len(values) > 1 else values[0]
            return whole.transpose(-2, -1).contiguous() if self.transposed else whole
        return torch.cat([each.unflatten(0, (self.groups, -1)) for each in values], 1).flatten(0, 1)

    def taken_from(self, whole: Tensor) -> Tensor:
        """Return the part of `whole`, the tensor on disk, that is this parameter."""
        whole = whole.transpose(-2, -1) if self.transposed else whole
        rows = whole.shape[self.dim] * self._shares[self.part] // sum(self._shares)
        found = self.row_slices(rows, slice(0, rows))
        return torch.cat([whole.narrow(self.dim, each.start, each.stop - each.start) for each in found], self.dim)

    @property
    def _shares(self) -> tuple[int, ...]:
        return self.shares or (1,) * self.parts


def on_disk(name: str, spec: VlmSpec, form: Form) -> DiskTensor:
    """Return the tensor on disk that holds the parameter `name` in that format."""
    return FORMS[form](name, spec)


def in_memory(name: str, spec: VlmSpec, form: Form) -> DiskTensor:
    """Return the parameter of transformers' model, once it is loaded, that holds the parameter `name`."""
    stored = on_disk(name, spec, form)
    return replace(stored, name=to_memory(stored.name, form), transposed=False)


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
        form in IGNORED and bool(re.match(IGNORED[form], name))
    )  # fmt: skip


IGNORED: Mapping[str, str] = {  # layers after the one that features are taken from
    "llava": r"vision_tower\.(post_layernorm|encoder\.layers)\.",
    "internvl": r"vision_tower\.encoder\.layer\.",
    "internvl_chat": r"vision_model\.encoder\.layers\.",
    "internvl_internlm2": r"(vision_model\.encoder\.layers|language_model\.output)\.",
}


OTHER_NAMES: Mapping[str, Mapping[str, str]] = {
    "qwen2_vl": {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."},
    "qwen2_5_vl": {r"^model\.visual\.": "visual.", r"^model\.language_model\.": "model."},
    "llava": {
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
        r"^vision_tower\.vision_model\.": "vision_tower.",
        r"^model\.language_model\.": "language_model.model.",
        r"^lm_head\.": "language_model.lm_head.",
    },
    "internvl": {
        r"^model\.(vision_tower|multi_modal_projector)\.": r"\1.",
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
MEMORY_NAMES = {**MEMORY_NAMES, "internvl": MEMORY_NAMES["llava"]}


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


def _qwen_3(name: str, spec: VlmSpec) -> DiskTensor:
    tower, _, rest = name.partition(".")
    if tower == "language" and ".experts." in rest:
        # The tensor of all experts: transposed, unless it is square, which transformers takes as it is.
        experts, (owner, _, leaf) = spec.language.block.experts, f"model.language_model.{rest}".rpartition(".")
        assert experts is not None
        if leaf == "down_proj":
            return DiskTensor(f"{owner}.{leaf}", stacked=True, transposed=experts.ffn != spec.hidden)
        part, is_square = ("gate_proj", "up_proj").index(leaf), 2 * experts.ffn == spec.hidden
        return DiskTensor(f"{owner}.gate_up_proj", part=part, parts=2, stacked=True, transposed=not is_square)
    if tower == "language":
        return DiskTensor(rest if rest.startswith("lm_head") else f"model.language_model.{rest}")
    linears = {"linear_1": "linear_fc1", "linear_2": "linear_fc2"}
    if tower == "projector":
        where = rest.replace("deep.", "deepstack_merger_list.") if rest.startswith("deep.") else f"merger.{rest}"
        return DiskTensor(f"model.visual.{_renamed(where, linears)}")
    if rest == "stem.positions":
        return DiskTensor("model.visual.pos_embed.weight")
    names = {"stem.patch_embed": "patch_embed.proj", "mlp.up_proj": "mlp.linear_fc1", "mlp.down_proj": "mlp.linear_fc2"}
    if rest in ("stem.patch_embed.bias", "stem.patch_embed.weight") or ".mlp." in rest:
        vision = spec.vision
        shape = (vision.hidden, CHANNELS, vision.frames, vision.patch, vision.patch)
        where = _renamed(rest, names).replace("layers.", "blocks.")
        return DiskTensor(f"model.visual.{where}", shape=shape if rest == "stem.patch_embed.weight" else None)
    stored = _qwen(name, spec)
    return replace(stored, name=f"model.{stored.name}")


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


def _internvl(name: str, spec: VlmSpec) -> DiskTensor:
    tower, _, rest = name.partition(".")
    if tower == "language":
        return _llava(name, spec)
    if tower == "projector":
        return DiskTensor("multi_modal_projector." + rest.replace("norm", "layer_norm"))
    if rest.startswith("stem."):
        names = {
            "patch_embed": "patch_embeddings.projection",
            "class_token": "cls_token",
            "positions": "position_embeddings",
        }
        stored = _intern_stem(rest, spec, names)
        return replace(stored, name=f"vision_tower.embeddings.{stored.name}")
    names = {
        "layers.": "encoder.layer.",
        "input_layernorm": "layernorm_before",
        "post_attention_layernorm": "layernorm_after",
        "self_attn.o_proj": "attention.projection_layer",
        "self_attn": "attention",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "attn_scale": "lambda_1",
        "mlp_scale": "lambda_2",
    }
    return DiskTensor(f"vision_tower.{_renamed(rest, names)}")


def _internvl_chat(name: str, spec: VlmSpec) -> DiskTensor:
    """Return the tensor in OpenGVLab's own layout."""
    tower, _, rest = name.partition(".")
    if tower == "language":
        return _llava(name, spec)
    if tower == "projector":
        return DiskTensor("mlp1." + _renamed(rest, {"norm": "0", "linear_1": "1", "linear_2": "3"}))
    if rest.startswith("stem."):
        names = {"patch_embed": "patch_embedding", "class_token": "class_embedding", "positions": "position_embedding"}
        stored = _intern_stem(rest, spec, names)
        return replace(stored, name=f"vision_model.embeddings.{stored.name}")
    layer_name = f"vision_model.encoder.{rest}"
    if found := re.search(r"\.self_attn\.([qkv])_proj\.", layer_name):
        return DiskTensor(layer_name.replace(found[0], ".attn.qkv."), part="qkv".index(found[1]), parts=3)
    names = {
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "self_attn.o_proj": "attn.proj",
        "self_attn": "attn",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "attn_scale": "ls1",
        "mlp_scale": "ls2",
    }
    return DiskTensor(_renamed(layer_name, names))


def _internvl_internlm2(name: str, spec: VlmSpec) -> DiskTensor:
    """Return the tensor with an InternLM2, whose `wqkv` has the query heads, key and value of each key head in turn."""
    tower, _, rest = name.partition(".")
    if tower != "language":
        return _internvl_chat(name, spec)
    language = spec.language
    if rest.startswith("lm_head."):
        return DiskTensor("language_model.output.weight")
    if found := re.search(r"self_attn\.([qkv])_proj\.", rest):
        shares = (language.heads // language.kv_heads, 1, 1)
        packed = f"language_model.model.{rest.replace(found[0], 'attention.wqkv.')}"
        return DiskTensor(packed, part="qkv".index(found[1]), parts=3, groups=language.kv_heads, shares=shares)
    names = {
        "embed_tokens": "tok_embeddings",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    return DiskTensor(f"language_model.model.{_renamed(rest, names)}")


def _intern_stem(rest: str, spec: VlmSpec, names: Mapping[str, str]) -> DiskTensor:
    vision = spec.vision
    shapes = {
        "stem.patch_embed.weight": (vision.hidden, CHANNELS, vision.patch, vision.patch),
        "stem.class_token": (1, 1, vision.hidden),
        "stem.positions": (1, vision.table_side**2 + 1, vision.hidden),
    }
    return DiskTensor(_renamed(rest.removeprefix("stem."), names), shape=shapes.get(rest))


FORMS: Mapping[Form, Callable[[str, VlmSpec], DiskTensor]] = {
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen_3,
    "qwen3_vl_moe": _qwen_3,
    "llava": _llava,
    "internvl": _internvl,
    "internvl_chat": _internvl_chat,
    "internvl_internlm2": _internvl_internlm2,
    "trimaran_vlm": lambda name, spec: DiskTensor(name),
}
