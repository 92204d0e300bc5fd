"""`trimaran warm`: starts, shows and ends the user's warm fork server, with which runs start faster."""

import json
import os
import time
from typing import Annotated

import typer

from trimaran.app.recipe.options import Json
from trimaran.core import UserError, show_seconds
from trimaran.launch import ANSWER_SECONDS, IDLE_MINUTES, ask_warm, start_warm
from trimaran.runs import LOG, runtime_folder


def warm(
    show: Annotated[bool, typer.Option("--list", help="Show it; start nothing.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End it; runs that use it continue.")] = False,
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="N", min=0.1, max=1440, help="End after this time without a new run.")
    ] = IDLE_MINUTES,
    as_json: Json = False,
) -> int:
    """Keep a process with torch imported in the background: `trimaran train --warm` then starts seconds faster.

    There is one per user. A run uses it only if everything is equal: the versions and files of all modules, the
    environment, limits, cores, groups and namespaces. Otherwise the run says what differs and starts as usual.

    \b
    trimaran warm
    trimaran train --warm
    trimaran warm --list --json
    trimaran warm --stop
    """
    status = ask_warm(os.environ, {"stop" if stop else "status": True})
    if status is None and not show and not stop:
        folder = runtime_folder(os.environ)
        if folder is None:
            raise UserError("A027.no-folder-user", where="the environment variable XDG_RUNTIME_DIR")
        start_warm(os.environ, idle_minutes=minutes)
        deadline = time.monotonic() + ANSWER_SECONDS
        while (status := ask_warm(os.environ, {"status": True})) is None:
            if time.monotonic() >= deadline:
                raise UserError("A027.warm-fork-server", where=str(folder / LOG))
            time.sleep(0.05)
    if as_json:
        typer.echo(json.dumps({"warm": status} | ({"stopped": status is not None} if stop else {})))
    elif status is None:
        typer.echo("there is no warm fork server")
    else:
        left = show_seconds(max(0.0, status["ends_after_seconds"] - status["idle_seconds"]))
        runs = "1 run" if status["forks"] == 1 else f"{status['forks']} runs"
        pid = status["pid"]
        shown = f"warm fork server: process {pid}, used by {runs}, ends in {left} without a new run"
        typer.echo(f"the warm fork server, process {pid}, ends" if stop else shown)
    return 0
