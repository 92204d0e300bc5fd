"""What the rows of a recipe's data hold, and the points of its scenes, for the prediction of a model."""

from trimaran.app.recipe.recipe_tokenizer import with_model_tokenizer
from trimaran.core import Recipe, RowSizes, UserError
from trimaran.core.input_rules import ScenePoints
from trimaran.models import Spec, is_hub_name, recipe_image_rules, vision_of


def row_sizes_of(recipe: Recipe, spec: Spec | None) -> RowSizes | None:
    """Return what a row holds on average, from the first samples of the data.

    None where images are described by the recipe, for data that is not on this machine or cannot be read (training
    reports why), and for a model without vision.
    """
    data = recipe.data
    if vision_of(spec) is None or {"images_per_sample", "image_size"} & data.model_fields_set:
        return None
    from trimaran.data.data_kind import SAMPLE_SOURCES

    sources = data.mixture or (data,)
    if not all(each.source in SAMPLE_SOURCES for each in sources):
        return None
    if any(each.path is not None and is_hub_name(each.path) for each in sources):
        return None
    from trimaran.data.samples.row_estimate import estimate_rows

    try:
        return estimate_rows(with_model_tokenizer(recipe).data, recipe_image_rules(recipe))
    except (UserError, OSError):
        return None


def scene_points_of(recipe: Recipe, spec: Spec | None) -> ScenePoints | None:
    """Return the points of a recorded scene on average, found in a few scenes.

    None for simulated scenes, and for scenes that cannot be read here (training reports why).
    """
    data, rules = recipe.data, None if spec is None else spec.scenes()
    if rules is None or data.source != "scenes" or data.path is None:
        return None
    from trimaran.data.quarantine import BadSampleError
    from trimaran.data.scenes.open_scenes import measure_points
    from trimaran.data.scenes.scene_feed import recorded_scenes

    try:
        return measure_points(recorded_scenes(data, rules))
    except (UserError, BadSampleError, OSError):
        return None
