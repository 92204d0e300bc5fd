"""`trimaran report`: one HTML page about a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.request.options import Json, RunName, find_run


def report(
    run: RunName,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where to write the page. [default: RUN/report.html]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page about a run, live or finished: plots, prediction, findings, incidents, checkpoints.

    The file is self-contained: it opens offline and can be sent as it is.

    \b
    trimaran report runs/stdlib-tiny
    trimaran report runs/stdlib-tiny --out page.html
    trimaran report runs/stdlib-tiny --json
    """
    from trimaran.app.report.page import page_of
    from trimaran.app.report.report_facts import facts_of
    from trimaran.app.report.write_page import write_page

    directory = find_run(run)
    facts = facts_of(directory)
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    path = out or directory.path / "report.html"
    write_page(path, page_of(facts), option="--out")
    typer.echo(f"{path}  ({path.stat().st_size / 1000:.0f} kB)")
