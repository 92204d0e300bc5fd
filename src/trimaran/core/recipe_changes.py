"""What of a recipe may change while a run is on its way, and what would make it another run."""

from collections.abc import Iterator, Mapping
from typing import Any

from trimaran.core.recipe import Recipe

FREE = (
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
    "telemetry",
)
"""How long, where and how, but not what is trained on what."""


def changes_of_course(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Return what `new` has otherwise than `old` and must not, by its dotted name: what it was and what it is."""
    before, after = (dict(_leaves(recipe.model_dump(mode="json"))) for recipe in (old, new))
    names = sorted(name for name in {**before, **after} if not _is_free(name))
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def _is_free(name: str) -> bool:
    return any(name == each or name.startswith(f"{each}.") for each in FREE)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value and name != "shape":
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
