"""The spec of the vision-language model that a recipe's model section names."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trimaran.core import ModelSection, UserError
from trimaran.models.from_hf_vlm import vlm_from_disk
from trimaran.models.hub.hub_names import repo_name
from trimaran.models.internvl_tokens import with_image_tokens
from trimaran.models.json_file import read_json
from trimaran.models.section_spec import DEFAULT_PRESET, MAX_CONFIG_BYTES, model_folder, preset_named, reshaped
from trimaran.models.shape_fields import changed, refuse_unknown, wrong_value
from trimaran.models.validate_vlm import first_invalid_vlm_field
from trimaran.models.vlm_presets import VLM_PRESETS
from trimaran.models.vlm_spec import VlmSpec, interleaved_sections


def foreign_vlm(config: Mapping[str, Any], folder: Path) -> VlmSpec | None:
    """Return the shape of a Hugging Face vision-language model; None if our image pipeline does not support it.

    It can still be planned; training it raises the reason.
    """
    try:
        config = with_image_tokens(config, folder)
        return replace(vlm_from_disk(config, where=str(folder / "config.json")), name=repo_name(folder))
    except UserError:
        return None


def vlm_of(section: ModelSection) -> VlmSpec:
    """Return the shape of a vision-language model. The fields of its language model are a decoder's."""
    if section.path is None:
        spec = preset_named(section.preset or DEFAULT_PRESET, VLM_PRESETS)
    else:
        folder = model_folder(section.path)
        file = folder / "config.json"
        config = with_image_tokens(read_json(file, limit_bytes=MAX_CONFIG_BYTES), folder)
        spec = vlm_from_disk(config, where=str(file))
        spec = replace(spec, name=repo_name(folder))
    if spec.vision.variant == "anyres":
        raise UserError("M076", "our network does not arrange tiles as LLaVA-OneVision does", where="model.family",
                        fix="use model.family hf, which trains it on data-parallel plans")  # fmt: skip
    shape = dict(section.shape)
    if (language := shape.pop("language", None)) is not None:
        if not isinstance(language, Mapping):
            raise wrong_value(f"{language!r} is not a mapping of fields", "model.shape.language")
        before, spec = spec.language.head_dim, replace(spec, language=reshaped(spec.language, language))
        if spec.sections and spec.language.head_dim != before:
            sections, pairs = _sections(spec.language.head_dim // 2), spec.language.head_dim // 2
            is_interleaved = len(spec.sections) > len(sections)
            spec = replace(spec, sections=interleaved_sections(sections, pairs) if is_interleaved else sections)
    refuse_unknown(shape, [field.name for field in fields(VlmSpec) if field.name != "name"], "model.shape")
    spec = changed(VlmSpec, spec, shape, "model.shape")
    if problem := first_invalid_vlm_field(spec):
        raise wrong_value(f"{problem[0]}: {problem[1]}", f"model.shape.{problem[0]}")
    return spec


def _sections(pairs: int) -> tuple[int, int, int]:
    """Return Qwen2-VL's M-RoPE sections of `pairs`: a quarter for time, the rest for row and column."""
    row = 3 * pairs // 8
    return pairs - 2 * row, row, row
