"""`--show-completion` and `--install-completion`, for the shell that is named or for the current one."""

from collections.abc import Sequence

import typer
from typer.completion import get_completion_script, install

from trimaran.core import UserError, did_you_mean

SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")
COMPLETE_VARIABLE = "_TRIMARAN_COMPLETE"
SHOW, INSTALL = "--show-completion", "--install-completion"


def run_completion_option(arguments: Sequence[str]) -> bool:
    """Show or install shell completion if the first argument asks for it, and return whether it does.

    The shell is the next argument, or the value after `=`, or else the shell that runs this process.
    """
    option, _, value = arguments[0].partition("=")
    if option not in (SHOW, INSTALL) or "--help" in arguments:
        return False
    words = [*([value] if value else []), *arguments[1:]]
    shell = words[0] if words else _current_shell(option)
    if shell not in SHELLS or len(words) > 1:
        raise UserError("A001", f"'{' '.join(words)}' is not one shell{did_you_mean(shell, SHELLS)}", where=option,
                        fix=f"use one of {', '.join(SHELLS)}")  # fmt: skip
    if option == SHOW:
        typer.echo(get_completion_script(prog_name="trimaran", complete_var=COMPLETE_VARIABLE, shell=shell))
        return True
    _, path = install(shell=shell, prog_name="trimaran", complete_var=COMPLETE_VARIABLE)
    typer.echo(f"{shell} completion is installed in {path}; it works in new terminals")
    return True


def _current_shell(option: str) -> str:
    try:
        import shellingham  # typer needs it only in some versions

        return shellingham.detect_shell()[0]
    except (ImportError, OSError, RuntimeError, NotImplementedError):
        raise UserError("A001", "the shell that started this command could not be detected", where=option,
                        fix=f"name it: trimaran {option} bash") from None  # fmt: skip
