"""A plan written for another tool: the best that the tool can express, as files in a folder."""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trimaran.core import Plan, UserError
from trimaran.cost import STACKS
from trimaran.planner import PlanAnswer, Question, search
from trimaran.planner.emit import EMITTERS, Emission, emit

PROFILE = {"accelerate": "hf", "hf-trainer": "hf"}  # the other tools are stacks themselves
# What a field may be instead of a value that a tool lacks; any other is switched off.
OTHERS = {
    "sharding": ["parameters", "gradients", "optimizer", "none"],
    "precision": ["bf16"],
    "recompute": ["none", "full"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowerBy:
    """Why a tool cannot have the best plan, and how many times as long a step takes with the one that it has."""

    why: str
    times: float

    def __str__(self) -> str:
        return f"{self.why}; this one is {show_slower(self.times)}"

    def as_dict(self) -> dict[str, Any]:
        return {"why": self.why, "times_slower": self.times}


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A plan in the words of a tool, and what is lost where that is not the best plan."""

    tool: str
    plan: Plan
    emission: Emission
    loss: SlowerBy | None = None


def search_for(tool: str, question: Question) -> tuple[PlanAnswer, Form | None]:
    """Return the answer by the profile of `tool`, and its best plan that the tool can express; None where nothing fits.

    Where the tool can express none of them, the field that it refuses is pinned to something else and the rest is
    searched again.
    """
    if tool not in EMITTERS:
        emit(tool, Plan(), question)  # says so
    asked = replace(question, stack=STACKS[PROFILE.get(tool, tool)], trains=False)
    first = search(asked)
    answer, form = _expressed(tool, asked, first)
    return answer, replace(form, loss=_loss(form, first)) if form else None


def show_slower(times: float) -> str:
    """Return a ratio of step times in words."""
    if 0.995 < times < 1.005:
        return "as fast"
    return f"{times:.2g} times slower" if times > 1.5 else f"{abs(times - 1):.0%} {'slower' if times > 1 else 'faster'}"


def slower(plan: Plan, best: Plan) -> float:
    """Return how many times as long a step of `plan` takes as one of `best`."""
    return plan.prediction.step_seconds / best.prediction.step_seconds if plan.prediction and best.prediction else 1.0


def refused(tool: str, plan: Plan, question: Question) -> UserError | None:
    """Return why the tool cannot express the plan; None where it can."""
    try:
        emit(tool, plan, question)
    except UserError as error:
        return error
    return None


def _loss(form: Form, first: PlanAnswer) -> SlowerBy | None:
    best = first.ranked[0]
    error = refused(form.tool, best, first.question)
    return SlowerBy(why=error.what, times=slower(form.plan, best)) if error else None


def _expressed(tool: str, question: Question, answer: PlanAnswer) -> tuple[PlanAnswer, Form | None]:
    refusal = None
    for plan in answer.ranked:
        try:
            return answer, Form(tool=tool, plan=plan, emission=emit(tool, plan, question))
        except UserError as error:
            refusal = refusal or error
    if refusal is None:
        return answer, None
    found: list[tuple[PlanAnswer, Form]] = []
    for other in _without(question, refusal):
        with suppress(UserError):  # what the tool refuses first is what a person should hear of
            told, form = _expressed(tool, other, search(other))
            found += [(told, form)] if form else []
    if not found:
        raise refusal
    return min(found, key=lambda each: each[1].plan.prediction.step_seconds if each[1].plan.prediction else 0.0)


def _without(question: Question, refusal: UserError) -> Iterator[Question]:
    """Yield the question with the refused field pinned to what else it may be, unless it is pinned already."""
    room, *path = refusal.where.split(".")
    if room != "plan" or not path:
        return
    field, pins = ".".join(path), question.pins
    for value in OTHERS.get(field, [attrgetter(field)(Plan())]):
        tree = pins.model_dump(exclude_unset=True)
        here = tree
        for part in path[:-1]:
            here = here.setdefault(part, {})
        if path[-1] in here or isinstance(value, BaseModel):
            return
        here[path[-1]] = value
        plan = Plan.model_validate(tree)
        yield replace(question, recipe=question.recipe.model_copy(update={"plan": plan}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The files of a form, and how the tool is started with them."""

    form: Form
    folder: Path

    @property
    def files(self) -> list[str]:
        return [str(self.folder / name) for name in self.form.emission.files]

    @property
    def command(self) -> str:
        return f"cd {shlex.quote(str(self.folder))} && {self.form.emission.command}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "tool": self.form.tool,
            "plan": self.form.plan.model_dump(mode="json"),
            "files": self.files,
            "command": self.command,
            "notes": list(self.form.emission.notes),
            "loss": self.form.loss.as_dict() if self.form.loss else None,
        }


def write(form: Form, folder: Path, *, force: bool) -> Written:
    """Write the files of `form` under `folder`, all or none; only with `force` over others."""
    paths = {folder / name: text for name, text in form.emission.files.items()}
    taken = [path for path in paths if path.exists() or path.is_symlink()]
    if taken and not force:
        raise UserError("A014", f"{taken[0].name} is there already", where=str(taken[0]),
                        fix="choose another folder with --output DIR, or add --force to write over it")  # fmt: skip
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in paths.items():
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError("A015", f"the files for {form.tool} cannot be written: {error.strerror}", where=str(folder),
                        fix="choose a folder that you may write to with --output DIR") from None  # fmt: skip
    return Written(form=form, folder=folder)
