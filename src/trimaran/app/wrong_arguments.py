"""What a person meant by a command or an option that does not exist."""

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import typer

from trimaran.core import UserError, all_fields, closest, did_you_mean, field_for, templated

COMMAND_ALIASES = {
    "init": "new create setup configure config wizard start-project",
    "train": "run start fit finetune fine-tune sft lora pretrain",
    "resume": "continue restart",
    "generate": "chat infer inference sample predict-text complete",
    "watch": "status logs log tail attach monitor show top",
    "plan": "estimate search auto-parallel optimize memory",
    "doctor": "diagnose check preflight info env",
    "export": "merge save convert",
    "data": "dataset datasets tokenize pack preprocess inspect",
    "bench": "benchmark measure",
    "checkpoints": "checkpoint ckpt ls",
    "presets": "models",
}
RECIPE_SUFFIXES = (".yaml", ".yml")


def unknown_command(name: str, commands: Iterable[str], arguments: Sequence[str]) -> UserError:
    """Return the error for a command that does not exist, with the command that was probably meant."""
    meant = next((each for each, aliases in COMMAND_ALIASES.items() if name.casefold() in aliases.split()), "")
    if name.endswith(RECIPE_SUFFIXES):
        return UserError(
            "A002.recipe-not-command",
            where="the command line",
            name=name,
            names=shlex.join(["trimaran", "train", *arguments]),
        )
    near = templated(" (did you mean '{meant}'?)", meant=meant) if meant else did_you_mean(name, commands)
    return UserError("A002.no-command", where="the command line", name=name, near=near, commands=", ".join(commands))


def wrong_usage(error: typer.TyperException, arguments: Sequence[str]) -> UserError:
    """Return the error for wrong arguments; an option that is a field of the recipe gets the `--set` for it."""
    command = " ".join(["trimaran", *(word for word in arguments[:1] if not word.startswith("-"))])
    # Typer prints choices one a line, and pydantic's messages have a prefix.
    what = " ".join(error.format_message().split()).replace("Value error, ", "").rstrip(".")
    fix = templated("see `{command} --help`", command=command)
    option = getattr(error, "option_name", "")
    if "No such option" in what and (setting := _setting(option, arguments, getattr(error, "ctx", None))):
        what, fix = (
            templated("there is no option {option}; it is a field of the recipe", option=option),
            templated("write --set {setting}", setting=setting),
        )
    return UserError("A001", what, where=f"`{command}`", fix=fix)


def _setting(option: str, arguments: Sequence[str], context: Any) -> str:
    """Return the `--set` argument for an unknown option; empty if no field of a recipe has such a name."""
    takes_settings = context is not None and any("--set" in each.opts for each in context.command.params)
    name = option.lstrip("-").replace("-", "_")
    last_names = {each.rpartition(".")[2]: each for each in reversed(all_fields())}
    near = last_names.get(closest(name, last_names, cutoff=0.8), "")
    field = option.lstrip("-") if "." in option else field_for(name) or near
    if not takes_settings or field not in all_fields():
        return ""
    for index, word in enumerate(arguments):
        if word == option:
            value = arguments[index + 1] if index + 1 < len(arguments) else "VALUE"
            return shlex.quote(f"{field}={'true' if value.startswith('--') else value}")
        if word.startswith(f"{option}="):
            return shlex.quote(f"{field}={word.partition('=')[2]}")
    return ""
