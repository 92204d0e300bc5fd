"""`trimaran report`: one HTML page about a run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.request.options import Json, RunName, find_run
from trimaran.core import UserError
from trimaran.core.regular_files import open_regular_file


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
            raise UserError("A020", "this file already exists and is not an HTML page", where=str(path),
                            fix="name another file: --out page.html")  # fmt: skip
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError("A020", f"the page cannot be written: {error.strerror}", where=str(path),
                        fix="name a file that you can write: --out page.html") from None  # fmt: skip


def _begins_with(path: Path, text: str) -> bool:
    with open_regular_file(path, follow_links=True) as file:
        return file.read(len(text)) == text.encode()
