"""The commands that answer what a page shows, ready to copy."""

import shlex
from typing import Any

from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.runs.run_prompt import generate_command
from trimaran.app.runs.run_state import ACTIVE_STATUSES, RunState

Tree = dict[str, Any]
ALWAYS = (
    ("follow it in a terminal", ("watch", "{run}")),
    ("diagnose it", ("doctor", "{run}")),
    ("list its incidents", ("incidents", "{run}")),
    ("list the decisions of the autopilot", ("decisions", "{run}")),
    ("list its checkpoints", ("checkpoints", "{run}")),
    ("read every checkpoint file and check it", ("checkpoints", "verify", "{run}")),
    ("write the report, one HTML file", ("report", "{run}")),
    ("print everything on this page as JSON", ("report", "{run}", "--json")),
    ("what fits, with what the run measured", ("viz", "need", "--run", "{run}")),
)
LIVE = (("change the plan while it trains", ("replan", "{run}")), ("profile it", ("profile", "{run}")))


def commands_of(state: RunState) -> list[Tree]:
    """Return what each command is for, and the command; the most useful for the run's status come first."""
    run, recipe = path_argument(state.run.path), path_argument(state.run.recipe)
    first: list[tuple[str, tuple[str, ...]]] = []
    if state.status in ACTIVE_STATUSES:
        first += LIVE
    elif state.status == "done":
        if state.events_of_kind("saved"):
            generate = generate_command(state.recipe, run)
            first += [("try the trained model", tuple(generate[1:]))] if generate else []
            first.append(("export the trained model", ("export", "{run}")))
        longer = f"train.steps={2 * state.recipe.train.steps}"
        first.append(("train it longer", ("resume", "{run}", "--set", longer)))
    else:
        first.append(("resume it from its newest checkpoint", ("resume", "{run}")))
    last = ("train the same run again", ("train", recipe))
    rows = [*first, *ALWAYS, last]
    return [{"purpose": purpose, "command": _command(parts, run)} for purpose, parts in rows]


def _command(parts: tuple[str, ...], run: str) -> str:
    return shlex.join([program_name(), *(run if each == "{run}" else each for each in parts)])
