"""`trimaran report`: one HTML page about a run, or about several beside each other."""

import json
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app import Json, RunName, complete_run, find_run

Others = Annotated[
    list[str] | None,
    typer.Argument(metavar="[RUN...]", show_default=False, help="Further runs: they are compared.",
                   autocompletion=complete_run),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Where to write the page. [default: RUN/report.html or compare.html]"),
]
Steps = Annotated[
    str | None, typer.Option("--steps", metavar="FIRST:LAST", help="Only the curves of these steps, in more detail.")
]


def report(run: RunName, others: Others = None, out: Out = None, steps: Steps = None, as_json: Json = False) -> None:
    """Write one HTML page about a run, live or finished: plots, prediction, findings, incidents, checkpoints.

    The file is self-contained: it opens offline and can be sent as it is. With several runs, the page compares them:
    curves over each other, results, and what differs in recipe and plan.

    \b
    trimaran report runs/stdlib-tiny
    trimaran report runs/stdlib-tiny --out page.html
    trimaran report runs/stdlib-tiny --steps 200:300 --json
    trimaran report runs/stdlib-tiny runs/stdlib-demo --json
    """
    from trimaran.core import UserError
    from trimaran.ui.report.markup import write_page
    from trimaran.ui.report.run_comparison import compare_page, compare_runs
    from trimaran.ui.report.run_feed import RunFeed, read_range
    from trimaran.ui.report.run_sections import page_of

    directories = [find_run(each) for each in (run, *(others or ()))]
    if others and steps:
        raise UserError("A042.runs-compared-over", where="--steps")
    if others:
        facts = compare_runs(directories)
    else:
        feed = RunFeed(directories[0])
        facts = feed.refresh()
        facts |= feed.between(*read_range(steps)) if steps else {}
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
        return
    path = out or directories[0].path / ("compare.html" if others else "report.html")
    write_page(path, compare_page(facts) if others else page_of(facts), option="--out")
    typer.echo(f"{path}  ({path.stat().st_size / 1000:.0f} kB)")
