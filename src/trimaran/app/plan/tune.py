"""`trimaran tune`: measures the planner's best plans and their neighbours here, and writes the fastest as a recipe."""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from trimaran.app.recipe.options import Json, NoCheck, RecipeFile, Settings, path_argument, program_name
from trimaran.core import UserError

EXIT_INTERRUPTED = 130
MinGain = Annotated[
    float | None,
    typer.Option(metavar="F", min=0, max=1, show_default=False,
                 help="End when no trial is expected to shorten a step by this fraction. [default: the noise]"),
]  # fmt: skip
NoCalibrate = Annotated[bool, typer.Option("--no-calibrate", help="Leave the planner's rates as they are.")]


def tune(
    recipe: RecipeFile = None,
    minutes: Annotated[float, typer.Option(metavar="N", min=0.1, max=1440, help="Time for trials.")] = 10.0,
    min_gain: MinGain = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the recipe is written. [default: in the results folder]")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="The folder of the results. [default: runs/tune/NAME-DIGEST]", file_okay=False
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure plans again that were measured before.")] = False,
    no_calibrate: NoCalibrate = False,
    no_check: NoCheck = False,
    as_json: Json = False,
) -> int:
    """Measure the planner's best plans and their neighbours on this machine, and write the fastest as a recipe.

    Each trial is a short real run without checkpoints. The plan that promises most comes next, and tuning ends when
    time is over or nothing promises more than the noise. Pinned fields of the plan stay, and nothing changes that
    changes results: global batch, precision, engine, compression and local steps.

    The planner's rates are refitted to the trials. Ctrl-C keeps all results; the same command continues.

    \b
    trimaran tune recipes/stdlib-tiny.yaml --minutes 5
    trimaran tune my.yaml --set plan.mesh.tp=2 --out tuned.yaml
    trimaran tune my.yaml --json | jq '.best.measured'
    """
    from trimaran.app.plan.history import read_index
    from trimaran.app.plan.tune_answer import (
        Refit,
        read_tune_request,
        refit_rates,
        refuse_other_file,
        show_tuning,
        tune_here,
        tuned_recipe_text,
        tuning_as_dict,
        write_tuned_recipe,
    )
    from trimaran.app.show.clean_console import open_console
    from trimaran.planner.measure.trial_record import locked_folder

    request = read_tune_request(recipe, settings or [], folder)
    path = out or request.folder / "recipe.yaml"
    refuse_other_file(path)
    console = open_console(stderr=True)
    try:
        with locked_folder(request.folder, request.about) as store:
            if again:
                store.forget()
            result = tune_here(request, store, console, minutes=minutes, min_gain=min_gain, check=not no_check)
            if result.best is None and result.stopped == "interrupted":
                raise UserError("A041.interrupted-before-plan", where=str(request.folder))
            if result.best is None:
                reasons = [f"{each.candidate.plan}: {each.outcome}: {each.reason}" for each in result.tried[:3]]
                raise UserError(
                    "A041.no-plan-could", where=str(request.folder), reasons="; ".join(reasons) or result.why
                )
            assert result.best.seconds is not None
            step = f"{1000 * result.best.seconds:.1f} ms a step"
            remark = f"{step} on {request.about['cluster']} ({request.about['host']})"
            write_tuned_recipe(path, tuned_recipe_text(request.written, result.best.candidate, remark=remark))
            runs = store.runs()
            read_index([run.absolute() for run in runs], os.environ)  # `trimaran plan` then knows them
            with console.status("fitting rates to the trials"):
                refit = Refit(None, "--no-calibrate") if no_calibrate else refit_rates(runs, result.stopped)
    except KeyboardInterrupt:  # before the first trial, or a second time
        typer.echo(f"interrupted; what was measured is in {request.folder}", err=True)
        return EXIT_INTERRUPTED
    command = shlex.join([program_name(), "train", path_argument(path)])
    if as_json:
        fits = [each.as_dict() for each in refit.answer.fits] if refit.answer else []
        answer: dict[str, Any] = {
            "name": request.written.name,
            "cluster": str(request.question.cluster),
            "folder": str(request.folder),
            **tuning_as_dict(result),
            "calibration": {"devices": fits, "trouble": refit.trouble or None},
            "recipe": str(path),
            "next": command,
        }
        typer.echo(json.dumps(answer))
        return 0
    console = open_console()
    show_tuning(result, refit, request.ranked[0], console)
    typer.echo(f"\nrecipe  {path}\nnext    {command}")
    return 0
