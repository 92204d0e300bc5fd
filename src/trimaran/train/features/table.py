"""The optional parts of training, and the plans that use them. Each is imported only by a rank of such a plan."""

from collections.abc import Callable, Collection
from importlib import import_module
from typing import NamedTuple

from trimaran.core import Plan, Recipe
from trimaran.train.steppers.feature import Feature

LOCAL_STEPS = "local steps"


class FeatureEntry(NamedTuple):
    """A row of the table: a feature, the module that has its `FEATURE`, and who wants it."""

    name: str
    module: str
    wants: Callable[[Plan, Recipe], bool]


# In the order in which they wrap the loading of data, and follow an update.
FEATURES = (
    FeatureEntry("cached features", "vision_features", lambda _, recipe: recipe.data.samples.cache_features),
    FeatureEntry(
        "measured rows", "measure_rows", lambda plan, _: plan.micro_batches == "measured" and plan.mesh.dp > 1
    ),
    FeatureEntry("asynchronous SGD", "async_trainer", lambda plan, _: not plan.engine_traits.is_synchronous),
    FeatureEntry(LOCAL_STEPS, "outer_update", lambda plan, _: plan.comm.local.is_on),
    FeatureEntry("compression", "compressed_gradients", lambda plan, _: plan.comm.compression_settings.kind != "none"),
)


def features_of(plan: Plan, recipe: Recipe, *, without: Collection[str] = ()) -> tuple[Feature, ...]:
    """Return the features that a plan and a recipe ask for, except those with the names in `without`."""
    wanted = [each for each in FEATURES if each.name not in without and each.wants(plan, recipe)]
    return tuple(import_module(f"trimaran.train.features.{each.module}").FEATURE for each in wanted)
