"""`trimaran watch`: the live view of any run directory."""

import json

import typer

from trimaran.app.request.options import Json, RunName, find_run
from trimaran.app.views.run_findings import Visits
from trimaran.app.views.run_state import UNDER_WAY, RunState

OLD_LINES = 15


def watch(run: RunName, as_json: Json = False) -> int:
    """Attach to a run, or look at a finished one. Reads files only: leaving does not disturb the run.

    The doctor looks at it every ten seconds; what it finds comes with the command that mends it.

    The exit code says how the run ended; with --json the answer is the state now.

    \b
    trimaran watch runs/stdlib-tiny
    trimaran watch runs/stdlib-tiny --json
    """
    state = RunState(find_run(run))
    visits = Visits(state.run, at_once=True)
    if as_json:
        state.refresh()
        visits.look()
        found = {"findings": [each.as_dict() for each in visits.told], "doctor_trouble": visits.trouble}
        typer.echo(json.dumps(state.as_dict() | found))
        return 0
    from rich.console import Console

    from trimaran.app.views.live import follow, show_log
    from trimaran.app.views.summary import explain_failure, summarise

    console = Console(highlight=False)
    show_log(state.refresh()[-OLD_LINES:], console)
    follow(state, console, over=lambda: state.status not in UNDER_WAY, visits=visits)
    if state.status in ("failed", "vanished"):
        return explain_failure(state, console, state.attempts.over or 1)
    summarise(state, console)
    return 0
