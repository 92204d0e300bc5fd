"""Chooses the plan of a run: the fastest that fits and that our trainer can run. Pinned fields stay."""

from trimaran.core import Plan, Recipe, UserError, show_bytes
from trimaran.machine import Cluster
from trimaran.models import Outline, Spec, decoder_of, outline_of, with_adapter
from trimaran.models.hf_facts import HfFacts
from trimaran.planner.comm_choices import choose_comm
from trimaran.planner.question import PlanAnswer, Question
from trimaran.planner.rules.legal import check_sequence
from trimaran.planner.search.rejections import shortages
from trimaran.planner.search.search import best_plans, nothing_fits, predicted
from trimaran.planner.simple_plans import first_legal_plan


def choose(
    recipe: Recipe,
    spec: Spec | None,
    cluster: Cluster,
    outline: Outline | None = None,
    facts: HfFacts | None = None,
) -> Plan:
    """Return the fastest legal plan with its prediction; of plans that tie, the simplest.

    Without an `outline`, or a `spec` to make one from, nothing can be predicted, and the simplest legal plan is taken.
    The same question always gets the same answer. Raises UserError for wrong pins, or if nothing fits.
    """
    check_sequence(recipe.data.seq_len, spec)
    if outline is None and (decoder := decoder_of(spec)) is not None:
        outline = outline_of(decoder)
        outline = with_adapter(outline, recipe.model.adapter) if recipe.model.adapter else outline
    question = Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, max_plans=1, facts=facts)
    if outline is None:
        return first_legal_plan(question)
    if found := best_plans(question).ranked:
        return predicted(choose_comm(found[0].plan, question).plan, question)
    raise no_fit_error(nothing_fits(question))


def no_fit_error(answer: PlanAnswer) -> UserError:
    """Return the error when nothing fits: the smallest plan, what it lacks, and what would help."""
    smallest, device = answer.misses[0].plan, answer.cluster.device.name
    assert smallest.prediction is not None
    term, size = max(smallest.prediction.memory.items(), key=lambda item: item[1])
    more = f"add devices: {answer.smallest} is enough" if answer.smallest else "add devices"
    fixes = [more, *(hint.partition(":")[0] for hint in answer.hints), "choose a smaller model"]
    owners = {"device memory": f"{device}, the most for {term} ({show_bytes(size)})"}
    over = " and ".join(
        f"{show_bytes(each.over)} too big for the {show_bytes(each.most)} of {owners.get(each.what, each.what)}"
        for each in shortages(smallest.prediction, answer.cluster)
    )
    what = f"no plan fits: the smallest ({smallest}) is {over}"
    return UserError("P007", what, where="cluster", fix=f"{', '.join(fixes[:-1])}, or {fixes[-1]}")
