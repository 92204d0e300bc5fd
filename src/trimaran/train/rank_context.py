"""The context that the parts of a rank are built from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimaran.core import Plan, Recipe
from trimaran.runs import Journal, RunDirectory
from trimaran.train.agreement import StopRequest
from trimaran.train.features.table import features_of
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.steppers.feature import Feature


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank of a run, the plan that it follows, and the features of that plan.

    `change_requested` says after a step whether this rank asks for another plan, see `train/features/live_change`.
    """

    run: RunDirectory
    rank_info: RankInfo
    journal: Journal
    cache: Path
    recipe: Recipe
    plan: Plan
    features: Sequence[Feature]
    link: SupervisorLink = NO_SUPERVISOR
    stop: StopRequest = field(default_factory=StopRequest)
    change_requested: Callable[[int], bool] = lambda step: False


def read_context(
    run: RunDirectory,
    rank_info: RankInfo,
    journal: Journal,
    *,
    cache: Path,
    link: SupervisorLink = NO_SUPERVISOR,
    stop: StopRequest | None = None,
    change_requested: Callable[[int], bool] = lambda step: False,
) -> RankContext:
    """Return the context of a rank that follows the recipe and the plan of the run directory."""
    recipe, plan = run.read_recipe(), run.read_plan()
    return RankContext(
        run=run,
        rank_info=rank_info,
        journal=journal,
        cache=cache,
        recipe=recipe,
        plan=plan,
        features=features_of(plan, recipe),
        link=link,
        stop=StopRequest() if stop is None else stop,  # a request is false until somebody asks
        change_requested=change_requested,
    )
