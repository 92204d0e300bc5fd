"""Which plug-ins a recipe names, and what a run records of them."""

from trimaran.core.errors import UserError
from trimaran.core.plugins import KINDS, find_plugin, load_plugin
from trimaran.core.recipe import Recipe

USED_BY_RANKS = ("objective", "data source", "network family")


def used_plugins(recipe: Recipe) -> list[tuple[str, str]]:
    """Return the kind and the name of each plug-in that the recipe names."""
    named = [
        ("objective", recipe.objective.name),
        ("data source", recipe.data.source),
        ("network family", recipe.model.family),
        *(("sink", name) for name in recipe.telemetry.sinks),
        ("autopilot policy", recipe.autopilot.policy),
    ]
    return [(kind, name) for kind, name in named if name not in KINDS[kind].reserved]


def plugin_records(recipe: Recipe) -> list[dict[str, str]]:
    """Return kind, name, distribution and version of each plug-in; of one that is not installed only the first two."""
    records = []
    for kind, name in used_plugins(recipe):
        try:
            records.append(find_plugin(kind, name).as_dict())
        except UserError:
            records.append({"kind": kind, "name": name})
    return records


def load_used_plugins(recipe: Recipe, kinds: tuple[str, ...]) -> None:
    """Load the recipe's plug-ins of these kinds; raise UserError for the first that cannot be used here."""
    for kind, name in used_plugins(recipe):
        if kind in kinds:
            load_plugin(kind, name)
