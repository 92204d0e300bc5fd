"""`trimaran decisions`: what the autopilot of a run decided, what it expected, and what it measured."""

import json
import time
from typing import Annotated, Any

import typer

from trimaran.app.recipe.options import Json, RunName, find_run
from trimaran.core import UserError
from trimaran.runs import RunDirectory, RunReader, read_decisions, writing

POLL_SECONDS = 0.5


def decisions(
    run: RunName,
    as_json: Json = False,
    undo: Annotated[int, typer.Option(metavar="N", min=0, help="Take back decision N, which was kept.")] = 0,
    off: Annotated[bool, typer.Option("--off", help="Stop the autopilot of this run; a trial is taken back.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show new decisions until the run ends.")] = False,
) -> None:
    """Show every decision of a run's autopilot: why, what it expected and measured, and whether it was kept.

    --undo asks the running run to take a kept decision back. The fields that it changed then stay as you set them.

    \b
    trimaran decisions runs/stdlib-tiny
    trimaran decisions runs/stdlib-tiny --undo 3
    trimaran decisions runs/stdlib-tiny --off
    """
    directory = find_run(run)
    answer: dict[str, Any] = {"run_dir": str(directory.path)}
    if undo:
        answer["request"] = request_undo(directory, undo)
    if off:
        switch_off(directory)
    from trimaran.app.runs.decisions_view import command_of_decision, decision_lines, show_decisions
    from trimaran.app.runs.run_state import ACTIVE_STATUSES, RunState
    from trimaran.app.show.clean_console import open_console

    found, state = read_decisions(directory), RunState(directory, only_status=True)
    state.refresh()
    if as_json:
        section, spent = directory.read_recipe().autopilot, sum(each.trial_seconds for each in found)
        shown = [each.as_dict() | {"command": command_of_decision(each, directory, state.status)} for each in found]
        mode = "off" if directory.autopilot_off.exists() else section.mode
        answer |= {"mode": mode, "budget": section.budget, "spent_seconds": spent, "decisions": shown}
        typer.echo(json.dumps(answer))
        return

    console = open_console()
    if undo:
        console.print(f"asked the ranks to take decision {undo} back: change {answer['request']}", soft_wrap=True)
    if off:
        console.print("the autopilot of this run is off; delete RUN/autopilot-off to switch it on again")
    if not follow:
        if not undo and not off:
            show_decisions(directory, found, state.status, console)
        return
    reader, is_active = RunReader(directory), True
    while is_active:
        state.refresh()
        is_active = state.status in ACTIVE_STATUSES
        for each in reader.new_decisions().values():
            for line in decision_lines(each, directory, state.status):
                console.print(line, soft_wrap=True)
        if is_active:
            time.sleep(POLL_SECONDS)


def request_undo(run: RunDirectory, number: int) -> int:
    """Ask the ranks to take a kept decision back, as the user, and return the number of the request."""
    from trimaran.runs.lease import is_running
    from trimaran.runs.run_requests import write_change_request

    found = next((each for each in read_decisions(run) if each.id == number), None)
    if found is None or found.outcome != "kept":
        state = "there is no such decision" if found is None else f"it was {found.outcome.replace('-', ' ')}"
        kept = ", ".join(str(each.id) for each in read_decisions(run) if each.outcome == "kept")
        fix = f"name one that was kept: {kept}" if kept else "no decision of this run was kept"
        raise UserError("A033", f"decision {number} cannot be undone: {state}", where=str(run.decisions), fix=fix)
    if not is_running(run):
        settings = "`trimaran resume RUN --set FIELD=VALUE` with the values of its undo"
        raise UserError("A033", f"decision {number} cannot be undone: the run is not running", where=str(run.path),
                        fix=f"resume it with other settings: {settings}")  # fmt: skip
    request = write_change_request(run, found.undo, by="user", reason=f"undo decision {number}: {found.reason}")
    return request.id


def switch_off(run: RunDirectory) -> None:
    """Stop the autopilot of the run, from now on and when it is resumed."""
    with writing(run):
        run.autopilot_off.touch()
