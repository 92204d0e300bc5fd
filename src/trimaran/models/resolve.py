"""Resolves the recipe's model section to a spec and an outline."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from trimaran.core import DataSection, ModelSection, UserError, did_you_mean
from trimaran.core.plugin_fields import UNCHECKED
from trimaran.core.scene_rules import ScenePoints
from trimaran.core.user_folders import expand_user
from trimaran.hub import near_folder, repo_name
from trimaran.models.adapted_outline import with_adapter
from trimaran.models.any_spec import Spec
from trimaran.models.from_hf import has_prediction_layers, lacks_expert_field, spec_from_hf, unsupported
from trimaran.models.from_hf_vlm import FOREIGN, interleaved_sections, vlm_from_disk
from trimaran.models.hf_vision import ImageLimits
from trimaran.models.internvl_tokens import with_image_tokens
from trimaran.models.json_file import read_json
from trimaran.models.layer_variations import PredictionSpec
from trimaran.models.model_presets import PRESETS
from trimaran.models.outline import Outline, OutlineLayer, outline_of
from trimaran.models.outline_hf import outline_from_hf
from trimaran.models.perception_spec import PerceptionSpec, perception_outline, perception_spec
from trimaran.models.plugin_family import is_plugin_family
from trimaran.models.shape_fields import changed, refuse_unknown, wrong_value
from trimaran.models.spec import Block, ModelSpec
from trimaran.models.validate_spec import first_invalid_field
from trimaran.models.validate_vlm import first_invalid_vlm_field
from trimaran.models.vlm_outline import vlm_outline
from trimaran.models.vlm_presets import VLM_PRESETS
from trimaran.models.vlm_spec import VlmSpec

MAX_CONFIG_BYTES = 10_000_000
DEFAULT_PRESET = "tiny"


def spec_of(section: ModelSection) -> Spec | None:
    """Return the shape of the model in `section`; None for a Hugging Face model that no spec of ours describes.

    None, too, for a plug-in's family: only its code knows the network.
    """
    _refuse_contradictions(section)
    spec = None if is_plugin_family(section.family) else _spec_of(section)
    return spec if section.multi_token_prediction is None else _predicting(spec, section)


def _spec_of(section: ModelSection) -> Spec | None:
    if section.family == "vlm":
        return _vlm(section)
    if section.family == "perception":
        return perception_spec(section)
    if section.path is None:
        return _reshaped(_preset(section.preset or DEFAULT_PRESET), section.shape)
    folder = model_folder(section.path)
    config = read_json(folder / "config.json", limit_bytes=MAX_CONFIG_BYTES)
    if section.family == "hf" and config.get("model_type") in FOREIGN:
        return _foreign_vlm(config, folder)
    if section.family == "hf" and (unsupported(config) or lacks_expert_field(config)):
        return None
    spec = spec_from_hf(config, where=str(folder / "config.json"))
    return _reshaped(replace(spec, name=repo_name(folder)), section.shape)


def _predicting(spec: Spec | None, section: ModelSection) -> ModelSpec:
    """Return the decoder with layers that predict later tokens, if its architecture has them."""
    wanted = section.multi_token_prediction
    assert wanted is not None
    reason = ""
    if section.family != "decoder" or not isinstance(spec, ModelSpec):
        reason = f"the family {section.family} has no layers that predict later tokens"
    elif not has_prediction_layers(spec):
        reason = f"{spec.family or spec.name} has no layers that predict later tokens"
    elif section.adapter is not None:
        reason = "an adapter trains no new layers"
    if reason or not isinstance(spec, ModelSpec):
        raise UserError("M085", f"multi-token prediction is not possible: {reason}",
                        where="model.multi_token_prediction",
                        fix="remove it, or train a folder of DeepSeek-V3, Kimi-K2 or GLM-4.5 in full with "
                        "model.family decoder")  # fmt: skip
    prediction = PredictionSpec(layers=wanted.layers, weight=wanted.weight)
    return replace(spec, block=replace(spec.block, prediction=prediction))


def _foreign_vlm(config: Mapping[str, Any], folder: Path) -> VlmSpec | None:
    """Return the shape of a Hugging Face vision-language model; None if our image pipeline does not support it.

    It can still be planned; training it raises the reason.
    """
    try:
        config = with_image_tokens(config, folder)
        return replace(vlm_from_disk(config, where=str(folder / "config.json")), name=repo_name(folder))
    except UserError:
        return None


def outline_for(section: ModelSection, data: DataSection | None = None, points: ScenePoints | None = None) -> Outline:
    """Return the outline of the model in `section`, with the images per sample of `data`, or the points of a scene."""
    images = _images(data)
    spec = spec_of(section)
    if is_plugin_family(section.family):
        return _family_outline(section, (data or DataSection()).seq_len)
    if isinstance(spec, VlmSpec) and section.family == "vlm":
        outline = vlm_outline(spec, images)
    elif isinstance(spec, PerceptionSpec):
        outline = perception_outline(spec, points)
    elif isinstance(spec, ModelSpec):
        outline = _with_wide_cache(outline_of(spec)) if section.family == "hf" else outline_of(spec)
        if section.path is not None and section.family == "decoder":
            outline = replace(outline, code=f"Trimaran's decoder ({spec.family}); model.family=hf uses transformers'")
    else:
        assert section.path is not None, "only a folder can hold a network that is not our decoder"
        outline = _outline_in(model_folder(section.path) / "config.json", images)
    if data is not None:
        _refuse_crowding(outline, data)
    outline = _frozen(outline, section.freeze)
    return with_adapter(outline, section.adapter) if section.adapter else outline


@lru_cache(maxsize=4)
def _family_outline_of(text: str, seq_len: int) -> Outline:
    """Return the outline of a plug-in's family, traced once without computing anything. It imports torch."""
    from_module = import_module("trimaran.models.from_module")
    return from_module.outline_of_family(ModelSection.model_validate_json(text, context=UNCHECKED), seq_len)


def _family_outline(section: ModelSection, seq_len: int) -> Outline:
    return _family_outline_of(section.model_dump_json(), seq_len)


def outline_if_known(
    section: ModelSection, data: DataSection | None = None, points: ScenePoints | None = None
) -> Outline | None:
    """Return the outline; None if config.json lacks the sizes. Such a model can be trained but not predicted."""
    try:
        return outline_for(section, data, points)
    except UserError as error:
        if error.code != "M011":
            raise
        return None


def outline_named(text: str) -> Outline:
    """Return the outline of `text`: a preset, a Hugging Face folder, or a config.json."""
    path = expand_user(text)
    if text in PRESETS:
        return outline_of(PRESETS[text])
    if text in VLM_PRESETS:
        return vlm_outline(VLM_PRESETS[text], ImageLimits())
    if path.suffix == ".json" and path.is_file():
        return _outline_in(path, ImageLimits())
    if path.exists() or len(path.parts) > 1 or path.suffix == ".json":
        return _outline_in(model_folder(text) / "config.json", ImageLimits())
    return outline_of(_preset(text))


def refuse_freezing(section: ModelSection) -> None:
    """Raise if towers of a Hugging Face model should be frozen that training cannot locate."""
    if section.freeze and section.family == "hf" and not isinstance(spec_of(section), VlmSpec):
        raise UserError("M014", f"training does not freeze {', '.join(section.freeze)} of a Hugging Face model",
                        where="model.freeze", fix="use family vlm if it supports the model, remove model.freeze, or "
                        "use `trimaran plan`")  # fmt: skip


def _outline_in(file: Path, images: ImageLimits) -> Outline:
    config = read_json(file, limit_bytes=MAX_CONFIG_BYTES)
    name = repo_name(file.parent) if file.name == "config.json" else file.stem
    return outline_from_hf(config, where=str(file), name=name, images=images)


def _images(data: DataSection | None) -> ImageLimits:
    return ImageLimits() if data is None else ImageLimits(count=data.images_per_sample or 1, size=data.image_size)


def _refuse_crowding(outline: Outline, data: DataSection) -> None:
    """Raise if the images of a sample alone are longer than the sequence length that the user set."""
    tokens = sum(tower.positions for tower in outline.towers if tower.name == "projector")
    if tokens > data.seq_len and "seq_len" in data.model_fields_set:
        raise UserError("M013", f"the images of a sample are {tokens} tokens, and its sequence has {data.seq_len}",
                        where="data.seq_len",
                        fix="raise data.seq_len, or lower data.images_per_sample or data.image_size")  # fmt: skip


def _with_wide_cache(outline: Outline) -> Outline:
    """Return the outline of a decoder whose code is that of transformers: it caches keys and values of all heads."""

    def wide(layer: OutlineLayer) -> OutlineLayer:
        return replace(layer, latent=replace(layer.latent, narrow_cache=False)) if layer.latent else layer

    runs = tuple(
        (wide(block) if isinstance(block, OutlineLayer) else block, count) for block, count in outline.main.runs
    )
    return replace(outline, towers=(replace(outline.main, runs=runs),))


def _frozen(outline: Outline, names: tuple[str, ...]) -> Outline:
    towers = [tower.name for tower in outline.towers]
    for name in names:
        if name not in towers:
            raise UserError("M012", f"there is no tower '{name}'{did_you_mean(name, towers)}", where="model.freeze",
                            fix=f"its towers are {', '.join(towers)}")  # fmt: skip
    if set(names) == set(towers):
        raise UserError("M012", "every tower is frozen, and nothing is left to train", where="model.freeze",
                        fix=f"leave out one of {', '.join(towers)}")  # fmt: skip
    return replace(outline, towers=tuple(replace(tower, frozen=tower.name in names) for tower in outline.towers))


def model_folder(path: str) -> Path:
    """Return the folder of the Hugging Face model that `path`, a folder or its config.json, names."""
    named = expand_user(path)
    folder = named.parent if named.name == "config.json" else named
    if not folder.is_dir():
        near = near_folder(path)
        raise UserError("M004", f"there is no such folder{f' (did you mean {near!r}?)' if near else ''}",
                        where=f"model.path {path}",
                        fix="name a local Hugging Face model folder, or a name on the Hub: OWNER/MODEL")  # fmt: skip
    if not (folder / "config.json").is_file() and (folder / "adapter_config.json").is_file():
        raise UserError("M004", "the folder holds an adapter without its base", where=f"model.path {path}",
                        fix="set model.path to the base and model.adapter.path to this folder, or name whole weights: "
                        "`trimaran export RUN --merge` writes some")  # fmt: skip
    if not (folder / "config.json").is_file():
        raise UserError("M004", "the folder holds no config.json", where=f"model.path {path}",
                        fix="name a folder with a Hugging Face model: config.json and its weights")  # fmt: skip
    return folder


def _refuse_contradictions(section: ModelSection) -> None:
    if section.preset is not None and section.path is not None:
        raise UserError("M002", "a model has either a preset or a path", where="model",
                        fix="remove model.preset to take the shape from the path")  # fmt: skip
    if section.family == "hf" and section.path is None:
        raise UserError("M002", "the hf family needs a model to load", where="model.path",
                        fix="set model.path to a local Hugging Face model folder, or use family decoder")  # fmt: skip
    if section.family == "hf" and section.shape:
        raise UserError("M002", "an hf model keeps the shape of its config.json", where="model.shape",
                        fix="remove model.shape, edit config.json, or use model.family=decoder")  # fmt: skip


def _preset(name: str) -> ModelSpec:
    return _named(name, PRESETS)


def _named(name: str, presets: Mapping[str, Any]) -> Any:
    other = next((family for family, table in (("decoder", PRESETS), ("vlm", VLM_PRESETS)) if name in table), None)
    if name not in presets and other:
        raise UserError("M001", f"the preset '{name}' belongs to the family {other}", where="model.preset",
                        fix=f"set model.family to {other}, or use another preset")  # fmt: skip
    if name not in presets:
        raise UserError("M001", f"there is no preset '{name}'{did_you_mean(name, presets)}", where="model.preset",
                        fix=f"the presets are {', '.join(presets)}")  # fmt: skip
    return presets[name]


def _vlm(section: ModelSection) -> VlmSpec:
    """Return the shape of a vision-language model. The fields of its language model are a decoder's."""
    if section.path is None:
        spec = _named(section.preset or DEFAULT_PRESET, VLM_PRESETS)
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
        before, spec = spec.language.head_dim, replace(spec, language=_reshaped(spec.language, language))
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


def _reshaped(spec: ModelSpec, shape: Mapping[str, Any]) -> ModelSpec:
    """Return `spec` with the fields in `shape`; fields of its block are named without `block`."""
    inner = {field.name for field in fields(Block) if field.name != "prediction"}  # model.multi_token_prediction
    known = [field.name for field in fields(ModelSpec) if field.name not in ("name", "block", "family")] + sorted(inner)
    refuse_unknown(shape, known, "model.shape")
    inside = {key: shape[key] for key in shape if key in inner}
    out_of_bounds = {key: shape[key] for key in shape if key not in inner}
    block = changed(Block, spec.block, inside, "model.shape")
    spec = replace(changed(ModelSpec, spec, out_of_bounds, "model.shape"), block=block)
    if ("hidden" in shape or "heads" in shape) and "head_dim" not in shape:
        if spec.heads < 1 or spec.hidden % spec.heads:
            raise UserError("M009", f"{spec.heads} heads do not divide hidden {spec.hidden}", where="model.shape.heads",
                            fix="choose heads that divide hidden, or set model.shape.head_dim")  # fmt: skip
        spec = replace(spec, head_dim=spec.hidden // spec.heads)
    if problem := first_invalid_field(spec):
        raise wrong_value(f"{problem[0]}: {problem[1]}", f"model.shape.{problem[0]}")
    return spec
