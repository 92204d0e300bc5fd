"""`trimaran incidents`: what went wrong in a run, and what was done about it."""

import json

import typer

from trimaran.app.recipe.options import Json, RunName, find_run
from trimaran.app.runs.run_state import read_state
from trimaran.launch import incident_text
from trimaran.runs import read_incidents

STYLES = {"stopped": "bold red", "continued": "yellow", "skipped": "yellow"}


def incidents(run: RunName, as_json: Json = False) -> None:
    """Show every incident of a run: what happened, which rank caused it, the evidence, the action and the cost.

    \b
    trimaran incidents runs/stdlib-tiny
    trimaran incidents runs/stdlib-tiny --json
    """
    directory = find_run(run)
    found = read_incidents(directory)
    if as_json:
        typer.echo(json.dumps([each.as_dict() | {"verdict": incident_text(each)} for each in found]))
        return
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console

    console = open_console()
    if vanished := read_state(directory).status == "vanished":
        console.print(Text("the run was killed and not resumed", style="bold red"), soft_wrap=True)
    if not found and not vanished:
        console.print("no incidents in this run")
    for number, each in enumerate(found):
        first, *rest = incident_text(each).splitlines()
        console.print(Text(first, style=STYLES.get(each.action or "", "bold")), soft_wrap=True)
        console.print(Text("\n".join([*rest, ""] if number < len(found) - 1 else rest)), soft_wrap=True)
