"""The answer of `trimaran rehearse`: the plan, ranks and device that are asked for, and how the ranks are shown."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from trimaran.app.plan.plan_view import add_model, facts_table
from trimaran.app.recipe.plan_request import read_plan_request
from trimaran.app.recipe.request import with_absolute_paths
from trimaran.app.show.clean_console import plain_table
from trimaran.app.show.text_chart import GREEN, RED
from trimaran.core import Plan, UserError, show_bytes, show_seconds
from trimaran.machine import calibration_folder, detect, refuse_mixed
from trimaran.models import refuse_freezing
from trimaran.planner import RankCost, Rehearsal, RehearsalRequest, choose, refuse_fewer_layers

NAMED_RANKS = ("first", "last", "stages")
RANKS_FIX = "use first, last, stages (one rank of each pipeline stage) or numbers of ranks, with commas"
MEASURES = {
    False: "the peak of torch's CUDA allocator",
    True: "the peak of the rank's tensors, by torch's record of its CPU allocator; without the process itself",
}
CLOSE = 0.1  # of the error of a prediction that is shown in green


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
        raise UserError("P092.cannot-rehearsed", where="plan.engine", engine=engine.label)
    if layers:
        refuse_fewer_layers(recipe, question.spec, plan, layers)
    # Ranks are measured on this machine's first device; those of a cluster of CPUs stay on a CPU.
    here = question.cluster
    if not here.device.traits.shares_cores:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        here = detect(visible_devices=visible, calibrations=calibration_folder(os.environ))
    return RehearsalRequest(
        recipe=recipe,
        spec=question.spec,
        job=question.job,
        plan=plan,
        cluster=question.cluster,
        here=here,
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
            raise UserError("P090.no-rank-plan", where="--ranks", word=word[:40], world=world)
    return tuple(found)


def show_rehearsal(rehearsal: Rehearsal, console: Console) -> None:
    """Print the plan, each rank as measured and as predicted, and the step that follows."""
    request, facts = rehearsal.request, facts_table()
    facts.add_row("run", Text(request.recipe.name, style="bold"))
    add_model(facts, request.job.outline)
    facts.add_row("plan", str(request.plan))
    facts.add_row("cluster", str(request.cluster))
    facts.add_row("device", f"{_device(rehearsal)}; the prediction is for it, too")
    facts.add_row("memory", MEASURES[request.is_on_cpu])
    facts.add_row("compute", f"the median of {request.steps} steps without communication and without the wait for data")
    if request.layers:
        facts.add_row("layers", f"measured with {request.layers} and {2 * request.layers} in a stage, extrapolated "
                      "linearly to all")  # fmt: skip
    console.print(facts)
    console.print()
    reserved = () if rehearsal.request.is_on_cpu else ("reserved",)
    columns = ("rank", "stages", "peak", "predicted", "error", *reserved, "compute", "predicted", "error")
    table = plain_table(*columns)
    for rank in rehearsal.ranks:
        peak, compute = show_bytes(rank.predicted.peak_bytes), show_seconds(rank.predicted.seconds)
        place = f"{rank.rank:,}", ", ".join(map(str, rank.stages))
        if rank.measured is None:
            table.add_row(*place, Text(rank.answer.status, style=RED), peak, "", *([""] if reserved else []), "",
                          compute, "")  # fmt: skip
            continue
        cells = [show_bytes(rank.measured.reserved_bytes)] if reserved else []
        table.add_row(*place, show_bytes(rank.measured.peak_bytes), peak, _error(rank.peak_error), *cells,
                      show_seconds(rank.measured.step_seconds), compute, _error(rank.compute_error))  # fmt: skip
    console.print(table)
    for each in rehearsal.ranks:
        if each.measured is None:
            console.print(Text(f"rank {each.rank}: {each.answer.status}: {each.answer.message}", style=RED))
        elif each.measured.num_refused:
            console.print(Text(f"rank {each.rank}: {each.measured.num_refused} updates were refused for a NaN or Inf, "
                               "which a rehearsal must not have", style=RED))  # fmt: skip
    console.print()
    if rehearsal.step is None:
        console.print(Text(f"no time of a step on {request.cluster}: {rehearsal.no_step}", style="dim"))
        return
    step = rehearsal.step
    console.print(Text(f"a step on {request.cluster}: ", style="bold").append(
        f"{show_seconds(step.measured_seconds)} with the measured compute and simulated communication; "
        f"{show_seconds(step.predicted_seconds)} with the predicted compute", style="not bold"))  # fmt: skip


def _device(rehearsal: Rehearsal) -> str:
    names = [each.answer.device for each in rehearsal.ranks if each.answer.device]
    return names[0] if names else rehearsal.request.here.device.name


def _error(error: float | None) -> Text:
    assert error is not None
    return Text(f"{error:+.1%}", style=GREEN if abs(error) <= CLOSE else "")


def rehearsal_as_dict(rehearsal: Rehearsal) -> dict[str, Any]:
    """Return what `--json` prints. Errors are of the prediction, as fractions of what was measured."""
    request, step = rehearsal.request, rehearsal.step
    return {
        "name": request.recipe.name,
        "model": request.job.outline.name,
        "cluster": str(request.cluster),
        "plan": request.plan.model_dump(mode="json"),
        "device": _device(rehearsal),
        "measure": MEASURES[request.is_on_cpu],
        "steps": request.steps,
        "layers": [request.layers, 2 * request.layers] if request.layers else None,
        "ranks": [
            {
                "rank": each.rank,
                "pipeline_rank": each.pp_rank,
                "stages": list(each.stages),
                "status": each.answer.status,
                "message": each.answer.message,
                "measured": each.measured.as_dict() if each.measured else None,
                "predicted": _cost(each.predicted),
                "error": {"peak": each.peak_error, "compute": each.compute_error},
                "smaller": [
                    {
                        "layers": part.layers,
                        "status": part.answer.status,
                        "measured": part.answer.measured.as_dict() if part.answer.measured else None,
                        "predicted": _cost(part.predicted),
                    }
                    for part in each.smaller
                ],
            }
            for each in rehearsal.ranks
        ],
        "step": None if step is None else {
            "seconds": step.measured_seconds, "predicted_seconds": step.predicted_seconds,
        },
        "no_step": rehearsal.no_step,
    }  # fmt: skip


def _cost(cost: RankCost) -> dict[str, Any]:
    return {"peak_bytes": cost.peak_bytes, "reserved_bytes": cost.reserved_bytes, "memory": cost.memory,
            "compute_seconds": cost.seconds, "time": cost.time}  # fmt: skip
