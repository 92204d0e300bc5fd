"""The answer of the workshop as markup: the plan, the memory and time stacks, the Pareto set, and all plans."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimaran.app.plan.plan_answer import PlanReport, all_plans, pareto_set
from trimaran.app.plan.plan_view import occupancy, unit_of
from trimaran.core import Plan, show_bytes, show_count, show_seconds
from trimaran.machine import Cluster
from trimaran.planner.search.goals import no_fit_error
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.view_page import draw_figure
from trimaran.ui.viz.figures import Bars, Point, Scatter, stacked_bars
from trimaran.ui.web.frame import error_state
from trimaran.ui.web.language import say

STACKED_PLANS = 4
POINT_KINDS = ("chosen", "Pareto set", "slower or larger", "does not fit")
OUTSIDE = "reserve and context"  # what the device must have beyond its tensors


def answer_markup(report: PlanReport, command: str, note: str) -> Html:
    """Return the whole answer; `note` says where it is from, and `command` gives the same one."""
    plans = all_plans(report)
    shown = [plan for plan, _ in plans if plan.prediction is not None]
    parts = [_verdict(report), _tiles(report)]
    if shown:
        parts += [
            tag("div", {"class": "side"}, draw_figure(memory_stack(shown, report)), draw_figure(time_stack(shown))),
            draw_figure(pareto_figure(plans, report)),
        ]
    parts += [_plans_table(plans, report), *_notes(report)]
    parts += [tag("p", {"class": "quiet"}, note), tag("pre", {"class": "command"}, command)]
    return Html("".join(parts))


def memory_stack(plans: Sequence[Plan], report: PlanReport) -> Bars:
    """Return the terms of a device's memory, for the best plans and one that does not fit."""
    cluster = report.answer.cluster
    terms = {name: plan.prediction.memory | {OUTSIDE: plan.prediction.device_bytes - plan.prediction.peak_bytes}
             for name, plan in _named(plans).items() if plan.prediction}  # fmt: skip
    figure = stacked_bars(say("Peak memory of a device"), "bytes", terms,
                          {cluster.device.name: float(cluster.device.memory_bytes)})  # fmt: skip
    return _in_language(figure)


def time_stack(plans: Sequence[Plan]) -> Bars:
    """Return the terms of a step's time, for the same plans."""
    terms = {name: plan.prediction.time for name, plan in _named(plans).items() if plan.prediction}
    return _in_language(stacked_bars(say("Time of a step"), "seconds", terms))


def pareto_figure(plans: Sequence[tuple[Plan, str]], report: PlanReport) -> Scatter:
    """Return step time against memory; the Pareto set are plans that no other beats in both."""
    best = set(map(id, pareto_set([plan for plan, _ in plans])))
    points = [_point(plan, why, report, on_front=id(plan) in best) for plan, why in plans if plan.prediction]
    points.sort(key=lambda each: [say(kind) for kind in POINT_KINDS].index(each.kind))  # a kind keeps its colour
    return Scatter(
        title=say("Step time against memory"),
        x_name=say("memory of a device"),
        x_unit="bytes",
        y_name=say("step"),
        y_unit="seconds",
        points=tuple(points),
        x_limit=float(report.answer.cluster.device.memory_bytes),
    )


def _point(plan: Plan, why: str, report: PlanReport, *, on_front: bool) -> Point:
    prediction = plan.prediction
    assert prediction is not None
    chosen, front, beaten, too_large = POINT_KINDS
    kind = too_large if not prediction.fits else front if on_front else beaten
    if plan is report.best:
        kind = chosen
    return Point(name=short_plan(plan, report.best), x=float(prediction.device_bytes), y=float(prediction.step_seconds),
                 kind=say(kind), note=why)  # fmt: skip


def short_plan(plan: Plan, best: Plan | None = None) -> str:
    """Return a plan as short text: the mesh, what differs from the simplest, and what else differs from the best."""
    parts = [str(plan.mesh)]
    parts += [plan.pipeline.schedule] if plan.mesh.pp > 1 else []
    parts += [f"shard {plan.sharding}"] if plan.sharding != "none" else []
    parts += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    parts += [f"offload {plan.offload}"] if plan.offload != "none" else []
    if best is not None and plan.loss != best.loss:
        parts.append(f"loss {plan.loss}")
    if best is not None and plan.comm.overlap != best.comm.overlap:
        parts.append("overlap" if plan.comm.overlap else "no overlap")
    return ", ".join(parts)


def _named(plans: Sequence[Plan]) -> dict[str, Plan]:
    """Return the first plans by a short name; those with the same one are numbered."""
    named: dict[str, Plan] = {}
    for plan in plans[:STACKED_PLANS]:
        name = f"{short_plan(plan)}, {plan.micro_batch} x {plan.grad_accum}"
        named[name if name not in named else f"{name} ({len(named) + 1})"] = plan
    return named


def _in_language(figure: Bars) -> Bars:
    series = tuple(replace(each, name=say(each.name)) for each in figure.series)
    return replace(figure, series=tuple(each for each in series if any(each.values)))


def _verdict(report: PlanReport) -> Html:
    best = report.best
    if best is None or best.prediction is None:
        return error_state(no_fit_error(report.answer))
    head = tag("h2", None, say("The best plan"))
    return Html(head + tag("p", {"class": "lead"}, str(best)))


def _tiles(report: PlanReport) -> Html:
    best, cluster = report.best, report.answer.cluster
    if best is None or (prediction := best.prediction) is None:
        return Html("")
    unit, size = say(unit_of(report.request.question.outline)), show_bytes(cluster.device.memory_bytes)
    tiles: Mapping[str, str] = {
        say("a step, ±{error}", error=f"{prediction.error:.0%}"): show_seconds(prediction.step_seconds),
        say("{unit}/s", unit=unit): show_count(prediction.tokens_per_second),
        say("{percent} of {size} a device", percent=f"{occupancy(prediction, cluster):.0%}", size=size): show_bytes(
            prediction.device_bytes
        ),
        say("MFU"): f"{prediction.mfu:.0%}" if prediction.mfu_is_known else "",
    }
    shown = [tag("div", {"class": "tile"}, tag("b", None, value), tag("span", None, name))
             for name, value in tiles.items() if value]  # fmt: skip
    return tag("div", {"class": "tiles"}, *shown)


def _plans_table(plans: Sequence[tuple[Plan, str]], report: PlanReport) -> Html:
    unit = say("{unit}/s", unit=say(unit_of(report.request.question.outline)))
    names = (say("plan"), say("batch"), say("memory"), say("step"), unit, "")
    head = tag("tr", None, *(tag("th", None, name) for name in names))
    rows = [_plan_row(number, plan, why, report) for number, (plan, why) in enumerate(plans)]
    table = tag("table", {"class": "plans"}, tag("thead", None, head), tag("tbody", None, *rows))
    return Html(tag("h2", None, say("All plans")) + tag("div", {"class": "scroll"}, table))


def _plan_row(number: int, plan: Plan, why: str, report: PlanReport) -> Html:
    prediction, is_best = plan.prediction, plan is report.best
    numbers = ["", "", ""] if prediction is None else _numbers(plan, report.answer.cluster)
    reason = why or say("It is slower than the chosen plan, by the numbers in this row.")
    why_not = tag("details", None, tag("summary", None, say("Why not this one?")), tag("p", None, reason))
    verdict = tag("p", {"class": "good"}, say("chosen")) if is_best else why_not
    pin = tag("button", {"type": "button", "class": "plain", "data-value": number}, say("Pin"))
    cells = [
        tag("td", None, short_plan(plan, report.best), verdict),
        tag("td", None, f"{plan.micro_batch} x {plan.grad_accum}"),
        *(tag("td", None, each) for each in numbers),
        tag("td", None, pin),
    ]
    return tag("tr", {"class": "chosen" if is_best else None}, *cells)


def _numbers(plan: Plan, cluster: Cluster) -> list[str]:
    prediction = plan.prediction
    assert prediction is not None
    memory = f"{show_bytes(prediction.device_bytes)} {occupancy(prediction, cluster):.0%}"
    return [memory, show_seconds(prediction.step_seconds), show_count(prediction.tokens_per_second)]


def _notes(report: PlanReport) -> list[Html]:
    answer = report.answer
    lists = {
        say("What would change the answer"): answer.hints,
        say("Communication settings that differ from the defaults"): answer.choices,
        say("Warnings"): answer.warnings,
    }
    found = [tag("section", {"class": "notes"}, tag("h3", None, title),
                 tag("ul", None, *(tag("li", None, each) for each in lines)))
             for title, lines in lists.items() if lines]  # fmt: skip
    return [tag("div", None, *found)] if found else []
