"""`trimaran train`: plans, starts the ranks, shows the run and prints the result."""

import json
import os
import shlex
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.plan.plan import plan_as_dict
from trimaran.app.recipe.options import RUNS, Json, NoCheck, Quiet, RecipeFile, Settings, Warm, complete_autopilot
from trimaran.app.recipe.recipe_files import has_hub_data, with_local_files, with_model_tokenizer
from trimaran.app.recipe.request import (
    Request,
    refuse_other_machine,
    refuse_wrong_world_size,
    resolve,
    torchrun_cluster,
)
from trimaran.app.train.resume import refuse_occupied_store
from trimaran.core import UserError
from trimaran.launch.supervise.local import local_command
from trimaran.runs import RunDirectory, create_run, free_run_path, refuse_occupied, refuse_unusable
from trimaran.runs.sinks.open_sinks import refuse_missing_sinks

NewFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder for the run. [default: runs/NAME]")]
STEPS_HELP, RANKS_HELP = "Trace these steps, without END.", "Trace these ranks: all, or 0,3. [default: 0]"
AUTOPILOT_HELP = "Change the plan while it runs: act; only advise; off. [default: as in the recipe]"
DEBUG_HELP = "Check every collective, wait for every kernel; slow, to find a fault."


def train(
    recipe: RecipeFile = None,
    run_dir: NewFolder = None,
    settings: Settings = None,
    as_json: Json = False,
    quiet: Quiet = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check data and plan, build a rank without weights; start nothing.")
    ] = False,
    no_check: NoCheck = False,
    profile: Annotated[str, typer.Option(metavar="FIRST:END", help=STEPS_HELP, show_default=False)] = "",
    profile_ranks: Annotated[str, typer.Option(metavar="RANKS", help=RANKS_HELP, show_default=False)] = "",
    warm: Warm = False,
    autopilot: Annotated[
        str, typer.Option(metavar="MODE", help=AUTOPILOT_HELP, show_default=False, autocompletion=complete_autopilot)
    ] = "",
    debug: Annotated[bool, typer.Option("--debug", help=DEBUG_HELP)] = False,
) -> int:
    """Train a model: plan, start the ranks, show the run live.

    Ctrl-C stops after the current step with a checkpoint, for `trimaran resume`; a second Ctrl-C stops at once.

    For several nodes, only the run directory is prepared here, and the command for each node is shown;
    `trimaran launch` starts them. `--dry-run` works for any cluster, on a machine without its GPUs.

    The doctor checks the run every ten seconds; each finding comes with the command that fixes it.

    Exit codes: 0 done; 2 a mistake in the recipe or the options; 75 stopped early with a complete checkpoint, resume
    it; 93 no progress, do not restart it; others are faults.

    \b
    trimaran train
    trimaran train recipes/stdlib-tiny.yaml --set train.steps=300 --run-dir runs/longer
    trimaran train --profile 10:13
    trimaran train --autopilot act
    torchrun --nproc-per-node=2 -m trimaran train recipes/stdlib-tiny.yaml
    """
    is_torchrun = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    overrides = (settings or []) + profile_settings(profile, profile_ranks)
    overrides += [f"autopilot.mode={json.dumps(autopilot)}"] if autopilot else []
    overrides += ["faults.debug=true"] if debug else []
    request = resolve(recipe, overrides, cluster=torchrun_cluster(os.environ) if is_torchrun else None)
    refuse_missing_sinks(request.recipe.telemetry)
    refuse_bad_profile(request)
    path = run_dir or free_run_path(RUNS, request.recipe.name)
    if dry_run:
        is_first = not is_torchrun or os.environ["RANK"] == "0"
        return _dry_run(request, path, as_json=as_json) if is_first else 0
    request = replace(request, recipe=with_model_tokenizer(with_local_files(request.recipe)))
    if is_torchrun:
        refuse_wrong_world_size(request.plan, os.environ)
        refuse_unusable(os.environ, kernels=request.cluster.device.traits.has_kernels)
        from trimaran.app.train.torchrun_rank import run_as_rank

        return run_as_rank(request, path, as_json=as_json, check=not no_check)
    from trimaran.app.recipe.prepare_data import check_data, prepare_data

    refuse_occupied(path)
    check_data(request.recipe)
    refuse_occupied_store(request.recipe)
    if request.cluster.num_nodes > 1:
        prepared = prepare_data(request.recipe) if request.recipe.data.epochs else request.recipe
        run = create_run(path, prepared, request.plan)
        nodes = request.cluster.num_nodes
        command = [*local_command(run), f"--nodes={nodes}", "--address=auto", *(["--no-check"] if no_check else [])]
        if as_json:
            typer.echo(json.dumps(plan_as_dict(request) | {"run_dir": str(run.path), "command": command}))
            return 0
        typer.echo(f"{run.path} is ready. It must be on a disk that all nodes share. Run on each of the {nodes} nodes:")
        typer.echo(shlex.join(command))
        typer.echo("`trimaran launch --on ssh --hosts a,b` starts such a run on all nodes, after checking them.")
        return 0
    refuse_other_machine(request.cluster)
    if not no_check:
        from trimaran.app.machine.machine_check import refuse_unfit_machine

        refuse_unfit_machine(request)
    from trimaran.app.train.session import run_here

    return run_here(request, path, as_json=as_json, quiet=quiet, warm=warm)


def profile_settings(profile: str, ranks: str) -> list[str]:
    """Return the recipe settings for `--profile` and `--profile-ranks`."""
    fields = {"telemetry.profile": profile, "telemetry.profile_ranks": ranks}
    return [f"{field}={json.dumps(value)}" for field, value in fields.items() if value]


def refuse_bad_profile(request: Request) -> None:
    """Raise if the profile names steps or ranks that the run does not have."""
    section = request.recipe.telemetry
    steps, world = request.recipe.train.steps, request.plan.mesh.world_size
    if not section.profile and section.profile_every:
        raise UserError("R013.telemetry-profile-every", where="telemetry.profile_every")
    if not section.profile:
        return
    first, end = map(int, section.profile.split(":"))
    if 0 < section.profile_every <= end - first:
        raise UserError(
            "R013.telemetry-profile-every-trace",
            where="telemetry.profile_every",
            profile_every=section.profile_every,
            end=end - first,
        )
    if first > steps and not request.recipe.data.epochs:
        raise UserError("R013.telemetry-profile-run", where="telemetry.profile", profile=section.profile, steps=steps)
    if section.profile_ranks != "all" and max(map(int, section.profile_ranks.split(","))) >= world:
        raise UserError(
            "R013.telemetry-profile-ranks",
            where="telemetry.profile_ranks",
            profile_ranks=section.profile_ranks,
            world=world,
            last=world - 1,
        )


def _dry_run(request: Request, path: Path, *, as_json: bool) -> int:
    from trimaran.app.recipe.prepare_data import check_all_data, check_ranks, show_check
    from trimaran.app.runs.live import print_plain
    from trimaran.app.show.clean_console import open_console, progress_bar

    console = open_console(stderr=True)
    request, is_on_hub = replace(request, recipe=with_model_tokenizer(request.recipe)), has_hub_data(request.recipe)
    refuse_occupied(path)
    if not is_on_hub:
        with progress_bar(console) as progress:
            check_all_data(request.recipe, partial(print_plain, console), progress)
    with console.status("building a rank without weights"):
        check = check_ranks(request)
    command = local_command(RunDirectory(path))
    if as_json:
        facts = {"run_dir": str(path), "command": command, "build": check}
        typer.echo(json.dumps(plan_as_dict(request) | facts))
        return 0
    from trimaran.app.plan.plan_view import show_plan

    show_plan(request, open_console())
    typer.echo(f"\n{show_check(check)}")
    if is_on_hub:
        typer.echo("the dataset is on the Hub: it is not fetched, and its samples are not checked")
    typer.echo(f"would run in {path}:\n{shlex.join(command)}")
    return 0
