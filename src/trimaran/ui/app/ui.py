"""`trimaran ui`: the runs, the planner and the views in a browser."""

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app import RUNS, Json

RunsFolder = Annotated[
    Path | None, typer.Option("--runs", metavar="DIR", help="The folder of the runs. [default: runs/]")
]
Port = Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="A port of this machine. [default: a free one]",
                                   show_default=False)]  # fmt: skip
NoOpen = Annotated[bool, typer.Option("--no-open", help="Do not open a browser; only print the address.")]
Write = Annotated[bool, typer.Option("--write", help="Let the page start runs. [default: it only reads]")]


def ui(
    runs: RunsFolder = None, port: Port = 0, no_open: NoOpen = False, write: Write = False, as_json: Json = False
) -> int:
    """Open the runs, the planner and the views in a browser. Ctrl-C ends it; runs go on.

    The page is served to this machine only, and only to a browser that has the token in the address. It fetches
    nothing from elsewhere. From another machine: ssh -L 8080:127.0.0.1:PORT HOST, and open the address with 8080.

    \b
    trimaran ui
    trimaran ui --runs /shared/runs --port 8080 --no-open
    trimaran ui --write
    """
    from trimaran.core import UserError

    if find_spec("nicegui") is None:
        raise UserError("W004.web-page", where="trimaran ui")
    from trimaran.app import chosen_language
    from trimaran.ui.web.frame import WebState
    from trimaran.ui.web.runs_root import check_runs_root
    from trimaran.ui.web.server import bind, open_browser, serve

    root = check_runs_root(runs or RUNS, named=runs is not None)
    state = WebState(runs=root, may_write=write, language=chosen_language(os.environ))

    def on_start(url: str) -> None:
        typer.echo(json.dumps({"url": url}) if as_json else f"open {url}")
        if not no_open and not as_json:
            open_browser(url)

    serve(state, bind(port), on_start)
    return 0
