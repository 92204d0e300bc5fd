"""The plan of a run: the fastest that our trainer runs and that fits; what a person pinned stays."""

from trimaran.core import Plan, Recipe, UserError, show_bytes
from trimaran.hardware import Cluster
from trimaran.models import ModelSpec, Outline, outline_of
from trimaran.models.stages import Spec
from trimaran.planner.legal import check_sequence
from trimaran.planner.question import PlanAnswer, Question
from trimaran.planner.rejections import shortages
from trimaran.planner.search import best_plans, nothing_fits, predicted
from trimaran.planner.simple_plans import first_way


def choose(recipe: Recipe, spec: Spec | None, cluster: Cluster, outline: Outline | None = None) -> Plan:
    """Return the fastest legal plan with its prediction; of plans that are nearly alike, the plainest.

    Without an `outline` or a `spec` to draw one from there is nothing to predict, and the simplest way is taken. The
    same question always gets the same answer. Raises what is wrong with the pins, or by how much nothing fits.
    """
    check_sequence(recipe.data.seq_len, spec)
    if outline is None and isinstance(spec, ModelSpec):
        outline = outline_of(spec)
    question = Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, most_shown=1)
    if outline is None:
        return first_way(question)
    if found := best_plans(question).ranked:
        return predicted(found[0].plan, question)
    raise refusal(nothing_fits(question))


def refusal(answer: PlanAnswer) -> UserError:
    """Return what to say when nothing fits: the leanest plan, what it lacks, and what would do."""
    leanest, device = answer.misses[0].plan, answer.cluster.device.name
    assert leanest.prediction is not None
    term, size = max(leanest.prediction.memory.items(), key=lambda item: item[1])
    more = f"add devices: {answer.smallest} would do" if answer.smallest else "add devices"
    fixes = [more, *(hint.partition(":")[0] for hint in answer.hints), "choose a smaller model"]
    told = {"device memory": f"{device}, the most for {term} ({show_bytes(size)})"}
    over = " and ".join(
        f"{show_bytes(each.over)} too big for the {show_bytes(each.most)} of {told.get(each.what, each.what)}"
        for each in shortages(leanest.prediction, answer.cluster)
    )
    what = f"no plan fits: the leanest ({leanest}) is {over}"
    return UserError("P007", what, where="cluster", fix=f"{', '.join(fixes[:-1])}, or {fixes[-1]}")
