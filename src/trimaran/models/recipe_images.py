"""How a recipe's images are preprocessed for its model."""

from dataclasses import replace

from trimaran.core import ImageRules, Recipe, UserError
from trimaran.models.resolve import spec_of
from trimaran.models.vlm_spec import VlmSpec

TEMPORAL_PATCH = 2  # frames


def recipe_image_rules(recipe: Recipe) -> ImageRules | None:
    """Return the model's image rules, within the recipe's pixel limits; None for a model without vision."""
    spec, samples = spec_of(recipe.model), recipe.data.samples
    if not isinstance(spec, VlmSpec):
        return None
    rules = spec.images()
    if samples.temporal_patches:
        rules = replace(rules, frames=_frames_together(spec))
    most = samples.max_pixels or rules.max_pixels
    return replace(rules, min_pixels=min(samples.min_pixels or rules.min_pixels, most), max_pixels=most)


def _frames_together(spec: VlmSpec) -> int:
    """Return how many frames share a patch. Raises for a model whose videos are not images after their times."""
    if spec.vision.frames != TEMPORAL_PATCH or len(spec.sections) <= 3:
        raise UserError("M090", f"{spec.name} does not read two frames of a video as one image after its time",
                        where="data.samples.temporal_patches", fix="set it to false, or train a Qwen3-VL")  # fmt: skip
    return spec.vision.frames
