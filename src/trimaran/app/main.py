"""The door: which verbs there are, and what a mistake looks like. Only the verb that was asked for is imported."""

import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from trimaran import __version__

VERBS = {
    "train": "Train a model: plan, start the ranks, show the run live.",
    "resume": "Go on with a run from its newest checkpoint.",
    "plan": "Find the best way to split the work, and what it costs.",
    "predict": "Score given plans in bulk: does it fit, how fast is it.",
    "watch": "Attach to a run, or look at a finished one.",
    "doctor": "Examine this machine, or a run: verdict, evidence, patch.",
    "report": "Make one HTML page of a run, to keep or to send.",
    "profile": "Trace steps of a run at work, or see what holds its memory.",
    "incidents": "Show what went wrong in a run, and what was done.",
    "checkpoints": "List what a run has kept; verify, compare, prune, import.",
    "export": "Make a checkpoint into a folder that other programs read.",
    "generate": "Let a trained model write.",
    "data": "Look at the data of a recipe; pack text into token shards.",
    "bench": "Measure how fast this machine is, for the planner.",
    "presets": "List the model shapes that have a name.",
    "schema": "Print the JSON Schema of a recipe, for editors.",
}

CLOSED_PIPE = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A person's mistake is three lines and 2, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what a terminal cannot show is a question mark, not a crash
    try:
        code = _application(_asked_verb(arguments, os.environ))(arguments, prog_name="trimaran", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # The reader went away. Python would complain once more when it flushes at exit, into nothing from here on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        from trimaran.app.views.failure import report

        return report(error, arguments)


def _application(asked: str | None) -> typer.Typer:
    """Return the command tree; verbs that were not asked for are their summaries only."""
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        subcommand_metavar="VERB ...",
        invoke_without_command=True,
        callback=_top,
    )
    for verb, summary in VERBS.items():
        command = _load(verb) if verb == asked else _placeholder
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=verb, short_help=summary)
        else:
            app.command(verb, short_help=summary)(command)
    return app


def _asked_verb(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the verb that is to run, or to be completed; None for the top level."""
    if "_TRIMARAN_COMPLETE" in environment:
        # Bash hands the words over in COMP_WORDS, the other shells in typer's own variable.
        words = (environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or "").split()
        return words[1] if len(words) > 1 and words[1] in VERBS else None
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        from trimaran.core import UserError, nearest

        raise UserError("A002", f"there is no verb '{verb}'{nearest(verb, VERBS)}", where="the command line",
                        fix=f"use one of {', '.join(VERBS)}")  # fmt: skip
    return verb


def _load(verb: str) -> Any:
    """Return the verb's function or, where it has sub-commands, its Typer: the name in the file of the same name."""
    return getattr(import_module(f"trimaran.app.commands.{verb}"), verb)


def _placeholder() -> None:
    raise AssertionError("a verb runs from its own file")


def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Self-driving distributed training for PyTorch.

    `trimaran train` alone trains a small model on this machine.
    """
    if version:
        typer.echo(f"trimaran {__version__}")
        raise typer.Exit
