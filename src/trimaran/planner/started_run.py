"""What the planner needs to know of a run that has started.

`environment` is an argument: only entry points read it.
"""

from collections.abc import Mapping

from trimaran.core import Plan, Recipe
from trimaran.machine.run_cluster import cluster_of
from trimaran.models import outline_if_known, spec_of
from trimaran.models.hf_facts import cached_facts
from trimaran.planner.question import Question
from trimaran.planner.rules.legal import check_plan
from trimaran.planner.search.search import predicted


def question_of(recipe: Recipe, world_size: int, environment: Mapping[str, str]) -> Question:
    """Return what the planner needs to predict plans of the recipe on `world_size` ranks."""
    spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
    cluster, facts = cluster_of(recipe, world_size, environment), cached_facts(recipe.model, environment)
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, max_plans=1, facts=facts)


def with_prediction(plan: Plan, recipe: Recipe, environment: Mapping[str, str]) -> Plan:
    """Return `plan` with its prediction, if the model's outline is known. Raises if the plan is not valid."""
    question = question_of(recipe, plan.mesh.world_size, environment)
    check_plan(plan, recipe, question.spec, question.cluster)
    return plan if question.outline is None else predicted(plan, question)
