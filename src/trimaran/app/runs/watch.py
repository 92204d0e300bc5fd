"""`trimaran watch`: the live view of a run directory."""

import json

import typer

from trimaran.app.recipe.options import Json, RunName, find_run
from trimaran.app.runs.run_findings import FindingsPoller
from trimaran.app.runs.run_state import ACTIVE_STATUSES, RunState

MAX_OLD_LINES = 15


def watch(run: RunName, as_json: Json = False) -> int:
    """Attach to a run, or view a finished one. Only reads files: leaving does not disturb the run.

    The doctor checks the run every ten seconds; each finding comes with the command that fixes it.

    The exit code says how the run ended. --json prints the current state.

    \b
    trimaran watch runs/stdlib-tiny
    trimaran watch runs/stdlib-tiny --json
    """
    state = RunState(find_run(run))
    poller = FindingsPoller(state.run, at_once=True)
    if as_json:
        state.refresh()
        poller.poll()
        found = {"findings": [each.as_dict() for each in poller.findings], "doctor_trouble": poller.error}
        typer.echo(json.dumps(state.as_dict() | found))
        return 0
    from trimaran.app.runs.live import follow, show_log
    from trimaran.app.runs.summary import explain_failure, summarise
    from trimaran.app.show.clean_console import open_console

    console = open_console()
    show_log(state.refresh()[-MAX_OLD_LINES:], console)
    follow(state, console, has_ended=lambda: state.status not in ACTIVE_STATUSES, poller=poller)
    if state.status in ("failed", "vanished"):
        return explain_failure(state, console, state.attempts.over or 1)
    summarise(state, console)
    return 0
