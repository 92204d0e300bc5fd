"""`trimaran decisions`: what the autopilot of a run decided, what it expected, and what it measured."""

import json
import time
from typing import Annotated, Any

import typer

from trimaran.app.recipe.options import Json, RunName, find_run
from trimaran.core import UserError, show_seconds
from trimaran.runs import RunReader, read_decisions, writing

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
        from trimaran.runs import is_running, write_change_request

        every = read_decisions(directory)
        kept = [each for each in every if each.outcome == "kept"]
        undone = next((each for each in kept if each.id == undo), None)
        if undone is None:
            outcome = next((each.outcome for each in every if each.id == undo), "")
            state_text = f"it was {outcome.replace('-', ' ')}" if outcome else "there is no such decision"
            names = ", ".join(str(each.id) for each in kept)
            fix = f"name one that was kept: {names}" if kept else "no decision of this run was kept"
            raise UserError(
                "A033.decision-cannot-undone", where=str(directory.decisions), fix=fix, undo=undo, state_text=state_text
            )
        if not is_running(directory):
            settings = "`trimaran resume RUN --set FIELD=VALUE` with the values of its undo"
            raise UserError("A033.decision-cannot-undone-run", where=str(directory.path), undo=undo, settings=settings)
        reason = f"undo decision {undo}: {undone.reason}"
        answer["request"] = write_change_request(directory, undone.undo, by="user", reason=reason).id
    if off:  # from now on, and when the run is resumed
        with writing(directory):
            directory.autopilot_off.touch()
    from trimaran.app.runs.decisions_view import STYLES, command_of_decision, decision_lines
    from trimaran.app.runs.run_state import ACTIVE_STATUSES, RunState
    from trimaran.app.show.clean_console import open_console

    found, state = read_decisions(directory), RunState(directory, only_status=True)
    state.refresh()
    section, spent = directory.read_recipe().autopilot, sum(each.trial_seconds for each in found)
    mode = "off" if directory.autopilot_off.exists() else section.mode
    if as_json:
        shown = [each.as_dict() | {"command": command_of_decision(each, directory, state.status)} for each in found]
        answer |= {"mode": mode, "budget": section.budget, "spent_seconds": spent, "decisions": shown}
        typer.echo(json.dumps(answer))
        return

    console = open_console()
    if undo:
        console.print(f"asked the ranks to take decision {undo} back: change {answer['request']}", soft_wrap=True)
    if off:
        console.print("the autopilot of this run is off; delete RUN/autopilot-off to switch it on again")
    if not follow and not undo and not off:
        for each in found:
            for line in decision_lines(each, directory, state.status):
                console.print(line, soft_wrap=True)
        counts = {name: sum(each.outcome == name for each in found) for name in STYLES}
        parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        summary = f"autopilot {mode}: {parts}; trials cost {show_seconds(spent)}"
        console.print(summary if found else f"the autopilot ({mode}) has decided nothing in this run", soft_wrap=True)
    if not follow:
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
