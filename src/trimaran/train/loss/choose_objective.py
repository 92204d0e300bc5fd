"""The objective of a recipe: next-token prediction, or a plug-in's."""

from collections.abc import Mapping
from typing import Any, Protocol

from trimaran.core import Recipe, UserError
from trimaran.core.plugins import KINDS, load_plugin, plugin_errors
from trimaran.train.loss.objective import LanguageObjective, Objective

PARTS = ("part_names", "score_names", "losses", "score")


class ObjectivePlugin(Protocol):
    """The contract of an objective, version 1."""

    contract: int

    def open(self, options: Mapping[str, Any], sources: tuple[str, ...]) -> Objective:
        """Return the objective for the recipe's `objective.options`. `sources` are the names of a mixture's."""
        ...


def choose_objective(recipe: Recipe, sources: tuple[str, ...] = (), *, scored: bool = False) -> Objective:
    """Return the objective of a recipe that trains on tokens; see `LanguageObjective` for the arguments."""
    section = recipe.objective
    if section.name in KINDS["objective"].reserved:
        return LanguageObjective(sources, scored=scored, label_smoothing=section.label_smoothing)
    plugin: ObjectivePlugin = load_plugin("objective", section.name)
    with plugin_errors(
        lambda kind, message: UserError(
            "K077", f"the objective '{section.name}' refuses its options: {kind}: {message}", where="objective.options",
            fix="check them, and what the plug-in says about them",
        )
    ):  # fmt: skip
        objective = plugin.open(section.options, sources)
    if missing := [name for name in PARTS if not hasattr(objective, name)]:
        raise UserError("K077", f"the objective '{section.name}' has no {', '.join(missing)}", where="objective.name",
                        fix="let open() return an object with all of Objective, as docs/guides/plugins.md describes it"
                        )  # fmt: skip
    return objective
