"""How a recipe's images are preprocessed for its model."""

from dataclasses import replace

from trimaran.core import ImageRules, Recipe, UserError
from trimaran.models.section_spec import spec_of
from trimaran.models.vlm_spec import VlmSpec

TEMPORAL_PATCH = 2  # frames
QWEN_25_RATE = 4  # time positions of a second, if a folder of Qwen2.5-VL does not say: the default in transformers


def recipe_image_rules(recipe: Recipe) -> ImageRules | None:
    """Return the model's image rules, within the recipe's pixel limits; None for a model without vision."""
    spec, samples = spec_of(recipe.model), recipe.data.samples
    if spec is None or spec.vision is None:
        return None
    rules = spec.images()
    if samples.temporal_patches:
        rules = replace(rules, frames=_frames_together(spec), time_positions=_time_positions(spec))
    most = samples.max_pixels or rules.max_pixels
    return replace(rules, min_pixels=min(samples.min_pixels or rules.min_pixels, most), max_pixels=most)


def _frames_together(spec: VlmSpec) -> int:
    """Return how many frames share a patch. Raises for a model whose patches or positions have no time."""
    if spec.vision.frames != TEMPORAL_PATCH or not spec.sections:
        raise UserError("M090", f"{spec.name} does not read two frames of a video as one image",
                        where="data.samples.temporal_patches",
                        fix="set it to false, or train a Qwen2-VL, Qwen2.5-VL or Qwen3-VL")  # fmt: skip
    return spec.vision.frames


def _time_positions(spec: VlmSpec) -> int | None:
    """Return the time positions of a second of video; 0: one for each pair of frames; None: times are in the text."""
    if len(spec.sections) > 3:  # Qwen3-VL
        return None
    return spec.vision.ends.positions_per_second or (QWEN_25_RATE if spec.vision.window else 0)
