"""The answer of `trimaran plan`: the plans, the cost of the run, and the next command. Nothing is printed here."""

import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.app.plan.run_cost import CostTerms, RunCost, run_cost_of
from trimaran.app.recipe.ask_hf_facts import ask_hf_facts
from trimaran.app.recipe.options import program_name
from trimaran.app.recipe.plan_request import PlanRequest
from trimaran.app.recipe.start_command import start_command
from trimaran.core import Plan, UserError, did_you_mean
from trimaran.planner import GOALS, PlanAnswer, Question, check_plan
from trimaran.planner.rules.axis_rules import check_hf_facts
from trimaran.planner.search.goals import no_fit_error, search

if TYPE_CHECKING:  # the emitters and the simulator are imported only if they are needed
    from trimaran.app.plan.emit_files import EmittedPlan, WrittenPlan
    from trimaran.app.plan.trainer_plan import TrainerPlan
    from trimaran.planner.measure.run_index import MeasuredPlan
    from trimaran.planner.reliability import Reliability


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A plan request with its answer; `emitted` is the plan as config files of a tool, `written` their folder.

    measured: the fastest plan that a run measured for the same question.
    """

    request: PlanRequest
    answer: PlanAnswer
    terms: CostTerms
    emitted: "EmittedPlan | None" = None
    written: "WrittenPlan | None" = None
    reliability: "Reliability | None" = None
    measured: "MeasuredPlan | None" = None
    trainer: "TrainerPlan | None" = None

    @property
    def best(self) -> Plan | None:
        """The best plan, or the best that the tool supports."""
        return self.emitted.plan if self.emitted else next(iter(self.answer.ranked), None)

    @property
    def cost(self) -> RunCost | None:
        question = self.answer.question
        return run_cost_of(self.best, question, self.answer.cluster, self.terms) if self.best else None

    @property
    def next_command(self) -> str:
        if self.written:
            return self.written.command
        return _next_command(self.request, self.answer, self.best) if self.best else ""

    @property
    def is_measured(self) -> bool:
        """Whether the best plan is the one that was measured."""
        best = self.best
        return bool(self.measured and best and self.measured.plan == best.model_copy(update={"prediction": None}))

    @property
    def measured_command(self) -> str:
        """The command that trains the measured plan; '' if it is the best one, or cannot be trained here."""
        if self.measured is None or self.is_measured or not _trains_here(self.measured.plan, self.answer):
            return ""
        pins = f"plan={json.dumps(dict(self.measured.pins))}"
        words = [*start_command(self.request.question.cluster), "train", *self.request.arguments]
        return shlex.join([*words, "--set", pins])

    @property
    def caution(self) -> str:
        """A warning if `next_command` runs another plan than this one; '' otherwise."""
        if self.best is None or self.written or _trains_here(self.best, self.answer):
            return ""
        return _tool_for(self.best, self.answer)[1]


def build_plan_report(request: PlanRequest, terms: CostTerms, *, tool: str | None) -> PlanReport:
    """Search the plans and return the answer, as config files of `tool` if one is named."""
    question, emitted = replace(request.question, mtbf_hours=terms.mtbf_hours), None
    if tool is None:
        answer = _search_for_trainer(question)
    else:
        from trimaran.app.plan.emit_files import search_for_tool

        answer, emitted = search_for_tool(tool, question)
    report = PlanReport(request=request, answer=answer, terms=terms, emitted=emitted)
    if report.best and tool is None and answer.question.facts is not None:
        from trimaran.app.plan.trainer_plan import trainer_plan

        report = replace(report, trainer=trainer_plan(report.best, answer, request.arguments))
    if question.goal != "goodput" or report.best is None or question.outline is None:
        return report
    from trimaran.planner.reliability import reliability_of

    return replace(report, reliability=reliability_of(report.best, question, answer.cluster))


def _search_for_trainer(question: Question) -> PlanAnswer:
    """Return the plans for what our trainer can do with a Hugging Face model.

    A warning says if that is not known, or why `trimaran train` refuses every plan.
    """
    facts, unknown = ask_hf_facts(question.recipe.model, os.environ)
    trains = question.for_trainer and not (facts and facts.untrainable)
    answer, warnings = search(replace(question, facts=facts, for_trainer=trains)), []
    if unknown:
        warnings.append(f"which plans `trimaran train` runs for this model is not known: {unknown}")
    try:
        check_hf_facts(Plan(), question.recipe, facts)
    except UserError as error:
        warnings.append(f"`trimaran train` refuses this with any plan: {error.code}: {error.what}; {error.fix}")
    return replace(answer, warnings=(*answer.warnings, *warnings))


def with_measured(report: PlanReport, environ: Mapping[str, str]) -> PlanReport:
    """Return the report with the fastest measured plan; nothing is read where no run was ever seen."""
    from trimaran.app.plan.measured_plans import best_measured_plan

    return replace(report, measured=best_measured_plan(report.request.question, environ))


def with_files(report: PlanReport, folder: Path | None, *, force: bool) -> PlanReport:
    """Write the tool's config files, if any, and return the report with their folder."""
    if report.emitted is None:
        return report
    from trimaran.app.plan.emit_files import write_files

    return replace(report, written=write_files(report.emitted, folder or Path(report.emitted.tool), force=force))


def with_goal(request: PlanRequest, goal: str) -> PlanRequest:
    """Return the request with another goal."""
    for name in GOALS:
        if name == goal:
            return replace(request, question=replace(request.question, goal=name))
    raise UserError("A013", f"there is no goal '{goal}'{did_you_mean(goal, GOALS)}", where="--goal",
                    fix=f"use one of {', '.join(GOALS)}")  # fmt: skip


def with_top(request: PlanRequest, top: int) -> PlanRequest:
    """Return the request for at least `top` plans; never fewer than the default, since a tool may need a later one."""
    return replace(request, question=replace(request.question, max_plans=max(top, request.question.max_plans)))


def as_dict(report: PlanReport, *, top: int) -> dict[str, Any]:
    """Return what `--json` prints: everything that is shown, and every term of every plan."""
    answer, question, cost = report.answer, report.request.question, report.cost
    best = _with_prediction(report.best) if report.best else {"plan": None, "prediction": None}
    found = {
        "name": question.recipe.name,
        "model": _model(report),
        "cluster": str(answer.cluster),
        "goal": question.goal,
        "seq_len": question.recipe.data.seq_len,
        "global_batch": question.recipe.train.global_batch,
        "rows": asdict(question.rows) if question.rows else None,
        "fits": bool(answer.ranked),
        **best,
        "ranked": [_with_prediction(plan) for plan in answer.ranked[:top]],
        "ties": [_with_prediction(tie.plan) | {"why": tie.why} for tie in answer.ties],
        "misses": [_with_prediction(miss.plan) | {"why": miss.why} for miss in answer.misses],
        "pareto": [_with_prediction(plan) for plan in pareto_set([plan for plan, _ in all_plans(report)])],
        "choices": list(answer.choices),
        "hints": list(answer.hints),
        "warnings": list(answer.warnings),
        "num_considered": answer.num_considered,
        "missing_bytes": answer.missing_bytes,
        "smallest_cluster": str(answer.smallest) if answer.smallest else None,
        **(cost.as_dict() if cost else {"goodput": None, "bill": None}),
        "reliability": asdict(report.reliability) if report.reliability else None,
        "measured": _measured(report),
        "emission": report.written.as_dict() if report.written else None,
        "next": report.next_command or None,
        "caution": report.caution or None,
        "trainer": report.trainer.as_dict() if report.trainer else None,
    }
    return found if answer.ranked else found | {"error": no_fit_error(answer).as_dict()}


def _measured(report: PlanReport) -> dict[str, Any] | None:
    if (found := report.measured) is None:
        return None
    figures = {"is_best": report.is_measured, "next": report.measured_command or None}
    return {**found.as_dict(), "plan": found.plan.model_dump(mode="json"), "error": found.error, **figures}


def _model(report: PlanReport) -> dict[str, Any] | None:
    question = report.request.question
    if (outline := question.outline) is None:
        return None
    adapter = question.recipe.model.adapter
    return {
        "name": outline.name,
        "parameters": outline.num_parameters,
        "trained_parameters": outline.trained_parameters,
        "adapter": adapter.model_dump(mode="json") if adapter else None,
    }


def _with_prediction(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction.model_dump(mode="json") if plan.prediction else None
    return {"plan": plan.model_dump(mode="json"), "prediction": prediction}


def _next_command(request: PlanRequest, answer: PlanAnswer, best: Plan) -> str:
    """Return the command that starts the plan: `train`, with the plan pinned if `train` would choose another.

    A plan that our trainer does not support is written for a tool that does.
    """
    if not _trains_here(best, answer):
        part = ["--set", f"cluster={answer.part}"] if answer.part else []
        return shlex.join([program_name(), "plan", *request.arguments, *part, "--emit", _tool_for(best, answer)[0]])
    file = [request.file] if request.file else []
    settings = [word for each in run_settings(request, answer, best) for word in ("--set", each)]
    return shlex.join([*start_command(answer.cluster), "train", *file, *settings])


def run_settings(request: PlanRequest, answer: PlanAnswer, best: Plan) -> list[str]:
    """Return the settings with which `train` and `launch` run the plan; it is pinned if they would choose another."""
    settings = [*request.settings, *([f"cluster={answer.part}"] if answer.part else [])]
    if request.question.goal == "throughput" and request.question.for_trainer:
        return settings
    return [*settings, f"plan={json.dumps(best.model_dump(mode='json', exclude_defaults=True))}"]


def all_plans(report: PlanReport) -> list[tuple[Plan, str]]:
    """Return all plans of the answer, the best first, and why each is not chosen; '' for the best."""
    answer = report.answer
    known = {str(each.plan): each.why for each in (*answer.misses, *answer.ties)}
    plans = {str(plan): plan for plan in answer.ranked}
    plans |= {str(each.plan): each.plan for each in (*answer.ties, *answer.misses) if str(each.plan) not in plans}
    return [(plan, "" if plan is report.best else known.get(name, "")) for name, plan in plans.items()]


def pareto_set(plans: Sequence[Plan]) -> list[Plan]:
    """Return the plans that fit and that no other beats in both step time and memory, fastest first."""
    fitting = [(each.prediction.step_seconds, each.prediction.device_bytes, number, each)
               for number, each in enumerate(plans) if each.prediction and each.prediction.fits]  # fmt: skip
    found: list[Plan] = []
    least = math.inf
    for _, size, _, plan in sorted(fitting, key=lambda item: item[:3]):
        if size < least:
            found.append(plan)
            least = size
    return found


def _trains_here(plan: Plan, answer: PlanAnswer) -> bool:
    """Return whether `trimaran train` supports the plan and the model."""
    question, outline = answer.question, answer.question.outline
    if question.spec is None and outline and (len(outline.towers) > 1 or not outline.main.vocab):
        return False
    try:
        check_plan(plan, question.recipe, question.spec, answer.cluster, outline, question.facts)
    except UserError:
        return False
    return True


def _tool_for(best: Plan, answer: PlanAnswer) -> tuple[str, str]:
    """Return the first tool that supports the plan and ''; otherwise the tool that loses least, and a warning.

    The best plan of the answer that any tool supports counts. If there is none, the first tool that has the network is
    returned: it searches its own plan.
    """
    from trimaran.app.plan.emit_files import refusal_by, show_slower, slower
    from trimaran.planner.emit import EMITTERS

    refusals = {tool: refusal_by(tool, best, answer.question) for tool in EMITTERS}
    if able := [tool for tool, error in refusals.items() if error is None]:
        return able[0], ""
    tools = [tool for tool, error in refusals.items() if error and error.code != "P062"] or list(EMITTERS)
    why = "no tool supports this plan"
    for plan in answer.ranked:
        for tool in tools:
            if refusal_by(tool, plan, answer.question) is None:
                speed = show_slower(slower(plan, best))
                return tool, f"{why}: {_what(refusals[tool])}; the best of these that it supports is {speed}"
    return tools[0], f"{why}: {_what(refusals[tools[0]])}; it gets another plan, and the output says how much slower"


def _what(error: UserError | None) -> str:
    return error.what if error else ""
