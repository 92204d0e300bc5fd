"""Reads what `trimaran rehearse` is asked for: the plan of a recipe or a model, which ranks, and on which device."""

import os
from collections.abc import Mapping, Sequence

from trimaran.app.recipe.plan_request import read_plan_request
from trimaran.app.recipe.request import with_absolute_paths
from trimaran.core import Plan, UserError
from trimaran.machine import Cluster, calibration_folder, detect, refuse_mixed
from trimaran.models import refuse_freezing
from trimaran.planner import choose
from trimaran.planner.measure.rehearsal import RehearsalRequest, refuse_fewer_layers

NAMED_RANKS = ("first", "last", "stages")
RANKS_FIX = "use first, last, stages (one rank of each pipeline stage) or numbers of ranks, with commas"


def read_rehearse_request(
    what: str | None, shortcuts: Mapping[str, object], settings: Sequence[str], *, ranks: str | None, steps: int,
    layers: int,
) -> RehearsalRequest:  # fmt: skip
    """Return the request for `what`, a recipe or a model. `shortcuts` and `settings` are as for `plan`."""
    question = read_plan_request(what, shortcuts, settings).question
    refuse_mixed(question.cluster, "a rehearsal")
    recipe = with_absolute_paths(question.recipe)
    refuse_freezing(recipe.model)
    plan = choose(recipe, question.spec, question.cluster, question.outline)
    engine = plan.engine_traits
    if not engine.can_rehearse:
        raise UserError("P092", f"{engine.label} cannot be rehearsed: it does not run without the other ranks",
                        where="plan.engine", fix="rehearse the plan with engine torch")  # fmt: skip
    if layers:
        refuse_fewer_layers(recipe, question.spec, plan, layers)
    return RehearsalRequest(
        recipe=recipe,
        spec=question.spec,
        job=question.job,
        plan=plan,
        cluster=question.cluster,
        here=_device_at_hand(question.cluster),
        ranks=chosen_ranks(ranks, plan),
        steps=steps,
        layers=layers,
    )


def chosen_ranks(text: str | None, plan: Plan) -> tuple[int, ...]:
    """Return the ranks that `--ranks` names; by default the first, and the last if there is a pipeline."""
    world, pp = plan.mesh.world_size, plan.mesh.pp
    words = (text or ("first,last" if pp > 1 else "first")).split(",")
    found: dict[int, None] = {}
    for word in (each.strip() for each in words):
        if word in NAMED_RANKS:
            named = {"first": [0], "last": [world - 1], "stages": range(0, world, world // pp)}[word]
            found |= dict.fromkeys(named)
        elif word.isascii() and word.isdigit() and len(word) <= 9 and int(word) < world:
            found[int(word)] = None
        else:
            raise UserError(
                "P090", f"'{word[:40]}' is no rank of a plan with {world:,}", where="--ranks", fix=RANKS_FIX
            )
    return tuple(found)


def _device_at_hand(cluster: Cluster) -> Cluster:
    """Return this machine, on whose first device ranks are measured. Ranks of a cluster of CPUs stay on a CPU."""
    if cluster.device.traits.shares_cores:
        return cluster
    return detect(visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"), calibrations=calibration_folder(os.environ))
