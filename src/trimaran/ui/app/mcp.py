"""`trimaran mcp`: the commands as tools of a coding assistant, by the Model Context Protocol."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app import RUNS, Json, raw_stream

RunsFolder = Annotated[
    Path | None, typer.Option("--runs", metavar="DIR", help="The folder of the runs. [default: runs/]")
]
Write = Annotated[bool, typer.Option("--write", help="Let the assistant start and change runs. [default: only read]")]
Config = Annotated[bool, typer.Option("--config", help="Print the entry for an assistant's configuration, and end.")]


def mcp(runs: RunsFolder = None, write: Write = False, config: Config = False, as_json: Json = False) -> int:
    """Offer plan, predict, rehearse, doctor, incidents, decisions, history and the docs to a coding assistant.

    The assistant starts this command itself and talks to it over standard input and output (Model Context Protocol).
    It may name presets, runs of the folder of runs, and files below the folder in which the command was started.

    \b
    trimaran mcp --config
    trimaran mcp --runs /shared/runs
    trimaran mcp --write
    """
    from trimaran.core import UserError

    if config or as_json:
        words = ["mcp", *(["--runs", str(runs.absolute())] if runs else []), *(["--write"] if write else [])]
        server = {"command": sys.executable, "args": ["-m", "trimaran", *words], "cwd": str(Path.cwd())}
        entry = {"mcpServers": {"trimaran": server}}
        typer.echo(json.dumps(entry, indent=None if as_json else 2))
        return 0
    if find_spec("mcp") is None:
        raise UserError("W009.tools-assistant-need", where="trimaran mcp")
    from trimaran.ui.assistant.mcp_server import build_server
    from trimaran.ui.web.runs_root import check_runs_root

    sys.stdout = raw_stream(sys.stdout)  # the protocol needs the file itself, and JSON escapes control codes
    build_server(Path.cwd(), check_runs_root(runs or RUNS, named=runs is not None), may_write=write).run("stdio")
    return 0
