"""What the workshop asks the planner, and the texts to copy. `PlanInputs.plan_words` are those of the same command."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from trimaran.app import (
    PlanReport,
    PlanRequest,
    adapter_setting,
    all_plans,
    build_plan_report,
    complete_setting,
    pinned_recipe_text,
    preview_options,
    read_cost_terms,
    read_plan_request,
    read_recipe,
    run_settings,
    with_goal,
    with_top,
)
from trimaran.core import Plan, TemplateText, UserError, show_count
from trimaran.launch import open_target
from trimaran.models import PRESETS, VLM_PRESETS
from trimaran.planner import NearMiss, PlanAnswer, Question, check_question, predicted, reason_lost, too_big
from trimaran.ui.web.runs_root import RecentValues

MAX_MICRO_BATCHES = 4  # for each plan: as it is, and smaller ones if it does not divide the batch


def price_known_plans(question: Question, last: PlanReport) -> PlanAnswer | None:
    """Return the plans of the last answer for another question, the fastest first; None if none of them fits."""
    question = replace(question, facts=last.answer.question.facts, for_trainer=last.answer.question.for_trainer)
    if question.outline is None or question.cluster.groups:
        return None
    plans = {str(plan): plan for each, _ in all_plans(last) for plan in _fitted(each, question)}
    legal = []
    for plan in plans.values():
        with suppress(UserError):
            check_question(plan, question)
            legal.append(plan)
    priced = [predicted(plan, question) for plan in legal]
    fitting = sorted(
        (each for each in priced if each.prediction and each.prediction.fits),
        key=lambda plan: plan.prediction.step_seconds if plan.prediction else 0.0,
    )
    if not fitting:
        return None
    large = [each for each in priced if each.prediction and not each.prediction.fits]
    reasons = ((each, reason_lost(fitting[0], each, question) or TemplateText()) for each in fitting[1:])
    misses = [NearMiss(plan=plan, why=why) for plan, why in reasons]
    misses += [NearMiss(plan=each, why=too_big(each.prediction, question.cluster)) for each in large if each.prediction]
    return PlanAnswer(question=question, ranked=tuple(fitting), misses=tuple(misses), num_considered=len(priced))


def _fitted(plan: Plan, question: Question) -> Iterator[Plan]:
    """Yield the plan with the pins, for as many ranks as the cluster has, and with the batch of the recipe."""
    pins = question.pins
    changed = {name: getattr(pins, name) for name in pins.model_fields_set & _SIMPLE}
    mesh, ranks = plan.mesh, question.cluster.world_size
    rest = mesh.world_size // (mesh.dp_replicate * mesh.dp_shard)
    if ranks % rest:
        return
    data = ranks // rest
    replicas = 1 if mesh.dp_shard > 1 and data % mesh.dp_replicate else mesh.dp_replicate
    shape = {"dp_replicate": replicas, "dp_shard": data // replicas} if mesh.dp_shard > 1 else {"dp_replicate": data}
    mesh = mesh.model_copy(update=shape)  # with more or fewer data ranks
    if any(getattr(mesh, axis) != getattr(pins.mesh, axis) for axis in pins.mesh.model_fields_set):
        return
    batch = question.recipe.train.global_batch
    size = plan.micro_batch
    sizes = [size >> power for power in range(MAX_MICRO_BATCHES) if size >> power]
    if "micro_batch" in pins.model_fields_set:
        sizes = [pins.micro_batch]
    for size in sizes:
        if batch % (size * mesh.dp) == 0:
            accumulation = batch // (size * mesh.dp)
            yield plan.model_copy(update={**changed, "mesh": mesh, "micro_batch": size, "grad_accum": accumulation,
                                          "pipeline": plan.pipeline.model_copy(update={"stages": ()})})  # fmt: skip
            return


_SIMPLE = {"sharding", "precision", "recompute", "offload", "loss", "compile"}


TOP = 12  # plans in the answer
NO_TERMS = read_cost_terms(tokens=None, price=None, mtbf=None)
MAX_KEPT = 64  # answers in memory
RECIPES = Path("recipes")
HEADER = "# Written by the workshop of `trimaran ui`"
THIS_MACHINE = "auto"
NODES = ("1", "2", "4", "8", "16", "32", "64", "128")
DEVICES_PER_NODE = ("1", "2", "4", "8")
LENGTHS = tuple(str(2**power) for power in range(8, 18))
BATCHES = tuple(str(2**power) for power in range(14))
STEPS = ("10", "30", "100", "300", "1000", "3000", "10000", "100000")
DEGREES = ("1", "2", "4", "8", "16", "32", "64")
# Fields of the plan that can be pinned, with the values that are offered; those without come from the recipe's schema.
PIN_VALUES: Mapping[str, Sequence[str]] = {
    "mesh.dp_replicate": DEGREES,
    "mesh.dp_shard": DEGREES,
    "mesh.tp": DEGREES[:4],
    "mesh.pp": DEGREES[:5],
    "mesh.cp": DEGREES[:4],
    "mesh.ep": DEGREES[:4],
    "micro_batch": DEGREES[:6],
    "sharding": (),
    "precision": (),
    "recompute": ("none", "elementwise", "selective", "full"),
    "offload": (),
    "pipeline.schedule": (),
}
Pins = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What the user has chosen. `what` is a preset or the file of a recipe; 0 and "" are left to the command."""

    what: str = "llama-3.1-8b"
    device: str = "H100"
    nodes: int = 2
    devices: int = 8
    seq_len: int = 4096
    global_batch: int = 256
    goal: str = "throughput"
    adapter: str = ""
    steps: int = 0
    pins: Pins = ()

    @property
    def cluster(self) -> str:
        if self.device == THIS_MACHINE:
            return THIS_MACHINE
        nodes = f"{self.nodes}x" if self.nodes > 1 else ""
        return f"{nodes}{self.devices}x{self.device}"

    @property
    def shortcuts(self) -> dict[str, object]:
        return {
            "cluster": self.cluster,
            "data.seq_len": self.seq_len or None,
            "train.global_batch": self.global_batch or None,
        }

    @property
    def settings(self) -> list[str]:
        adapter = [adapter_setting(self.adapter)] if self.adapter else []
        steps = [f"train.steps={self.steps}"] if self.steps else []
        return [*adapter, *steps, *(f"plan.{field}={value}" for field, value in self.pins)]

    @property
    def plan_words(self) -> list[str]:
        """The arguments of `trimaran` that give the same answer."""
        numbers = {"--seq-len": self.seq_len, "--global-batch": self.global_batch}
        options = [word for name, value in numbers.items() if value for word in (name, str(value))]
        options += ["--adapter", self.adapter] if self.adapter else []
        options += ["--goal", self.goal] if self.goal != "throughput" else []
        settings = [word for each in self.settings if not each.startswith("model.adapter") for word in ("--set", each)]
        return ["plan", self.what, "--cluster", self.cluster, *options, "--top", str(TOP), *settings]

    @property
    def command(self) -> str:
        return shlex.join(["trimaran", *self.plan_words])

    def with_pin(self, field: str, value: str) -> "PlanInputs":
        others = {name: pinned for name, pinned in self.pins if name != field}
        return replace(self, pins=tuple(sorted((others | ({field: value} if value else {})).items())))

    def with_plan(self, plan: Plan) -> "PlanInputs":
        """Return the inputs with all fields of the mesh, and those that differ from the simplest plan, pinned."""
        mesh = {f"mesh.{axis}": str(degree) for axis, degree in plan.mesh.model_dump().items()}
        fields = {"micro_batch": plan.micro_batch, "sharding": plan.sharding, "precision": plan.precision,
                  "recompute": plan.recompute, "offload": plan.offload}  # fmt: skip
        found = mesh | {name: str(value) for name, value in fields.items()}
        found |= {"pipeline.schedule": plan.pipeline.schedule} if plan.mesh.pp > 1 else {}
        return replace(self, pins=tuple(sorted((name, value) for name, value in found.items() if name in PIN_VALUES)))


class PlanDesk:
    """Answers questions, and keeps the last answers: a slider that is moved back answers at once."""

    def __init__(self) -> None:
        self._kept = RecentValues[PlanInputs, PlanReport](MAX_KEPT)

    def find(self, inputs: PlanInputs) -> PlanReport | None:
        """Return the answer if it is known already."""
        kept = self._kept.get(inputs)
        return kept[1] if kept is not None and kept[0] == _version(inputs.what) else None

    def answer(self, inputs: PlanInputs) -> PlanReport:
        """Return what `trimaran plan` answers; raise UserError as it does."""
        if (kept := self.find(inputs)) is not None:
            return kept
        refuse_unknown_model(inputs.what)
        report = search_plans(inputs)
        self._kept.add(inputs, _version(inputs.what), report)
        return report


def search_plans(inputs: PlanInputs) -> PlanReport:
    return build_plan_report(_request(inputs), NO_TERMS, tool=None)


def first_answer(inputs: PlanInputs, last: PlanReport) -> PlanReport | None:
    """Return the plans of the last answer for these inputs, within milliseconds; None if none of them fits."""
    refuse_unknown_model(inputs.what)
    request = _request(inputs)
    answer = price_known_plans(request.question, last)
    return PlanReport(request=request, answer=answer, terms=NO_TERMS) if answer is not None else None


def _request(inputs: PlanInputs) -> PlanRequest:
    request = read_plan_request(inputs.what, inputs.shortcuts, inputs.settings)
    return with_top(with_goal(request, inputs.goal), TOP)


@cache
def pin_values(field: str) -> tuple[str, ...]:
    if values := PIN_VALUES[field]:
        return tuple(values)
    prefix = f"plan.{field}="
    return tuple(each.removeprefix(prefix) for each in complete_setting(prefix))


def model_options() -> dict[str, str]:
    recipes = {str(path): str(path) for path in recipe_files()}
    presets: dict[str, str] = {}
    for name, spec in (*PRESETS.items(), *VLM_PRESETS.items()):
        presets[name] = f"{name} ({show_count(spec.num_parameters)})"
    return recipes | presets


def recipe_files() -> list[Path]:
    """Return the recipes in the folder `recipes` where the command was started; links are left out."""
    if not RECIPES.is_dir():
        return []
    return sorted(path for path in RECIPES.glob("*.y*ml") if path.is_file() and not path.is_symlink())


def refuse_unknown_model(what: str) -> None:
    """Raise unless it is one of those that are offered: a page names no other file."""
    if what not in PRESETS and what not in VLM_PRESETS and Path(what) not in recipe_files():
        raise UserError("W006.not-model-recipe", where="workshop", text=what[:80])


def recipe_text(report: PlanReport) -> str:
    """Return the recipe that trains the best plan: what was chosen, with the plan pinned."""
    best = _best(report)
    recipe = report.request.question.recipe
    cluster = str(report.answer.part) if report.answer.part else recipe.cluster
    return pinned_recipe_text(recipe.model_copy(update={"cluster": cluster}), best, header=HEADER)


def launch_words(report: PlanReport, target: str) -> list[str]:
    settings = [word for each in run_settings(report.request, report.answer, _best(report)) for word in ("--set", each)]
    file = [report.request.file] if report.request.file else []
    site = [word for each in preview_options(open_target(target)).site for word in ("--site", each)]
    return ["launch", *file, *settings, "--on", target, *site, "--dry-run"]


def launch_text(report: PlanReport, target: str) -> str:
    from trimaran.app.train.launch_answer import preview_launch

    settings = run_settings(report.request, report.answer, _best(report))
    found = open_target(target)
    files = preview_launch(found, report.request.file, settings, preview_options(found))
    return files.files[files.main]


def _best(report: PlanReport) -> Plan:
    if report.best is None:
        raise UserError("W006.no-plan-fits", where="workshop")
    return report.best


def _version(what: str) -> tuple[int, ...]:
    try:
        return (os.stat(what).st_mtime_ns,) if what.endswith((".yaml", ".yml")) else ()
    except OSError:
        return ()


def with_sizes(inputs: PlanInputs) -> PlanInputs:
    if (spec := PRESETS.get(inputs.what)) is not None:
        return replace(inputs, seq_len=min(inputs.seq_len, spec.max_seq_len or inputs.seq_len))
    if inputs.what in VLM_PRESETS:
        return inputs
    refuse_unknown_model(inputs.what)
    recipe = read_recipe(inputs.what, [])
    return replace(
        inputs, seq_len=recipe.data.seq_len, global_batch=recipe.train.global_batch, steps=recipe.train.steps
    )


def with_value(options: Sequence[str], value: int) -> list[str]:
    """Return the numbers of a slider with one that may not be among them."""
    return sorted({*options, str(value)}, key=int)
