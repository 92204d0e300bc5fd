"""What a trained model can be asked: a prompt, and a command, that fit the data of its run."""

from trimaran.app.recipe.options import program_name
from trimaran.app.runs.run_state import read_state
from trimaran.core import AUTO_PROMPT, PYTHON_PROMPT, Recipe
from trimaran.data import data_kind_of
from trimaran.runs import RunDirectory

SHOWN_PROMPTS = {"python-stdlib": "class "}  # a prompt that differs from the sample, by data source


def prompt_of_run(run: RunDirectory) -> str:
    """Return the prompt of the run's last sample, or of its recipe; empty: the beginning of a document."""
    state = read_state(run)
    prompts = [event.data.get("prompt") for event in state.events_of_kind("sample") if "expected" not in event.data]
    if prompts and isinstance(prompts[-1], str):
        return prompts[-1]
    if state.recipe.train.sample.prompt != AUTO_PROMPT:
        return state.recipe.train.sample.prompt
    return PYTHON_PROMPT if state.recipe.data.source == "python-stdlib" else ""


def generate_command(recipe: Recipe, run: str) -> list[str] | None:
    """Return a `trimaran generate` command that fits what the run was trained on; None for a model without text."""
    command = [program_name(), "generate", run]
    if recipe.model.kind.reads == "scenes":
        return None
    if data_kind_of(recipe) == "samples":
        return [*command, "--chat", *(["--image", "FILE"] if recipe.model.kind.reads == "images" else [])]
    shown = SHOWN_PROMPTS.get(recipe.data.source)
    return [*command, "--prompt", shown] if shown else command
