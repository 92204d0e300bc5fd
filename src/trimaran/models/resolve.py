"""Resolves the recipe's model section to an outline, and its images to the rules of the model."""

from dataclasses import replace
from functools import lru_cache
from importlib import import_module

from trimaran.core import DataSection, ImageRules, ModelSection, Recipe, UserError, did_you_mean, show_count
from trimaran.core.input_rules import ScenePoints
from trimaran.core.plugins import UNCHECKED
from trimaran.models.adapter_rules import with_adapter
from trimaran.models.any_spec import decoder_of, spec_outline, vision_of
from trimaran.models.config_fields import read_json
from trimaran.models.hub_names import repo_name
from trimaran.models.outline import Outline, OutlineLayer, outline_of
from trimaran.models.section_spec import MAX_CONFIG_BYTES, model_folder, spec_of
from trimaran.models.vlm_spec import ImageLimits


def outline_for(section: ModelSection, data: DataSection | None = None, points: ScenePoints | None = None) -> Outline:
    """Return the outline of the model in `section`, with the images per sample of `data`, or the points of a scene."""
    images = ImageLimits() if data is None else ImageLimits(count=data.images_per_sample or 1, size=data.image_size)
    spec = spec_of(section)
    if section.kind.is_plugin:
        return _family_outline_of(section.model_dump_json(), (data or DataSection()).seq_len)
    decoder = decoder_of(spec)
    if section.kind.is_hf and decoder is not None:
        outline = outline_of(decoder)
        main = outline.main  # transformers' code caches keys and values of all heads
        runs = tuple(
            (replace(block, latent=replace(block.latent, narrow_cache=False)), count)
            if isinstance(block, OutlineLayer) and block.latent
            else (block, count)
            for block, count in main.runs
        )
        outline = replace(outline, towers=(replace(main, runs=runs),))
    elif section.kind.is_hf:
        assert section.path is not None, "a section of family hf without a path is refused"
        from trimaran.models.outline_hf import outline_from_hf  # noqa: PLC0415

        file = model_folder(section.path) / "config.json"
        config = read_json(file, limit_bytes=MAX_CONFIG_BYTES)
        outline = outline_from_hf(config, where=str(file), name=repo_name(file.parent), images=images)
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
            raise UserError("M013.images-sample-tokens", where="data.seq_len", tokens=tokens, seq_len=data.seq_len)
    names, towers = section.freeze, [tower.name for tower in outline.towers]
    for name in names:
        if name not in towers:
            raise UserError(
                "M012.no-tower-towers",
                where="model.freeze",
                name=name,
                guess=did_you_mean(name, towers),
                towers=", ".join(towers),
            )
    if set(names) == set(towers):
        raise UserError("M012.every-tower-frozen", where="model.freeze", towers=", ".join(towers))
    outline = replace(outline, towers=tuple(replace(tower, frozen=tower.name in names) for tower in outline.towers))
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


def refuse_freezing(section: ModelSection) -> None:
    """Raise if towers of a Hugging Face model should be frozen that training cannot locate."""
    if section.freeze and section.kind.is_hf and vision_of(spec_of(section)) is None:
        raise UserError("M014.training-not-freeze", where="model.freeze", freeze=", ".join(section.freeze))


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
            raise UserError("M090.not-read-two", where="data.samples.temporal_patches", spec=spec.name)
        # Of a second of video; 0: one for each pair of frames; None: times are in the text (Qwen3-VL).
        positions = spec.vision.ends.positions_per_second or (QWEN_25_RATE if spec.vision.window else 0)
        time_positions = None if len(spec.sections) > 3 else positions
        rules = replace(rules, frames=spec.vision.frames, time_positions=time_positions)
    most = samples.max_pixels or rules.max_pixels
    return replace(rules, min_pixels=min(samples.min_pixels or rules.min_pixels, most), max_pixels=most)
