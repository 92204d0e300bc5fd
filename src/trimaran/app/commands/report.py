"""`trimaran report`: one HTML page of a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.request.options import Json, RunName, find_run
from trimaran.core import UserError


def report(
    run: RunName,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Where the page goes; report.html in the run's folder.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make one HTML page of a run, finished or not: plots, plan against actual, findings, incidents, checkpoints.

    The file has everything in it, so it opens without a network and can be sent to anybody.

    \b
    trimaran report runs/stdlib-tiny
    trimaran report runs/stdlib-tiny --out page.html
    trimaran report runs/stdlib-tiny --json
    """
    from trimaran.app.report.page import page_of
    from trimaran.app.report.report_facts import facts_of

    directory = find_run(run)
    facts = facts_of(directory)
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    path = out or directory.path / "report.html"
    _write(path, page_of(facts))
    typer.echo(f"{path}  ({path.stat().st_size / 1000:.0f} kB)")


def _write(path: Path, page: str) -> None:
    """Write the page. It replaces an older page, and no other file."""
    beginning = page[: page.index("\n")]
    try:
        if path.exists() and path.stat().st_size and not _begins_with(path, beginning):
            raise UserError("A020", "this file is there already, and is no HTML page", where=str(path),
                            fix="name another file: --out page.html")  # fmt: skip
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError("A020", f"the page cannot be written: {error.strerror}", where=str(path),
                        fix="name a file that you may write: --out page.html") from None  # fmt: skip


def _begins_with(path: Path, words: str) -> bool:
    with path.open("rb") as file:
        return file.read(len(words)) == words.encode()
