"""Prints rehearsed ranks beside what was predicted for them, and returns them for `--json`."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.plan.plan_view import add_model, facts_table
from trimaran.app.show.text_chart import GREEN, RED
from trimaran.core import show_bytes, show_seconds
from trimaran.planner.measure.rehearsal import RankCost, Rehearsal, RehearsedRank

MEASURES = {
    False: "the peak of torch's CUDA allocator",
    True: "the peak of the rank's tensors, by torch's record of its CPU allocator; without the process itself",
}
CLOSE = 0.1  # of the error of a prediction that is shown in green


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
    console.print(_table(rehearsal))
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


def _table(rehearsal: Rehearsal) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    on_cpu = rehearsal.request.is_on_cpu
    reserved = () if on_cpu else ("reserved",)
    for column in ("rank", "stages", "peak", "predicted", "error", *reserved, "compute", "predicted", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in rehearsal.ranks:
        peak, compute = show_bytes(each.predicted.peak_bytes), show_seconds(each.predicted.seconds)
        place = f"{each.rank:,}", ", ".join(map(str, each.stages))
        if each.measured is None:
            table.add_row(*place, Text(each.answer.status, style=RED), peak, "", *([""] if reserved else []), "",
                          compute, "")  # fmt: skip
            continue
        cells = [show_bytes(each.measured.reserved_bytes)] if reserved else []
        table.add_row(*place, show_bytes(each.measured.peak_bytes), peak, _error(each.peak_error), *cells,
                      show_seconds(each.measured.step_seconds), compute, _error(each.compute_error))  # fmt: skip
    return table


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
        "ranks": [_rank(each) for each in rehearsal.ranks],
        "step": None if step is None else {
            "seconds": step.measured_seconds, "predicted_seconds": step.predicted_seconds,
        },
        "no_step": rehearsal.no_step,
    }  # fmt: skip


def _rank(report: RehearsedRank) -> dict[str, Any]:
    return {
        "rank": report.rank,
        "pipeline_rank": report.pp_rank,
        "stages": list(report.stages),
        "status": report.answer.status,
        "message": report.answer.message,
        "measured": report.measured.as_dict() if report.measured else None,
        "predicted": _cost(report.predicted),
        "error": {"peak": report.peak_error, "compute": report.compute_error},
        "smaller": [
            {
                "layers": each.layers,
                "status": each.answer.status,
                "measured": each.answer.measured.as_dict() if each.answer.measured else None,
                "predicted": _cost(each.predicted),
            }
            for each in report.smaller
        ],
    }


def _cost(cost: RankCost) -> dict[str, Any]:
    return {
        "peak_bytes": cost.peak_bytes,
        "reserved_bytes": cost.reserved_bytes,
        "memory": cost.memory,
        "compute_seconds": cost.seconds,
        "time": cost.time,
    }
