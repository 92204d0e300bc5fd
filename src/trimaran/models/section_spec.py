"""The spec of the network that a recipe's model section names. What few sections need is imported for them."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from trimaran.core import ModelSection, UserError, did_you_mean, expand_user, templated
from trimaran.models.any_spec import Spec
from trimaran.models.config_fields import changed, read_json, refuse_unknown, wrong_value
from trimaran.models.hub_names import near_folder, repo_name
from trimaran.models.model_presets import PRESETS, VLM_PRESETS
from trimaran.models.spec import Block, ModelSpec, PredictionSpec
from trimaran.models.validate_spec import first_invalid_field
from trimaran.models.vlm_spec import VlmSpec, interleaved_sections

MAX_CONFIG_BYTES = 10_000_000
DEFAULT_PRESET = "tiny"


def spec_of(section: ModelSection) -> Spec | None:
    """Return the shape of the model; None if no spec of ours describes it: a plug-in's, and some of Hugging Face."""
    if section.preset is not None and section.path is not None:
        raise UserError("M002.model-either-preset", where="model")
    if section.kind.is_hf and section.path is None:
        raise UserError("M002.hf-family", where="model.path")
    if section.kind.is_hf and section.shape:
        raise UserError("M002.hf-model-keeps", where="model.shape")
    match section.family:
        case "decoder":
            if section.path is None:
                decoder = reshaped(preset_named(section.preset or DEFAULT_PRESET, PRESETS), section.shape)
            else:
                folder = model_folder(section.path)
                config = read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES)
                decoder = _decoder_in(folder, config, section.shape)
            if (wanted := section.multi_token_prediction) is None:
                return decoder
            from trimaran.models.from_hf import has_prediction_layers  # noqa: PLC0415

            if not has_prediction_layers(decoder):
                raise _no_prediction(
                    templated("{family} has no layers that predict later tokens", family=decoder.family or decoder.name)
                )
            if section.adapter is not None:
                raise _no_prediction("an adapter trains no new layers")
            prediction = PredictionSpec(layers=wanted.layers, weight=wanted.weight)
            return replace(decoder, block=replace(decoder.block, prediction=prediction))
        case "vlm":
            spec = vlm_of(section)
        case "perception":
            from trimaran.models.perception_spec import perception_spec  # noqa: PLC0415

            spec = perception_spec(section)
        case "hf":
            from trimaran.models.from_hf import lacks_expert_field, unsupported  # noqa: PLC0415
            from trimaran.models.internvl import with_image_tokens  # noqa: PLC0415
            from trimaran.models.vlm_config import FOREIGN, vlm_from_disk  # noqa: PLC0415

            assert section.path is not None, "a section of family hf without a path is refused"
            spec, folder = None, model_folder(section.path)
            config = read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES)
            if config.get("model_type") in FOREIGN:
                # What our image pipeline does not support can still be planned; training it raises the reason.
                with suppress(UserError):
                    config = with_image_tokens(config, folder)
                    spec = replace(vlm_from_disk(config, where=str(folder / "config.json")), name=repo_name(folder))
            elif not (unsupported(config) or lacks_expert_field(config)):
                spec = _decoder_in(folder, config, section.shape)
        case _:
            spec = None
    if section.multi_token_prediction is not None:
        raise _no_prediction(
            templated("the family {family} has no layers that predict later tokens", family=section.family)
        )
    return spec


def _decoder_in(folder: Path, config: Mapping[str, Any], shape: Mapping[str, Any]) -> ModelSpec:
    """Return the decoder of a Hugging Face folder with this config.json."""
    from trimaran.models.from_hf import spec_from_hf  # noqa: PLC0415

    spec = spec_from_hf(config, where=str(folder / "config.json"))
    return reshaped(replace(spec, name=repo_name(folder)), shape)


def vlm_of(section: ModelSection) -> VlmSpec:
    """Return the shape of a vision-language model. The fields of its language model are a decoder's."""
    from trimaran.models.internvl import with_image_tokens  # noqa: PLC0415
    from trimaran.models.vlm_config import vlm_from_disk  # noqa: PLC0415

    if section.path is None:
        spec = preset_named(section.preset or DEFAULT_PRESET, VLM_PRESETS)
    else:
        folder = model_folder(section.path)
        file = folder / "config.json"
        config = with_image_tokens(read_json(file, limit_bytes=MAX_CONFIG_BYTES), folder)
        spec = replace(vlm_from_disk(config, where=str(file)), name=repo_name(folder))
    if spec.vision.variant == "anyres":
        raise UserError("M076.our-network", where="model.family")
    shape = dict(section.shape)
    if (language := shape.pop("language", None)) is not None:
        if not isinstance(language, Mapping):
            raise wrong_value(f"{language!r} is not a mapping of fields", "model.shape.language")
        before, spec = spec.language.head_dim, replace(spec, language=reshaped(spec.language, language))
        if spec.sections and spec.language.head_dim != before:
            pairs = spec.language.head_dim // 2
            row = 3 * pairs // 8
            sections = (pairs - 2 * row, row, row)  # Qwen2-VL's: a quarter for time, the rest for row and column
            is_interleaved = len(spec.sections) > len(sections)
            spec = replace(spec, sections=interleaved_sections(sections, pairs) if is_interleaved else sections)
    refuse_unknown(shape, [field.name for field in fields(VlmSpec) if field.name != "name"], "model.shape")
    spec = changed(VlmSpec, spec, shape, "model.shape")
    if problem := first_invalid_field(spec):
        raise wrong_value(f"{problem[0]}: {problem[1]}", f"model.shape.{problem[0]}")
    return spec


def _no_prediction(reason: str) -> UserError:
    return UserError("M085.multi-token-prediction", where="model.multi_token_prediction", reason=reason)


def model_folder(path: str) -> Path:
    """Return the folder of the Hugging Face model that `path`, a folder or its config.json, names."""
    named = expand_user(path)
    folder = named.parent if named.name == "config.json" else named
    if not folder.is_dir():
        near = near_folder(path)
        raise UserError(
            "M004.no-such-folder", where=f"model.path {path}", value=f" (did you mean {near!r}?)" if near else ""
        )
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise UserError("M004.folder-holds-adapter", where=f"model.path {path}")
    if not (folder / "config.json").is_file():
        raise UserError("M004.folder-holds", where=f"model.path {path}")
    return folder


def preset_named(name: str, presets: Mapping[str, Any]) -> Any:
    """Return a preset of a family. Raises UserError if it has none of this name."""
    if name in presets:
        return presets[name]
    other = next((family for family, table in (("decoder", PRESETS), ("vlm", VLM_PRESETS)) if name in table), None)
    if other:
        raise UserError("M001.preset-belongs-family", where="model.preset", name=name, other=other)
    raise UserError(
        "M001.no-preset", where="model.preset", name=name, guess=did_you_mean(name, presets), presets=", ".join(presets)
    )


def reshaped(spec: ModelSpec, shape: Mapping[str, Any]) -> ModelSpec:
    """Return `spec` with the fields in `shape`; fields of its block are named without `block`."""
    inner = {field.name for field in fields(Block) if field.name != "prediction"}  # model.multi_token_prediction
    known = [field.name for field in fields(ModelSpec) if field.name not in ("name", "block", "family")] + sorted(inner)
    refuse_unknown(shape, known, "model.shape")
    block = changed(Block, spec.block, {key: shape[key] for key in shape if key in inner}, "model.shape")
    outside = {key: shape[key] for key in shape if key not in inner}
    spec = replace(changed(ModelSpec, spec, outside, "model.shape"), block=block)
    if ("hidden" in shape or "heads" in shape) and "head_dim" not in shape:
        if spec.heads < 1 or spec.hidden % spec.heads:
            raise UserError("M009.heads-not-divide", where="model.shape.heads", heads=spec.heads, hidden=spec.hidden)
        spec = replace(spec, head_dim=spec.hidden // spec.heads)
    if problem := first_invalid_field(spec):
        raise wrong_value(f"{problem[0]}: {problem[1]}", f"model.shape.{problem[0]}")
    return spec
