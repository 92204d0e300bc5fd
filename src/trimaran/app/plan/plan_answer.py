"""The answer of `trimaran plan`: the plans, the cost of the run, and the next command. Nothing is printed here."""

import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trimaran.app.recipe.ask_torch import ask_hf_facts
from trimaran.app.recipe.options import program_name, start_command
from trimaran.app.recipe.plan_request import PlanRequest
from trimaran.core import Plan, Recipe, Seconds, UserError, did_you_mean, show_count, show_seconds, templated
from trimaran.cost import Bill, Faults, Goodput, bill_of, checkpoint_bytes, expected_goodput, write_seconds
from trimaran.machine import Cluster
from trimaran.planner import GOALS, PlanAnswer, Question, check_hf_facts, check_plan, choose, no_fit_error, search
from trimaran.runs import plan_tree

if TYPE_CHECKING:
    from trimaran.app.plan.other_tools import EmittedPlan
    from trimaran.planner.measure.run_index import MeasuredPlan
    from trimaran.planner.reliability import Reliability

# Assumptions, shown with every result: the bandwidth of a node to a parallel file system, and the time of a restart,
# which detects the fault, starts the processes, reads the checkpoint and compiles.
NODE_DISK_BANDWIDTH = 2e9  # bytes a second
RESTART_SECONDS = Seconds(600.0)
SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([kmbgt]?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """Tokens of a run, price of a GPU hour, and mean time between failures of a GPU; None if not given."""

    tokens: float | None = None
    price: float | None = None
    mtbf_hours: float | None = None


def read_cost_terms(*, tokens: str | None, price: float | None, mtbf: float | None) -> CostTerms:
    """Return the terms from the command line: tokens as `300B`, `1.5T` or `15e12`."""
    for option, value in (("--price", price), ("--mtbf", mtbf)):
        if value is not None and not 0 < value < 1e12:
            raise UserError("A013.not-number-above", where=option, value=value, option=option)
    if price is not None and tokens is None:
        raise UserError("A013.price-needs-number", where="--price")
    if tokens is None:
        return CostTerms(price=price, mtbf_hours=mtbf)
    match = NUMBER.fullmatch(tokens.strip().replace("_", "").replace(",", ""))
    count = float(match[1]) * SUFFIXES[match[2].lower()] if match else 0.0
    if not 0 < count < 1e24:
        what, fix = templated("'{tokens}' is not a number of tokens", tokens=tokens), "write 300B, 1T or 15e12"
        raise UserError("A013", what, where="--tokens", fix=fix)
    return CostTerms(tokens=count, price=price, mtbf_hours=mtbf)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """The cost of a plan: goodput if the failure rate is given, a bill if the tokens are."""

    terms: CostTerms
    goodput: Goodput | None
    bill: Bill | None

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The cost as rows of a table: name and text."""
        rows = []
        if good := self.goodput:
            save = "never save" if math.isinf(good.interval) else f"save every {show_seconds(good.interval)}"
            lost = ", ".join(f"{name} take {fraction:.1%}" for name, fraction in good.lost.items() if fraction)
            assumed = (
                f"a node writes {NODE_DISK_BANDWIDTH / 1e9:g} GB/s, a restart takes {show_seconds(RESTART_SECONDS)}"
            )
            if good.fraction > 0:
                rows.append(("goodput", f"{good.fraction:.1%} of the time: {save}; {lost} (assumed: {assumed})"))
            else:
                rows.append(("goodput", f"the run would never end: failures come faster than it recovers ({assumed})"))
        if bill := self.bill:
            days = f"{bill.days:,.1f} days for {show_count(self.terms.tokens or 0)} tokens"
            cost = "" if self.terms.price is None else f", {bill.cost:,.0f} at {self.terms.price:g} an hour"
            rows.append(("bill", f"{days}, {show_count(bill.device_hours)} GPU hours{cost}"))
        return rows

    def as_dict(self) -> dict[str, Any]:
        """Return the keys of `--json`; None for what was not requested."""
        bill: dict[str, Any] = asdict(self.bill) if self.bill else {}
        if bill and self.terms.price is None:
            bill["cost"] = None
        good: dict[str, Any] = asdict(self.goodput) if self.goodput else {}
        if good:
            assumed = {"restart_seconds": RESTART_SECONDS, "node_disk_bytes_per_second": NODE_DISK_BANDWIDTH}
            good = {"share": good.pop("fraction")} | good  # the key of `--json`
            interval = good["interval"] if math.isfinite(good["interval"]) else None  # JSON has no infinity
            good |= {"interval": interval, "assumed": assumed}
        return {"goodput": good or None, "bill": bill or None}


def run_cost_of(plan: Plan, question: Question, cluster: Cluster, terms: CostTerms) -> RunCost:
    """Return the cost of a run with the plan on `cluster`; empty if the plan has no prediction."""
    found, goodput, bill = plan.prediction, None, None
    if found and terms.mtbf_hours is not None and question.outline:
        moments = question.job.state_bytes
        states = checkpoint_bytes(question.outline.trained_parameters, moment_bytes=moments)
        write = write_seconds(states, disk_bandwidth=NODE_DISK_BANDWIDTH * cluster.num_nodes)
        faults = Faults(device_hours=terms.mtbf_hours, restart=RESTART_SECONDS)
        goodput = expected_goodput(faults, cluster.world_size, write=write, step=found.step_seconds)
    share = goodput.fraction if goodput else 1.0
    if found and terms.tokens is not None and share > 0:
        bill = bill_of(terms.tokens, found.tokens_per_second, num_devices=cluster.world_size,
                       hour_price=terms.price or 0.0, goodput=share)  # fmt: skip
    return RunCost(terms=terms, goodput=goodput, bill=bill)


def show_slower(times: float) -> str:
    """Return a ratio of step times as text."""
    if 0.995 < times < 1.005:
        return "as fast"
    return f"{times:.2g} times slower" if times > 1.5 else f"{abs(times - 1):.0%} {'slower' if times > 1 else 'faster'}"


def slower(plan: Plan, best: Plan) -> float:
    """Return how many times as long a step of `plan` takes as one of `best`."""
    return plan.prediction.step_seconds / best.prediction.step_seconds if plan.prediction and best.prediction else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerPlan:
    """The best plan that our trainer runs, its command, why it does not run the best plan, and how much that costs."""

    plan: Plan
    command: str
    refusal: UserError
    slower: float

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {**plan_tree(self.plan), "next": self.command, "refusal": self.refusal.as_dict(), "slower": self.slower}

    def __str__(self) -> str:
        why = f"`trimaran train` does not run the plan above ({self.refusal.code}: {self.refusal.what})"
        return f"{self.command}\n      {self.plan}, {show_slower(self.slower)}: {why}"


def trainer_plan(best: Plan, answer: PlanAnswer, arguments: Sequence[str]) -> TrainerPlan | None:
    """Return the plan that `train` would choose; None if it runs `best`, cannot train, or that is not known."""
    question, cluster = answer.question, answer.cluster
    if question.facts is None or question.facts.untrainable is not None:
        return None
    inputs = (question.recipe, question.spec, cluster, question.outline, question.facts)
    try:
        check_plan(best, *inputs)
    except UserError as error:
        refusal = error
    else:
        return None
    try:
        plan = choose(*inputs)
    except UserError:
        return None
    command = shlex.join([*start_command(cluster), "train", *arguments])
    return TrainerPlan(plan=plan, command=command, refusal=refusal, slower=slower(plan, best))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """A request with its answer, the plan as files of a tool, and the fastest measured plan for the question."""

    request: PlanRequest
    answer: PlanAnswer
    terms: CostTerms
    emitted: "EmittedPlan | None" = None
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
        """The command that starts the plan; '' without a plan."""
        if self.emitted and self.emitted.folder:
            return self.emitted.command
        if self.best is None:
            return ""
        answer, request = self.answer, self.request
        if not _trains_here(self.best, answer):  # a tool that supports the plan gets it
            words = [*request.arguments, *(["--set", f"cluster={answer.part}"] if answer.part else [])]
            return shlex.join([program_name(), "plan", *words, "--emit", _tool_for(self.best, answer)[0]])
        file = [request.file] if request.file else []
        settings = [word for each in run_settings(request, answer, self.best) for word in ("--set", each)]
        return shlex.join([*start_command(answer.cluster), "train", *file, *settings])

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
        if self.best is None or (self.emitted and self.emitted.folder) or _trains_here(self.best, self.answer):
            return ""
        return _tool_for(self.best, self.answer)[1]


def build_plan_report(request: PlanRequest, terms: CostTerms, *, tool: str | None) -> PlanReport:
    """Search the plans and return the answer, as config files of `tool` if one is named."""
    question, emitted = replace(request.question, mtbf_hours=terms.mtbf_hours), None
    if tool is None:
        # What our trainer can do with a Hugging Face model decides which plans there are.
        facts, unknown = ask_hf_facts(question.recipe.model, os.environ)
        trains = question.for_trainer and not (facts and facts.untrainable)
        found, warnings = search(replace(question, facts=facts, for_trainer=trains)), []
        if unknown:
            warnings.append(f"which plans `trimaran train` runs for this model is not known: {unknown}")
        try:
            check_hf_facts(Plan(), question.recipe, facts)
        except UserError as error:
            warnings.append(f"`trimaran train` refuses this with any plan: {error.code}: {error.what}; {error.fix}")
        answer = replace(found, warnings=(*found.warnings, *warnings))
    else:
        from trimaran.app.plan.other_tools import search_for_tool

        answer, emitted = search_for_tool(tool, question)
    report = PlanReport(request=request, answer=answer, terms=terms, emitted=emitted)
    if report.best and tool is None and answer.question.facts is not None:
        report = replace(report, trainer=trainer_plan(report.best, answer, request.arguments))
    if question.goal != "goodput" or report.best is None or question.outline is None:
        return report
    from trimaran.planner.reliability import reliability_of

    return replace(report, reliability=reliability_of(report.best, question, answer.cluster))


def with_files(report: PlanReport, folder: Path | None, *, force: bool) -> PlanReport:
    """Write the tool's config files, if any, and return the report with their folder."""
    if report.emitted is None:
        return report
    from trimaran.app.plan.other_tools import write_files

    return replace(report, emitted=write_files(report.emitted, folder or Path(report.emitted.tool), force=force))


def with_goal(request: PlanRequest, goal: str) -> PlanRequest:
    """Return the request with another goal."""
    for name in GOALS:
        if name == goal:
            return replace(request, question=replace(request.question, goal=name))
    raise UserError("A013.no-goal", where="--goal", goal=goal, guess=did_you_mean(goal, GOALS), goals=", ".join(GOALS))


def with_top(request: PlanRequest, top: int) -> PlanRequest:
    """Return the request for at least `top` plans; never fewer than the default, since a tool may need a later one."""
    return replace(request, question=replace(request.question, max_plans=max(top, request.question.max_plans)))


def as_dict(report: PlanReport, *, top: int) -> dict[str, Any]:
    """Return what `--json` prints: everything that is shown, and every term of every plan."""
    answer, question, cost = report.answer, report.request.question, report.cost
    best = plan_tree(report.best) if report.best else {"plan": None, "prediction": None}
    model, measured = None, None
    if outline := question.outline:
        adapter, trained = question.recipe.model.adapter, outline.trained_parameters
        model = {"name": outline.name, "parameters": outline.num_parameters, "trained_parameters": trained,
                 "adapter": adapter.model_dump(mode="json") if adapter else None}  # fmt: skip
    if found := report.measured:
        measured = found.as_dict() | {"plan": found.plan.model_dump(mode="json"), "error": found.error}
        measured |= {"is_best": report.is_measured, "next": report.measured_command or None}
    tree = {
        "name": question.recipe.name,
        "model": model,
        "cluster": str(answer.cluster),
        "goal": question.goal,
        "seq_len": question.recipe.data.seq_len,
        "global_batch": question.recipe.train.global_batch,
        "rows": asdict(question.rows) if question.rows else None,
        "fits": bool(answer.ranked),
        **best,
        "ranked": [plan_tree(plan) for plan in answer.ranked[:top]],
        "ties": [plan_tree(tie.plan) | {"why": tie.why} for tie in answer.ties],
        "misses": [plan_tree(miss.plan) | {"why": miss.why} for miss in answer.misses],
        "pareto": [plan_tree(plan) for plan in pareto_set([plan for plan, _ in all_plans(report)])],
        "choices": list(answer.choices),
        "hints": list(answer.hints),
        "warnings": list(answer.warnings),
        "num_considered": answer.num_considered,
        "missing_bytes": answer.missing_bytes,
        "smallest_cluster": str(answer.smallest) if answer.smallest else None,
        **(cost.as_dict() if cost else {"goodput": None, "bill": None}),
        "reliability": asdict(report.reliability) if report.reliability else None,
        "measured": measured,
        "emission": report.emitted.as_dict() if report.emitted and report.emitted.folder else None,
        "next": report.next_command or None,
        "caution": report.caution or None,
        "trainer": report.trainer.as_dict() if report.trainer else None,
    }
    return tree if answer.ranked else tree | {"error": no_fit_error(answer).as_dict()}


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
    from trimaran.app.plan.other_tools import refusal_by
    from trimaran.planner.emit import EMITTERS

    refusals: dict[str, UserError] = {}
    for tool in EMITTERS:
        if (error := refusal_by(tool, best, answer.question)) is None:
            return tool, ""
        refusals[tool] = error
    tools = [tool for tool, error in refusals.items() if error.code != "P062"] or list(EMITTERS)
    why = "no tool supports this plan"
    for plan in answer.ranked:
        for tool in tools:
            if refusal_by(tool, plan, answer.question) is None:
                speed = show_slower(slower(plan, best))
                return tool, f"{why}: {refusals[tool].what}; the best of these that it supports is {speed}"
    return tools[0], f"{why}: {refusals[tools[0]].what}; it gets another plan, and the output says how much slower"


def pinned_recipe_text(recipe: Recipe, plan: Plan, *, header: str, data: Mapping[str, Any] | None = None) -> str:
    """Return the fields that the user has set as YAML, with every field of the plan pinned, and `data` changed."""
    from trimaran.planner.measure.run_index import pins_of

    tree: dict[str, Any] = recipe.model_dump(mode="json", exclude_unset=True, exclude={"plan"})
    if data:
        tree.setdefault("data", {}).update(data)
    tree = _without_empty(tree) | {"plan": pins_of(plan)}
    return f"{header}\n{yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)}"


def _without_empty(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree without fields that say nothing. Where paths are made absolute, missing ones are set to null."""
    smaller = {name: _without_empty(each) if isinstance(each, dict) else each for name, each in tree.items()}
    return {name: each for name, each in smaller.items() if each not in (None, [], {})}
