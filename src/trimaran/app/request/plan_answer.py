"""What `plan` answers: the plans, what they come to in days and money, and what to type next. Nothing is drawn here."""

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.app.request.options import own_name
from trimaran.app.request.plan_request import Asked
from trimaran.app.request.run_cost import RunCost, Terms, account_of
from trimaran.core import Plan, UserError, nearest
from trimaran.hardware import Cluster
from trimaran.planner import GOALS, PlanAnswer, check_plan, search
from trimaran.planner.choose import refusal

if TYPE_CHECKING:  # only a plan that is written for a tool pays for the emitters
    from trimaran.app.request.emit_files import Form, Written


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A question with its answer; `form` is the plan in a tool's words, `written` where its files are."""

    asked: Asked
    answer: PlanAnswer
    terms: Terms
    form: "Form | None" = None
    written: "Written | None" = None

    @property
    def best(self) -> Plan | None:
        """The plan that everything else is about: the best, or the best that the tool can express."""
        return self.form.plan if self.form else next(iter(self.answer.ranked), None)

    @property
    def account(self) -> RunCost | None:
        asked = self.answer.question
        return account_of(self.best, asked, self.answer.cluster, self.terms) if self.best else None

    @property
    def next_command(self) -> str:
        if self.written:
            return self.written.command
        return _next_command(self.asked, self.answer, self.best) if self.best else ""

    @property
    def caution(self) -> str:
        """What to know before `next_command` is typed: that it is for another plan; '' where it is for this one."""
        if self.best is None or self.written or _trains_here(self.best, self.answer):
            return ""
        return _tool_for(self.best, self.answer)[1]


def report_on(asked: Asked, terms: Terms, *, tool: str | None) -> Report:
    """Return the answer to what was asked, in the words of `tool` where one is named."""
    if tool is None:
        return Report(asked=asked, answer=search(asked.question), terms=terms)
    from trimaran.app.request.emit_files import search_for

    answer, form = search_for(tool, asked.question)
    return Report(asked=asked, answer=answer, terms=terms, form=form)


def with_files(report: Report, folder: Path | None, *, force: bool) -> Report:
    """Write what the tool reads, where there is a form of the plan, and return the report that knows where."""
    if report.form is None:
        return report
    from trimaran.app.request.emit_files import write

    return replace(report, written=write(report.form, folder or Path(report.form.tool), force=force))


def with_goal(asked: Asked, goal: str) -> Asked:
    """Return the question with another goal."""
    for known in GOALS:
        if known == goal:
            return replace(asked, question=replace(asked.question, goal=known))
    raise UserError("A013", f"there is no goal '{goal}'{nearest(goal, GOALS)}", where="--goal",
                    fix=f"use one of {', '.join(GOALS)}")  # fmt: skip


def with_top(asked: Asked, top: int) -> Asked:
    """Return the question for at least `top` plans; not for fewer than usual, since a tool may take a later one."""
    return replace(asked, question=replace(asked.question, most_shown=max(top, asked.question.most_shown)))


def as_dict(report: Report, *, top: int) -> dict[str, Any]:
    """Return what `--json` prints: everything that is drawn, and every term of every plan."""
    answer, question, account = report.answer, report.asked.question, report.account
    best = _with_prediction(report.best) if report.best else {"plan": None, "prediction": None}
    found = {
        "name": question.recipe.name,
        "model": _model(report),
        "cluster": str(answer.cluster),
        "goal": question.goal,
        "seq_len": question.recipe.data.seq_len,
        "global_batch": question.recipe.train.global_batch,
        "fits": bool(answer.ranked),
        **best,
        "ranked": [_with_prediction(plan) for plan in answer.ranked[:top]],
        "misses": [_with_prediction(miss.plan) | {"why": miss.why} for miss in answer.misses],
        "hints": list(answer.hints),
        "warnings": list(answer.warnings),
        "num_considered": answer.num_considered,
        "missing_bytes": answer.missing_bytes,
        "smallest_cluster": str(answer.smallest) if answer.smallest else None,
        **(account.as_dict() if account else {"goodput": None, "bill": None}),
        "emission": report.written.as_dict() if report.written else None,
        "next": report.next_command or None,
        "caution": report.caution or None,
    }
    return found if answer.ranked else found | {"error": refusal(answer).as_dict()}


def _model(report: Report) -> dict[str, Any] | None:
    outline = report.asked.question.outline
    return {"name": outline.name, "parameters": outline.num_parameters} if outline else None


def _with_prediction(plan: Plan) -> dict[str, Any]:
    prediction = plan.prediction.model_dump(mode="json") if plan.prediction else None
    return {"plan": plan.model_dump(mode="json"), "prediction": prediction}


def _next_command(asked: Asked, answer: PlanAnswer, best: Plan) -> str:
    """Return what starts the plan: `train`, with the plan pinned where it would not choose it by itself.

    A plan that our trainer does not run is written for a tool that does.
    """
    question, words = asked.question, list(asked.words)
    if answer.part:
        words += ["--set", f"cluster={answer.part}"]
    if not _trains_here(best, answer):
        return shlex.join([own_name(), "plan", *words, "--emit", _tool_for(best, answer)[0]])
    if question.goal != "throughput" or not question.trains:
        pins = best.model_dump(mode="json", exclude_defaults=True)
        words += ["--set", f"plan={json.dumps(pins)}"]
    return shlex.join([*_starter(answer.cluster), "train", *words])


def _trains_here(plan: Plan, answer: PlanAnswer) -> bool:
    """Return whether `trimaran train` runs the plan: it trains language models, in the ways that it checks."""
    question, outline = answer.question, answer.question.outline
    if question.spec is None and outline and (len(outline.towers) > 1 or not outline.main.vocab):
        return False
    try:
        check_plan(plan, question.recipe, question.spec, answer.cluster, outline)
    except UserError:
        return False
    return True


def _tool_for(best: Plan, answer: PlanAnswer) -> tuple[str, str]:
    """Return the first tool that can express the plan and ''; else the one that loses least, and words that say so.

    Of the plans that were found the best that any tool can express counts; if there is none, a tool that has the
    network, which searches a plan of its own.
    """
    from trimaran.app.request.emit_files import refused, show_slower, slower
    from trimaran.planner.emit import EMITTERS

    refusals = {tool: refused(tool, best, answer.question) for tool in EMITTERS}
    if able := [tool for tool, error in refusals.items() if error is None]:
        return able[0], ""
    tools = [tool for tool, error in refusals.items() if error and error.code != "P062"] or list(EMITTERS)
    why = "no tool that we write for takes this plan"
    for plan in answer.ranked:
        for tool in tools:
            if refused(tool, plan, answer.question) is None:
                pace = show_slower(slower(plan, best))
                return tool, f"{why}: {_what(refusals[tool])}; the best that it takes of these is {pace}"
    return tools[0], f"{why}: {_what(refusals[tools[0]])}; it gets another, and you are told how much slower that is"


def _what(error: UserError | None) -> str:
    return error.what if error else ""


def _starter(cluster: Cluster) -> list[str]:
    """Return what `train` is typed after; several nodes need a torchrun on each, meeting on the first."""
    if cluster.num_nodes == 1:
        return [own_name()]
    ranks = [f"--nnodes={cluster.num_nodes}", f"--nproc-per-node={cluster.devices_per_node}"]
    return ["torchrun", *ranks, "--rdzv-backend=c10d", "--rdzv-endpoint=FIRST_NODE:29500", "-m", "trimaran"]
