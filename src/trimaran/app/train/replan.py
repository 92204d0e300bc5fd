"""`trimaran replan`: changes the plan of a running run."""

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimaran.app.recipe.options import Json, RunName, Settings, find_run
from trimaran.core import UserError

if TYPE_CHECKING:
    from trimaran.app.train.replan_request import PlannedChange
    from trimaran.runs import RunDirectory
    from trimaran.runs.run_requests import ChangeRequest

POLL_SECONDS = 0.1
EXIT_FAILED = 1


def replan(
    run: RunName,
    settings: Settings = None,
    ranks: Annotated[int | None, typer.Option(metavar="N", min=1, help="Go on with another number of ranks.")] = None,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the ranks have answered.")] = True,
    as_json: Json = False,
) -> int:
    """Change the plan of a running run, without stopping it.

    The ranks build the new plan, hand the state over between them, bit by bit and without a disk, and go on. If the new
    plan fails, for example because memory runs out, they go on with the old one. Fields that follow from those that
    are set follow them: the data ranks fill the mesh, and the global batch stays.

    Without --set the planner chooses the fastest plan with the same results. Fields that change the results of training
    cannot change: precision, engine, compression, local steps, the model, the data and the global batch. --ranks asks
    for more or fewer ranks, within faults.ranks: the run starts again from memory.

    Exit codes: 0 applied, or there is nothing to change; 1 the new plan failed, and the old one is back; 2 a mistake.

    \b
    trimaran replan runs/stdlib-tiny --set plan.micro_batch=4
    trimaran replan runs/stdlib-tiny --set plan.mesh.tp=2
    trimaran replan runs/stdlib-tiny
    """
    from trimaran.runs.lease import is_running

    directory = find_run(run)
    if not is_running(directory):
        raise UserError("S045", "this run is not running", where=str(directory.path),
                        fix="resume it with the new plan: `trimaran resume RUN --set ...`")  # fmt: skip
    if ranks is not None:
        return _request_ranks(directory, ranks, settings, as_json=as_json)
    from trimaran.app.train.replan_request import plan_change

    change = plan_change(directory, settings or [], os.environ)
    answer: dict[str, Any] = {"run_dir": str(directory.path), "status": "unchanged", **change.as_dict()}
    if change.patch:
        answer |= _send(directory, change, wait=wait, quiet=as_json)
    elif not as_json:
        typer.echo("the run has this plan already")
    if as_json:
        typer.echo(json.dumps(answer))
    return EXIT_FAILED if answer["status"] == "failed" else 0


def _request_ranks(run: "RunDirectory", ranks: int, settings: list[str] | None, *, as_json: bool) -> int:
    from trimaran.app.train.replan_request import request_ranks
    from trimaran.runs import writing

    if settings:
        raise UserError("A001", "--ranks and --set are two changes", where="--ranks",
                        fix="ask for the ranks first, then for the plan")  # fmt: skip
    with writing(run):
        request_ranks(run, ranks)
    if as_json:
        typer.echo(json.dumps({"run_dir": str(run.path), "status": "requested", "ranks": ranks}))
    else:
        typer.echo(f"requested {ranks} ranks: the run starts again from its state in memory")
    return 0


def _send(run: "RunDirectory", change: "PlannedChange", *, wait: bool, quiet: bool) -> dict[str, Any]:
    """Request the change, wait for the answer if asked to, and return what `--json` prints of it."""
    from trimaran.app.show.clean_console import open_console
    from trimaran.app.train.replan_view import show_answer, show_planned
    from trimaran.runs.run_requests import write_change_request

    console = open_console(stderr=quiet)
    if not quiet:
        show_planned(change.old, change.new, change.patch, console)
    request = write_change_request(run, change.patch, by="user", reason="asked for with trimaran replan")
    if not wait:
        if not quiet:
            console.print(f"requested change {request.id}; `trimaran watch` shows the answer")
        return {"id": request.id, "status": "requested"}
    from trimaran.runs import last_step

    with console.status("") as status:
        event = _answer(run, request, lambda: status.update(f"step {last_step(run)}; waiting for the ranks"))
    data = event["data"]
    if data["status"] == "refused":
        error = data["error"]
        raise UserError(error["code"], error["what"], where="the ranks of the run", fix=error["fix"])
    if not quiet:
        show_answer(event, console)
    names = "id", "status", "how", "pause_seconds", "error"
    return {"step": event["step"]} | {name: data[name] for name in names}


def _answer(run: "RunDirectory", request: "ChangeRequest", show: Callable[[], None]) -> dict[str, Any]:
    """Return the event that answers the request. Raises if the run ends before; Ctrl-C withdraws the request."""
    from trimaran.runs.lease import is_running
    from trimaran.runs.run_requests import change_answers, withdraw_change_request

    shown = 0.0
    try:
        while True:
            found = [event for event in change_answers(run) if event["data"].get("id") == request.id]
            if found:
                return found[-1]
            if time.monotonic() > shown + 1.0:
                show()
                shown = time.monotonic()
                if not is_running(run) and not any(
                    event["data"].get("id") == request.id for event in change_answers(run)
                ):
                    raise UserError("S045", "the run ended before it changed its plan", where=str(run.path),
                                    fix="see why: `trimaran watch RUN`")  # fmt: skip
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        withdraw_change_request(run, request)
        raise
