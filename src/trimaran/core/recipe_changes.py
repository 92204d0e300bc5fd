"""Which fields of a recipe may change when a run is resumed."""

from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.core.recipe import Recipe

CHANGEABLE_FIELDS = (
    "train.steps",
    "train.save",
    "train.evaluate",
    "train.sample",
    "data.workers",
    "data.epochs",
    "data.samples.balance",
    "data.samples.max_bad",
    "data.samples.cache_features",
    "data.timeout_seconds",
    "cluster",
    "plan",
    "checkpoint",
    "faults",
    "nodes",
    "telemetry",
    "autopilot",
)
"""How long, where and how to train. Any other field changes the model, the data or the optimizer: another run."""


def fixed_field_changes(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return the fields that must not change but differ, by dotted name: the old and the new value."""
    before, after = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (old, new))
    names = sorted(name for name in {**before, **after} if not _is_changeable(name))
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _is_changeable(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in CHANGEABLE_FIELDS)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and name != "shape":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
