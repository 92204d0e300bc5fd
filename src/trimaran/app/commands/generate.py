"""`trimaran generate`: continues a text with a trained model."""

import json
import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.request.options import Json, RunName, find_run, path_argument, program_name
from trimaran.core import UserError
from trimaran.run.compile_cache import refuse_unusable

if TYPE_CHECKING:
    from trimaran.app.views.run_state import RunState
    from trimaran.run import RunDirectory

MAX_TOKENS = 65536
MAX_SEED = 2**63 - 1

STATUS_TEXT = {
    "starting": "it is starting",
    "training": "it is training",
    "restarting": "it is restarting",
    "done": "it is done",
    "stopped": "it was stopped",
    "failed": "it failed",
    "vanished": "its processes are gone",
}


def generate(
    run: RunName,
    prompt: Annotated[str, typer.Option(help="The text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="How many tokens to generate.")] = 240,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always picks the likeliest token.")] = 0.9,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="The same seed generates the same text.")] = 0,
    as_json: Json = False,
) -> None:
    """Continue a text with the model that a run has trained.

    \b
    trimaran generate runs/stdlib-tiny --prompt "class "
    """
    directory = find_run(run)
    if directory.read_recipe().model.family == "perception":
        raise UserError("A016", "a perception model generates no text", where=str(directory.recipe),
                        fix="see its accuracy with `trimaran watch`")  # fmt: skip
    if not directory.model.is_dir():
        raise _no_weights(directory)
    refuse_unusable(os.environ)
    from trimaran.infer.generate import generate_from_run

    text = generate_from_run(directory, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        typer.echo(json.dumps({"run_dir": str(directory.path), "prompt": prompt, "text": text}))
    else:
        typer.echo(text)


def _no_weights(run: "RunDirectory") -> UserError:
    """Return the error for a run without `model/`: its status, and the commands that lead to weights."""
    from trimaran.app.views.run_state import RunState

    state = RunState(run, only_status=True)
    state.refresh()
    train = state.recipe.train
    unsaved = "" if train.save else ", and train.save is false"
    what = f"{STATUS_TEXT[state.status]} at step {state.step} of {train.steps}{unsaved}"
    return UserError("A009", f"this run has no trained weights: {what}", where=str(run.model),
                     fix=", or ".join(_fixes(state)))  # fmt: skip


def _fixes(state: "RunState") -> Iterator[str]:
    """Yield what the user can do: wait, resume or train again; and export the newest checkpoint if there is one."""
    from trimaran.app.views.run_state import ACTIVE_STATUSES
    from trimaran.checkpoint.step_dirs import newest_step

    def command(name: str, *words: str) -> str:
        return f"`{shlex.join([program_name(), name, *words])}`"

    run, saved = path_argument(state.run.path), newest_step(state.run.checkpoints)
    save = [] if state.recipe.train.save else ["--set", "train.save=true"]
    if state.status in ACTIVE_STATUSES:
        yield f"wait until it ends: {command('watch', run)} shows it"
    elif state.status != "done":
        why = "" if state.status == "stopped" else f"see what happened with {command('watch', run)}, then "
        yield f"{why}train to the last step with {command('resume', run, *save)}"
    elif saved is None:
        yield f"train again with {command('train', path_argument(state.run.recipe), *save)}"
    if saved is not None:
        yield f"export step {saved} to a Hugging Face folder with {command('export', run)}"
