"""The command line: the list of commands, and how errors are shown. Only the requested command is imported."""

import gc
import io
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from trimaran.app.show.terminal import PrintableStream, raw_stream
from trimaran.runs import drop_unread_output, open_closed_output

COMMANDS = {
    "init": "Look at a model and data, and write a recipe for them.",
    "train": "Train a model: plan, start the ranks, show the run live.",
    "launch": "Launch a run over SSH, on Slurm, Kubernetes, Ray or here.",
    "jobs": "List launched jobs; show, stop, resume or follow one.",
    "resume": "Resume a run from its newest checkpoint.",
    "replan": "Change the plan of a running run, without a stop.",
    "plan": "Find the best parallel plan, and what it costs.",
    "predict": "Score many given plans: does it fit, how fast is it.",
    "simulate": "Simulate a job for weeks: failures, spares, goodput.",
    "viz": "Show what fits, who holds what, and who waits for whom.",
    "ui": "Open runs, planner and views in a browser.",
    "tune": "Measure plans here, and write the fastest as a recipe.",
    "rehearse": "Run single ranks of a plan here, and measure them.",
    "watch": "Attach to a run, or view a finished one.",
    "doctor": "Check this machine, or diagnose a run and suggest fixes.",
    "report": "Write one HTML page about a run, to keep or to send.",
    "profile": "Trace a run, show its memory, or record with Nsight Systems.",
    "incidents": "Show what went wrong in a run, and what was done.",
    "decisions": "Show what the autopilot changed, and what it gained.",
    "drill": "Inject a fault into a run; is it named and survived?",
    "checkpoints": "List checkpoints of a run; verify, compare, prune, import.",
    "export": "Convert a checkpoint: hf, dcp, gguf, onnx, torch-export.",
    "eval": "Evaluate a trained model: held-out loss, lm-eval's tasks.",
    "generate": "Generate text with a trained model.",
    "serve": "Serve a trained model with OpenAI's API.",
    "data": "Inspect the data of a recipe; pack text into token shards.",
    "warm": "Keep torch imported in the background: runs start faster.",
    "history": "List what runs measured, by model and cluster.",
    "calibrate": "Fit the planner's rates to runs that were measured.",
    "bench": "Measure how fast this machine is, for the planner.",
    "mcp": "Offer the commands to a coding assistant as tools.",
    "presets": "List the named model shapes.",
    "plugins": "List the plug-ins of installed packages.",
    "schema": "Print the JSON Schema of a recipe, for editors.",
}
FOLDERS = {  # of the commands; each has a module, mostly of its own name, imported when it is asked for
    "app.plan": "init plan predict simulate tune rehearse history",
    "app.train": "train launch jobs resume replan profile",
    "ui.app": "viz ui report mcp",
    "app.runs": "watch incidents decisions checkpoints",
    "app.machine": "doctor warm calibrate bench",
    "app.drill": "drill",
    "serve.app": "export eval generate serve",
    "app.recipe": "data",
}
MODULES = {name: f"{folder}.{name}" for folder, names in FOLDERS.items() for name in names.split()}
MODULES |= dict.fromkeys(("presets", "plugins", "schema"), "app.recipe.listings")
# Parts of commands that live in a package above this one. They are imported when a user asks for them.
LEAVES = {
    "plan --serve": "trimaran.serve.app.plan_serving:plan_serving_command",
    "bench comm --html": "trimaran.ui.report.comm_page:comm_page",
}
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
SHOW_COMPLETION, INSTALL_COMPLETION = "--show-completion", "--install-completion"

COMMANDS_THAT_TRAIN = ("train", "resume")
CLOSED_PIPE = 1
# New objects before the garbage collector looks at them. With Python's default of 700 it takes a seventh of the time,
# and finds next to nothing among imported modules and the plans of a search.
COMMANDS_WITH_LITTLE_GARBAGE = ("plan", "predict", *COMMANDS_THAT_TRAIN)
OBJECTS_PER_COLLECTION = 50_000


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. A user's mistake is three lines and 2, never a traceback."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    open_closed_output()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # what the terminal cannot show becomes a question mark
    if arguments[0] in COMMANDS_THAT_TRAIN:
        drop_unread_output()
    # `print`, logging, tracebacks and every library write without control codes.
    for name in ("stdout", "stderr"):
        if (raw := getattr(sys, name)) is not None and not isinstance(raw, PrintableStream):
            setattr(sys, name, PrintableStream(raw))
    try:
        # Raise if an argument is not UTF-8: it could not be written to a recipe, a log or JSON.
        for word in arguments:
            if not word.isascii() and any("\ud800" <= character <= "\udfff" for character in word):
                from trimaran.core import UserError

                raise UserError("A001.argument-not-utf", where="the command line", word=word)
        if "-completion" in arguments[0] and _complete_shell(arguments):
            return 0
        requested = _requested_command(arguments, os.environ)
        if argv is None and requested in COMMANDS_THAT_TRAIN and "_TRIMARAN_COMPLETE" not in os.environ:
            # Start the processes of the run: torch takes longest to import, and loads while this process plans.
            from trimaran.launch.supervise.early_supervisor import start_early

            start_early(arguments, os.environ)
        if argv is None and requested in COMMANDS_WITH_LITTLE_GARBAGE:
            gc.set_threshold(OBJECTS_PER_COLLECTION)
        code = build_app(requested)(arguments, prog_name="trimaran", standalone_mode=False)
        sys.stdout.flush()
        return code or 0
    except BrokenPipeError:
        # The reader is gone. Python would complain again when it flushes at exit, so send the rest to /dev/null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except Exception as error:
        return _show_error(error, arguments)
    finally:
        if (early := sys.modules.get("trimaran.launch.supervise.early_supervisor")) is not None:
            early.cancel_early()  # if the command was refused; otherwise the run has taken it


def _complete_shell(arguments: Sequence[str]) -> bool:
    """Show or install completion for the named or the running shell if asked to; return whether it was asked for."""
    option, _, value = arguments[0].partition("=")
    if option not in (SHOW_COMPLETION, INSTALL_COMPLETION) or "--help" in arguments:
        return False
    from typer.completion import get_completion_script, install

    from trimaran.core import UserError, did_you_mean

    words = [*([value] if value else []), *arguments[1:]]
    if words:
        shell = words[0]
    else:
        try:
            import shellingham  # typer needs it only in some versions

            shell = shellingham.detect_shell()[0]
        except (ImportError, OSError, RuntimeError, NotImplementedError):
            raise UserError("A001.shell-started-command", where=option, option=option) from None
    if shell not in SHELLS or len(words) > 1:
        raise UserError(
            "A001.not-shell",
            where=option,
            words=" ".join(words),
            guess=did_you_mean(shell, SHELLS),
            shells=", ".join(SHELLS),
        )
    if option == SHOW_COMPLETION:
        typer.echo(get_completion_script(prog_name="trimaran", complete_var="_TRIMARAN_COMPLETE", shell=shell))
        return True
    _, path = install(shell=shell, prog_name="trimaran", complete_var="_TRIMARAN_COMPLETE")
    typer.echo(f"{shell} completion is installed in {path}; it works in new terminals")
    return True


def build_app(requested: str | None) -> typer.Typer:
    """Return the command tree; commands that were not requested have only a summary."""
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        subcommand_metavar="COMMAND ...",
        invoke_without_command=True,
        callback=_root,
    )
    for name, summary in COMMANDS.items():
        command = getattr(import_module(f"trimaran.{MODULES[name]}"), name) if name == requested else _placeholder
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, short_help=summary)
        else:
            app.command(name, short_help=summary)(command)
    return app


def _requested_command(arguments: Sequence[str], environment: Mapping[str, str]) -> str | None:
    """Return the command to run or to complete; None for the top level."""
    if "_TRIMARAN_COMPLETE" in environment:
        # Bash passes the words in COMP_WORDS, the other shells in typer's own variable.
        words = (environment.get("COMP_WORDS") or environment.get("_TYPER_COMPLETE_ARGS") or "").split()
        return words[1] if len(words) > 1 and words[1] in COMMANDS else None
    name = next((word for word in arguments if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        from trimaran.app.wrong_arguments import unknown_command

        raise unknown_command(name, COMMANDS, arguments)
    return name


def open_leaf(name: str) -> Callable[..., Any]:
    """Import the function of a leaf."""
    module, function = LEAVES[name].split(":")
    return getattr(import_module(module), function)


def _placeholder() -> None:
    raise AssertionError("a command runs from its own file")


def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Self-driving distributed training for PyTorch.

    `trimaran train` alone trains a small model on this machine.
    """
    if version:
        from trimaran.core.version import VERSION

        typer.echo(f"trimaran {VERSION}")
        raise typer.Exit


def _show_error(error: Exception, arguments: Sequence[str]) -> int:
    """Print a user's mistake and return 2. Any other error is raised again: a fault needs its traceback."""
    from trimaran.core.errors import EXIT_USER, UserError, file_error

    if isinstance(error, typer.TyperException):
        from trimaran.app.wrong_arguments import wrong_usage

        error = wrong_usage(error, arguments)
    if isinstance(error, OSError) and not isinstance(error, UserError):
        error = file_error(error) or error
    if not isinstance(error, UserError):
        raise error
    if os.environ.get("RANK", "0") != "0":
        return EXIT_USER  # under torchrun every rank makes the same mistake; only rank 0 prints it
    if "--json" in arguments:
        typer.echo(json.dumps({"error": error.as_dict()}))
    else:
        # Print three lines for each mistake in the user's language, with a red code on a terminal.
        from trimaran.app.show.error_language import chosen_language, error_lines, shown_errors

        language = chosen_language(os.environ)
        for each in shown_errors(error, language):
            if sys.stderr.isatty() and "NO_COLOR" not in os.environ:
                raw_stream(sys.stderr).write(typer.style(each.code, fg="red", bold=True))
            else:
                sys.stderr.write(each.code)
            sys.stderr.write(error_lines(each, language))
    return EXIT_USER
