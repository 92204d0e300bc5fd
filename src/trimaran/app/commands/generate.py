"""`trimaran generate`: a trained model continues a text."""

import json
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.request.options import Json, RunName, find_run, own_name, typed
from trimaran.app.views.logs import printable
from trimaran.core import UserError
from trimaran.run.compile_cache import refuse_unusable

if TYPE_CHECKING:
    from trimaran.app.views.run_state import RunState
    from trimaran.run import RunDirectory

MAX_TOKENS = 65536
MAX_SEED = 2**63 - 1

STANDING = {
    "starting": "it is starting",
    "training": "it is training",
    "restarting": "it is restarting",
    "done": "it is done",
    "stopped": "it was stopped",
    "failed": "it failed",
    "vanished": "its processes went away",
}


def generate(
    run: RunName,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="How many tokens to write.")] = 240,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest token.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="The same seed writes the same text.")] = 0,
    as_json: Json = False,
) -> None:
    """Let the model that a run has trained continue a text.

    \b
    trimaran generate runs/stdlib-tiny --prompt "class "
    """
    directory = find_run(run)
    if directory.read_recipe().model.family == "perception":
        raise UserError("A016", "a perception model writes no text", where=str(directory.recipe),
                        fix="see what it got right with `trimaran watch`")  # fmt: skip
    if not directory.model.is_dir():
        raise _no_weights(directory)
    refuse_unusable(os.environ)
    from trimaran.infer.generate import generate_from_run

    text = generate_from_run(directory, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        typer.echo(json.dumps({"run_dir": str(directory.path), "prompt": prompt, "text": text}))
    else:
        typer.echo(printable(text))


def _no_weights(run: "RunDirectory") -> UserError:
    """Return what to say of a run without `model/`: how it stands, and the commands that lead to weights from there."""
    from trimaran.app.views.run_state import RunState

    state = RunState(run)
    state.refresh()
    train = state.recipe.train
    unsaved = "" if train.save else ", and train.save is false"
    what = f"{STANDING[state.status]} at step {state.step} of {train.steps}{unsaved}"
    return UserError("A009", f"this run has no trained weights: {what}", where=str(run.model),
                     fix=", or ".join(_ways_to_weights(state)))  # fmt: skip


def _ways_to_weights(state: "RunState") -> Iterator[str]:
    """Yield what a person can do: wait, go on or train again, and take the newest checkpoint where there is one."""
    from trimaran.app.views.run_state import UNDER_WAY
    from trimaran.checkpoint.step_dirs import newest

    def command(verb: str, *words: str) -> str:
        return f"`{shlex.join([own_name(), verb, *words])}`"

    name, kept = typed(state.run.path), newest(state.run.checkpoints)
    save = [] if state.recipe.train.save else ["--set", "train.save=true"]
    if state.status in UNDER_WAY:
        yield f"wait for its end: {command('watch', name)} shows it"
    elif state.status != "done":
        why = "" if state.status == "stopped" else f"see what happened with {command('watch', name)}, then "
        yield f"{why}go on to the last step with {command('resume', name, *save)}"
    elif kept is None:
        yield f"train again with {command('train', typed(state.run.recipe), *save)}"
    if kept is not None:
        yield f"make step {kept} a Hugging Face folder with {command('export', name)}"
