"""Resolves the recipe's model section, or a name, to an outline; and its images to the rules of the model."""

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from trimaran.core import DataSection, ImageRules, ModelSection, Recipe, UserError, did_you_mean, show_count
from trimaran.core.input_rules import ScenePoints
from trimaran.core.plugins import UNCHECKED
from trimaran.core.regular_files import expand_user
from trimaran.models.adapter_rules import with_adapter
from trimaran.models.any_spec import decoder_of, spec_outline, vision_of
from trimaran.models.config_fields import read_json
from trimaran.models.hub_names import repo_name
from trimaran.models.model_presets import PRESETS, VLM_PRESETS
from trimaran.models.outline import Outline, OutlineLayer, outline_of
from trimaran.models.section_spec import MAX_CONFIG_BYTES, model_folder, preset_of, spec_of
from trimaran.models.spec import ModelSpec
from trimaran.models.vlm_spec import ImageLimits, VlmSpec, vlm_outline


def outline_for(section: ModelSection, data: DataSection | None = None, points: ScenePoints | None = None) -> Outline:
    """Return the outline of the model in `section`, with the images per sample of `data`, or the points of a scene."""
    images = ImageLimits() if data is None else ImageLimits(count=data.images_per_sample or 1, size=data.image_size)
    spec = spec_of(section)
    if section.kind.is_plugin:
        return _family_outline_of(section.model_dump_json(), (data or DataSection()).seq_len)
    decoder = decoder_of(spec)
    if section.kind.is_hf:
        outline = _hf_outline(section, decoder, images)
    else:
        assert spec is not None, "our own networks always have a spec"
        outline = spec_outline(spec, images, points)
        if section.path is not None and decoder is not None:
            outline = replace(
                outline, code=f"Trimaran's decoder ({decoder.family}); model.family=hf uses transformers'"
            )
    if data is not None:
        tokens = sum(tower.positions for tower in outline.towers if tower.name == "projector")
        if tokens > data.seq_len and "seq_len" in data.model_fields_set:
            raise UserError("M013", f"the images of a sample are {tokens} tokens, and its sequence has {data.seq_len}",
                            where="data.seq_len",
                            fix="raise data.seq_len, or lower data.images_per_sample or data.image_size")  # fmt: skip
    outline = _frozen(outline, section.freeze)
    return with_adapter(outline, section.adapter) if section.adapter else outline


@lru_cache(maxsize=4)
def _family_outline_of(text: str, seq_len: int) -> Outline:
    """Return the outline of a plug-in's family, traced once without computing anything. It imports torch."""
    from_module = import_module("trimaran.models.from_module")
    return from_module.outline_of_family(ModelSection.model_validate_json(text, context=UNCHECKED), seq_len)


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
    return outline_of(preset_of(text))


def refuse_freezing(section: ModelSection) -> None:
    """Raise if towers of a Hugging Face model should be frozen that training cannot locate."""
    if section.freeze and section.kind.is_hf and vision_of(spec_of(section)) is None:
        raise UserError("M014", f"training does not freeze {', '.join(section.freeze)} of a Hugging Face model",
                        where="model.freeze", fix="use family vlm if it supports the model, remove model.freeze, or "
                        "use `trimaran plan`")  # fmt: skip


def _hf_outline(section: ModelSection, decoder: ModelSpec | None, images: ImageLimits) -> Outline:
    """Return the outline of a Hugging Face model: by its spec if it is a decoder like ours, else by its config.json."""
    if decoder is not None:
        return _with_wide_cache(outline_of(decoder))
    assert section.path is not None, "a section of family hf without a path is refused"
    return _outline_in(model_folder(section.path) / "config.json", images)


def _outline_in(file: Path, images: ImageLimits) -> Outline:
    from trimaran.models.outline_hf import outline_from_hf  # noqa: PLC0415

    config = read_json(file, limit_bytes=MAX_CONFIG_BYTES)
    name = repo_name(file.parent) if file.name == "config.json" else file.stem
    return outline_from_hf(config, where=str(file), name=name, images=images)


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


def model_text(section: ModelSection, data: DataSection) -> str:
    """Return the name of the model, with its size if that is known here."""
    names = filter(None, [section.family, section.preset or section.path])
    try:
        outline = outline_if_known(section, data)
    except UserError:
        outline = None  # its folder is on another machine
    size = f", {show_count(outline.num_parameters)} parameters" if outline else ""
    return f"{' '.join(names)}{size}"


TEMPORAL_PATCH = 2  # frames
QWEN_25_RATE = 4  # time positions of a second, if a folder of Qwen2.5-VL does not say: the default in transformers


def recipe_image_rules(recipe: Recipe) -> ImageRules | None:
    """Return the model's image rules, within the recipe's pixel limits; None for a model without vision."""
    spec, samples = spec_of(recipe.model), recipe.data.samples
    if spec is None or spec.vision is None:
        return None
    rules = spec.images()
    if samples.temporal_patches:
        if spec.vision.frames != TEMPORAL_PATCH or not spec.sections:
            raise UserError("M090", f"{spec.name} does not read two frames of a video as one image",
                            where="data.samples.temporal_patches",
                            fix="set it to false, or train a Qwen2-VL, Qwen2.5-VL or Qwen3-VL")  # fmt: skip
        rules = replace(rules, frames=spec.vision.frames, time_positions=_time_positions(spec))
    most = samples.max_pixels or rules.max_pixels
    return replace(rules, min_pixels=min(samples.min_pixels or rules.min_pixels, most), max_pixels=most)


def _time_positions(spec: VlmSpec) -> int | None:
    """Return the time positions of a second of video; 0: one for each pair of frames; None: times are in the text."""
    if len(spec.sections) > 3:  # Qwen3-VL
        return None
    return spec.vision.ends.positions_per_second or (QWEN_25_RATE if spec.vision.window else 0)
