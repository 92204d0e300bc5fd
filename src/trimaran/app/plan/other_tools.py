"""Other tools: writes the best plan as their config files, and reads pins of a plan from those."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel

from trimaran.app.plan.plan_answer import show_slower, slower
from trimaran.app.recipe.plan_request import PlanRequest, read_plan_request
from trimaran.core import Plan, Recipe, UserError
from trimaran.cost import STACKS
from trimaran.machine import Cluster
from trimaran.planner import EMITTERS, PlanAnswer, Question, ReadConfig, search
from trimaran.planner.emit import Emission, emit

STACK_NAMES = {"accelerate": "hf", "hf-trainer": "hf"}  # the other tools have the name of their stack
# Alternatives to a value that a tool does not support. Other fields fall back to their default.
ALTERNATIVES = {
    "sharding": ["parameters", "gradients", "optimizer", "none"],
    "precision": ["bf16"],
    "recompute": ["none", "full"],
}
BATCH = "train.global_batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerBy:
    """Why a tool cannot run the best plan, and how many times as long a step of its plan takes."""

    why: str
    times: float

    def __str__(self) -> str:
        return f"{self.why}; this one is {show_slower(self.times)}"

    def as_dict(self) -> dict[str, Any]:
        return {"why": self.why, "times_slower": self.times}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmittedPlan:
    """A plan as config files of a tool, their folder once they are written, and the loss if it is not the best plan."""

    tool: str
    plan: Plan
    emission: Emission
    loss: SlowerBy | None = None
    folder: Path | None = None

    @property
    def files(self) -> list[str]:
        return [str(self.folder / name) for name in self.emission.files] if self.folder else []

    @property
    def command(self) -> str:
        """The command that starts the tool with the files."""
        return f"cd {shlex.quote(str(self.folder))} && {self.emission.command}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "tool": self.tool,
            "plan": self.plan.model_dump(mode="json"),
            "files": self.files,
            "command": self.command,
            "notes": list(self.emission.notes),
            "loss": self.loss.as_dict() if self.loss else None,
        }


def search_for_tool(tool: str, question: Question) -> tuple[PlanAnswer, EmittedPlan | None]:
    """Return the answer for the stack of `tool`, and the best plan that the tool supports; None if nothing fits."""
    if tool not in EMITTERS:
        emit(tool, Plan(), question)  # raises: there is no such tool
    tool_question = replace(question, stack=STACKS[STACK_NAMES.get(tool, tool)], for_trainer=False)
    first = search(tool_question)
    answer, emitted = _best_supported(tool, tool_question, first)
    if emitted and (error := refusal_by(tool, first.ranked[0], first.question)):
        emitted = replace(emitted, loss=SlowerBy(why=error.what, times=slower(emitted.plan, first.ranked[0])))
    return answer, emitted


def refusal_by(tool: str, plan: Plan, question: Question) -> UserError | None:
    """Return why the tool does not support the plan; None if it does."""
    try:
        emit(tool, plan, question)
    except UserError as error:
        return error
    return None


def _best_supported(tool: str, question: Question, answer: PlanAnswer) -> tuple[PlanAnswer, EmittedPlan | None]:
    refusal = None
    for plan in answer.ranked:
        try:
            return answer, EmittedPlan(tool=tool, plan=plan, emission=emit(tool, plan, question))
        except UserError as error:
            refusal = refusal or error
    if refusal is None:
        return answer, None
    # Pin the field that the tool refuses to another value, and search the rest again.
    found: list[tuple[PlanAnswer, EmittedPlan]] = []
    for other in _without(question, refusal):
        with suppress(UserError):  # the first refusal is the one to show
            other_answer, emitted = _best_supported(tool, other, search(other))
            found += [(other_answer, emitted)] if emitted else []
    if not found:
        raise refusal
    return min(found, key=lambda each: each[1].plan.prediction.step_seconds if each[1].plan.prediction else 0.0)


def _without(question: Question, refusal: UserError) -> Iterator[Question]:
    """Yield the question with the refused field pinned to each alternative, unless the user pinned it."""
    section, *path = refusal.where.split(".")
    if section != "plan" or not path:
        return
    field, pins = ".".join(path), question.pins
    for value in ALTERNATIVES.get(field, [attrgetter(field)(Plan())]):
        tree = pins.model_dump(exclude_unset=True)
        here = tree
        for part in path[:-1]:
            here = here.setdefault(part, {})
        if path[-1] in here or isinstance(value, BaseModel):
            return
        here[path[-1]] = value
        plan = Plan.model_validate(tree)
        yield replace(question, recipe=question.recipe.model_copy(update={"plan": plan}))


def write_files(emitted: EmittedPlan, folder: Path, *, force: bool) -> EmittedPlan:
    """Write the files to `folder`, and return the plan with it. Existing files are overwritten only with `force`."""
    paths = {folder / name: text for name, text in emitted.emission.files.items()}
    existing = [path for path in paths if path.exists() or path.is_symlink()]
    if existing and not force:
        raise UserError("A014.already-exists", where=str(existing[0]), existing=existing[0].name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            "A015.files-cannot-written", where=str(folder), tool=emitted.tool, reason=error.strerror
        ) from None
    return replace(emitted, folder=folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFile:
    """A file of accelerate or DeepSpeed, and what it says."""

    path: Path
    found: ReadConfig

    def mismatch(self, cluster: Cluster) -> str:
        """Return how the file's number of processes differs from the cluster; "" if it does not."""
        asked = self.found.num_devices
        differs = asked and asked != cluster.world_size
        return f"num_processes {asked}: the cluster {cluster} has {cluster.world_size} devices" if differs else ""

    def settings(self, cluster: Cluster) -> list[str]:
        """Return the pins as values of `--set`."""
        return settings_of_pins(self.found.pins_on(cluster.world_size))

    def as_dict(self, cluster: Cluster) -> dict[str, Any]:
        """Return the translation for `--json`."""
        about = {"file": str(self.path), "settings": self.settings(cluster), "mismatch": self.mismatch(cluster) or None}
        return about | self.found.as_dict()


def with_pins(
    tool_file: ToolFile, what: str | None, shortcuts: Mapping[str, object], settings: Sequence[str]
) -> PlanRequest:
    """Return the request for `what` with the file's pins, which `shortcuts` override; see `read_plan_request`."""
    given = {name: value for name, value in shortcuts.items() if value is not None}
    found = tool_file.found
    request = read_plan_request(what, found.pins | given, settings)
    num_devices = request.question.cluster.world_size
    pins = found.pins_on(num_devices)
    is_given = BATCH in given or any(each.partition("=")[0] == BATCH for each in settings)
    usual = found.usual_batch_on(num_devices, request.question.recipe.data.seq_len)
    if usual and request.file is None and not is_given and BATCH not in pins:
        pins[BATCH] = usual
    return request if pins == found.pins else read_plan_request(what, pins | given, settings)


def show_tool_file(tool_file: ToolFile, cluster: Cluster, recipe: Recipe) -> None:
    """Print the translation of a file, which is part of `recipe`."""
    found = tool_file.found
    typer.echo(f"{tool_file.path} ({found.tool}), as pins of the plan:")
    rows = [
        (each.text, " ".join(f"--set {pair}" for pair in settings_of_pins(each.pins)))
        for each in found.fields
        if each.pins
    ]
    width = max((len(text) for text, _ in rows), default=0)
    for text, pins in rows:
        typer.echo(f"  {text:{width}}  {pins}")
    for name, value in found.pins_on(cluster.world_size).items():
        if found.pins.get(name) != value:
            typer.echo(f"  {f'on {cluster}':{width}}  --set {name}={value}")
    batch = recipe.train.global_batch
    if batch == found.usual_batch_on(cluster.world_size, recipe.data.seq_len):
        typer.echo(f"  {'no micro-batch in the file: a usual one':{width}}  --set train.global_batch={batch}")
    if found.left_out or tool_file.mismatch(cluster):
        typer.echo("left out:")
    for each in found.left_out:
        typer.echo(f"  {each.text}: {each.why}")
    if mismatch := tool_file.mismatch(cluster):
        typer.echo(f"  {mismatch}")
    typer.echo("")


def settings_of_pins(pins: Mapping[str, object]) -> list[str]:
    """Return the pins as values of `--set`."""
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in pins.items()]
