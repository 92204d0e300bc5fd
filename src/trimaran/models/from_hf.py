"""Converts a Hugging Face config.json to a ModelSpec, and back."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trimaran.core import UserError
from trimaran.models.config_fields import Fields, bad_field, show
from trimaran.models.families.disk_parts import PartsOf, packed_rows, plain_parts
from trimaran.models.families.family_fields import HF_NAMES
from trimaran.models.families.registry import FAMILIES
from trimaran.models.spec import ModelSpec, Rope, variations
from trimaran.models.validate_spec import first_invalid_field


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Return the first feature of `config` that our decoder lacks; None if it supports all of them."""
    if (kind := config.get("model_type")) not in list(FAMILIES):
        return f"model_type is {show(kind)}, which is not among its architectures"
    family = FAMILIES[kind]
    for key, values in family.off.items():
        if config.get(key) not in values:
            return f"{key} is {show(config[key])}"
    return family.lacks(config) or None


def lacks_expert_field(config: Mapping[str, Any]) -> bool:
    """Return whether `config` leaves a size of its experts to the defaults of transformers, or has another name for it.

    transformers builds such a model, so that the family `hf` trains it; our decoder does not guess.
    """
    if not str(config.get("model_type")).endswith("_moe"):
        return False
    needed = [("num_experts", "num_local_experts"), ("num_experts_per_tok",), ("moe_intermediate_size",)]
    if config["model_type"] == "qwen2_moe":
        needed.append(("shared_expert_intermediate_size",))
    return any(all(config.get(name) is None for name in names) for names in needed)


def spec_from_hf(config: Mapping[str, Any], *, where: str) -> ModelSpec:
    """Return the shape that `config` describes. `where` names the configuration in errors."""
    if reason := unsupported(config):
        raise UserError("M006.decoder-not-support", where=where, reason=reason)
    spec = FAMILIES[config["model_type"]].read(Fields(config, where))
    if problem := first_invalid_field(spec):
        raise bad_field(HF_NAMES.get(problem[0], problem[0]), problem[1], where)
    return spec


def spec_to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return a config.json for transformers (4.57+): of the spec's family, or of the first one that can express it."""
    if (config := _first_config(spec)) is not None:
        return config
    block, experts = spec.block, spec.block.experts
    features = {
        "qkv_bias": block.qkv_bias,
        "qk_norm": block.qk_norm,
        "experts": experts is not None,
        "a shared expert": experts is not None and experts.shared_ffn > 0,
        "its gate": experts is not None and experts.shared_gate,
        "heads that do not divide hidden": spec.hidden % spec.heads != 0,
    }
    names = ", ".join([*(name for name, present in features.items() if present), *variations(spec)])
    raise UserError("M010.hugging-face", where="model.shape", names=names)


def disk_layout(spec: ModelSpec) -> PartsOf:
    """Return where the parameters of a model of this shape are on disk: as its own family has them."""
    kind = spec.family or (_first_config(spec) or {}).get("model_type")
    return FAMILIES[kind].parts if kind in FAMILIES else plain_parts


def has_prediction_layers(spec: ModelSpec) -> bool:
    """Return whether folders of the spec's architecture may have layers that predict later tokens."""
    return spec.family in FAMILIES and FAMILIES[spec.family].extra_layers


def is_extra_layer(name: str, spec: ModelSpec) -> bool:
    """Return whether a tensor on disk belongs to a layer after the last one that this architecture may have."""
    if not has_prediction_layers(spec):
        return False
    found = re.match(r"model\.layers\.(\d+)\.", name)
    return found is not None and int(found[1]) >= spec.layers


def packed_part(name: str, spec: ModelSpec) -> tuple[str, int, int, tuple[int, ...]] | None:
    """Return the packed or renamed tensor on disk that holds a parameter; None if it is one of its own name.

    With the tensor's name come the number of the parameter's part, that of all parts, and the rows of each.
    """
    if spec.family not in FAMILIES or ".experts." in name:
        return None
    module = name.split(".")[-2] if "." in name else ""
    group = next((each for each in packed_rows(spec).values() if module in each), {})
    part = FAMILIES[spec.family].parts(name, (group.get(module, 1), 1), spec)[0]
    if part.name == f"model.{name}":
        return None
    return (part.name, list(group).index(module), len(group), tuple(group.values())) if part.region else (
        part.name, 0, 1, ())  # fmt: skip


def _first_config(spec: ModelSpec) -> dict[str, Any] | None:
    """Return the config.json in the first architecture that describes exactly this network; None without one."""
    # Unused settings do not count: of a scaling without one, of layers that do not exist, and of layers that predict
    # later tokens, which are an option of training that config.json does not switch on.
    attention, rope = spec.block.attention.shortest(spec.layers), spec.block.rope
    if rope.factor == 1 and not rope.longrope:
        rope = Rope(theta=rope.theta, rotary_dim=rope.rotary_dim, interleaved=rope.interleaved)
    wanted = replace(spec, block=replace(spec.block, attention=attention, rope=rope, prediction=None))
    for kind in dict.fromkeys([spec.family, *FAMILIES] if spec.family else FAMILIES):
        if kind == "llama" and spec.hidden % spec.heads:  # only LlamaConfig requires this
            continue
        family = FAMILIES[kind]
        if spec.prediction_layers and not family.extra_layers:
            continue
        config = family.config(kind, spec)
        if unsupported(config):
            continue
        try:
            found = family.read(Fields(config, "config.json"))
        except UserError:
            continue
        if replace(found, name=spec.name) == wanted:
            return config
    return None
