"""`trimaran replan`: changes the plan of a running run."""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from trimaran.app.recipe.options import Json, RunName, Settings, find_run
from trimaran.core import Plan, TextError, UserError, load_yaml, show_bytes, show_seconds, write_atomically
from trimaran.runs import RunDirectory, is_running, writing

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
    directory = find_run(run)
    if not is_running(directory):
        raise UserError("S045.run-not-running", where=str(directory.path))
    if ranks is not None:
        if settings:
            raise UserError("A001.ranks-set-two", where="--ranks")
        from trimaran.launch.supervise.next_attempt import resized

        with writing(directory):
            recipe, plan = directory.read_recipe(), directory.read_plan()
            now = plan.mesh.world_size
            if ranks == now:
                raise UserError("S040.run-ranks-already", where="--ranks", now=now)
            fewest, most = recipe.faults.ranks or (now, now)
            if not fewest <= ranks <= most:
                raise UserError(
                    "S043.recipe-run-allows",
                    where="faults.ranks",
                    fewest=fewest,
                    most=most,
                    ranks=ranks,
                    least=min(ranks, fewest),
                    new_most=max(ranks, most),
                )
            if resized(plan, recipe, ranks) is None:
                raise UserError(
                    "S043.no-plan-ranks", where="--ranks", ranks=ranks, global_batch=recipe.train.global_batch
                )
            write_atomically(directory.resize_request, f"{ranks}\n")
        if as_json:
            typer.echo(json.dumps({"run_dir": str(directory.path), "status": "requested", "ranks": ranks}))
        else:
            typer.echo(f"requested {ranks} ranks: the run starts again from its state in memory")
        return 0
    patch, how, old, new = plan_change(directory, settings or [], os.environ)
    answer: dict[str, Any] = {"run_dir": str(directory.path), "status": "unchanged", "patch": patch, "how": how}
    for name, each in (("old", old), ("new", new)):
        figures = {figure: getattr(each.prediction, figure, None) for figure in ("step_seconds", "peak_bytes", "fits")}
        answer[name] = {"plan": each.model_dump(mode="json"), **figures}
    if patch:
        answer |= _send(directory, patch, old, new, wait=wait, quiet=as_json)
    elif not as_json:
        typer.echo("the run has this plan already")
    if as_json:
        typer.echo(json.dumps(answer))
    return EXIT_FAILED if answer["status"] == "failed" else 0


def _send(run: RunDirectory, patch: dict[str, Any], old: Plan, new: Plan, *, wait: bool, quiet: bool) -> dict[str, Any]:
    """Request the change, wait for the answer if asked to, and return what `--json` prints of it."""
    from rich.table import Table

    from trimaran.app.show.clean_console import open_console
    from trimaran.app.train.profile import wait_for_answer
    from trimaran.runs.run_requests import change_answers, withdraw_change_request, write_change_request

    console = open_console(stderr=quiet)
    if not quiet:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for name, plan in (("now", old), ("new", new)):
            table.add_row(name, str(plan))
            if (prediction := plan.prediction) is not None:
                fit = "" if prediction.fits else ", which does not fit"
                cost = (
                    f"{show_seconds(prediction.step_seconds)} a step, {show_bytes(prediction.peak_bytes)} a rank{fit}"
                )
                table.add_row("", f"predicted: {cost}")
        table.add_row("change", ", ".join(f"{name}={json.dumps(value) if isinstance(value, bool) else value}"
                                          for name, value in patch.items()))  # fmt: skip
        console.print(table)
    request = write_change_request(run, patch, by="user", reason="asked for with trimaran replan")
    if not wait:
        if not quiet:
            console.print(f"requested change {request.id}; `trimaran watch` shows the answer")
        return {"id": request.id, "status": "requested"}

    def answer() -> dict[str, Any] | None:
        found = [event for event in change_answers(run) if event["data"].get("id") == request.id]
        return found[-1] if found else None

    ended = UserError("S045.run-ended-before", where=str(run.path))
    try:
        event = wait_for_answer(run, answer, console, lambda: "the ranks", ended)
    except KeyboardInterrupt:
        withdraw_change_request(run, request)
        raise
    data = event["data"]
    if data["status"] == "refused":
        error = data["error"]
        raise UserError(error["code"], error["what"], where="the ranks of the run", fix=error["fix"])
    if not quiet and data["status"] == "applied":
        pause = data["pause_seconds"]  # not known if a rank died after the change, before the answer
        paused = "" if pause is None else f"; training paused for {show_seconds(pause)}"
        console.print(f"applied after step {event['step']}, {data['how']}{paused}")
    elif not quiet:
        console.print(f"change {data['id']} failed after step {event['step']}: {data['error']['what']}")
        console.print("the run goes on with the plan that it had")
    names = "id", "status", "how", "pause_seconds", "error"
    return {"step": event["step"]} | {name: data[name] for name in names}


def plan_change(
    run: RunDirectory, settings: Sequence[str], environment: Mapping[str, str]
) -> tuple[dict[str, Any], str, Plan, Plan]:
    """Return the complete patch, whether the parts of the run stay, and the old and the new plan.

    Without settings, the new plan is the best one with the same results. The patch is empty if nothing changes.
    """
    from trimaran.launch.supervise.next_attempt import resized
    from trimaran.planner.change_plan import change_run, patch_between

    recipe, plan = run.read_recipe(), run.read_plan()
    asked: dict[str, Any] = {}
    for pair in settings:
        name, separator, raw = pair.partition("=")
        if not separator or not all(name.strip().split(".")):
            raise UserError("R010.not-setting", where="--set", pair=pair[:80])
        try:
            asked[name.strip()] = load_yaml(raw)
        except TextError as error:
            raise UserError("R010.value-not-yaml", where=f"--set {name}", raw=raw[:80], error=error.what) from None
    if not asked:
        best = resized(plan, recipe, plan.mesh.world_size)
        asked = patch_between(plan, best) if best is not None else {}
    changed = change_run(recipe, plan, asked, environment)
    others = {name: value for name, value in asked.items() if not name.startswith("plan.")}
    patch = patch_between(plan, changed.plan)
    if not patch and changed.recipe == recipe:
        others = {}
    return patch | others, changed.how, plan, changed.plan
