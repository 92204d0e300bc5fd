"""`trimaran generate`: a trained model continues a text."""

import json
from typing import Annotated

import typer

from trimaran.app.cli.logs import printable
from trimaran.app.cli.options import Json, RunName, find_run
from trimaran.core import UserError

MAX_TOKENS = 65536
MAX_SEED = 2**63 - 1


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
        raise UserError("A009", "this run has no trained weights", where=str(directory.model),
                        fix="wait for the run to end, or train again with --set train.save=true")  # fmt: skip
    from trimaran.train.generate import generate_from_run

    text = generate_from_run(directory, prompt, tokens=tokens, temperature=temperature, seed=seed)
    if as_json:
        typer.echo(json.dumps({"run_dir": str(directory.path), "prompt": prompt, "text": text}))
    else:
        typer.echo(printable(text))
