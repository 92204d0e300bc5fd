"""How a recipe's images are preprocessed for its model."""

from dataclasses import replace

from trimaran.core import ImageRules, Recipe
from trimaran.models.resolve import spec_of
from trimaran.models.vlm_spec import VlmSpec


def recipe_image_rules(recipe: Recipe) -> ImageRules | None:
    """Return the model's image rules, within the recipe's pixel limits; None for a model without vision."""
    spec, samples = spec_of(recipe.model), recipe.data.samples
    if not isinstance(spec, VlmSpec):
        return None
    rules = spec.images()
    most = samples.max_pixels or rules.max_pixels
    return replace(rules, min_pixels=min(samples.min_pixels or rules.min_pixels, most), max_pixels=most)
