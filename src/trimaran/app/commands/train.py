"""`trimaran train`: plan, start the ranks, show the run, say what came out."""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from trimaran.app.commands.plan import answer
from trimaran.app.request.options import RUNS, Json, NoCheck, RecipeFile, Settings
from trimaran.app.request.request import Request, refuse_elsewhere, refuse_other_size, resolve, torchrun_cluster
from trimaran.core import UserError
from trimaran.launch.local import local_command
from trimaran.run import RunDirectory, create_run, free_run_path, refuse_occupied
from trimaran.run.compile_cache import refuse_unusable
from trimaran.telemetry.sinks.open import refuse_missing_sinks

NewFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder for the run. [default: runs/NAME]")]


ProfileSteps = Annotated[
    str, typer.Option(metavar="FIRST:END", help="Trace these steps, END left out.", show_default=False)
]
ProfileRanks = Annotated[
    str, typer.Option(metavar="RANKS", help="Of these ranks: all, or such as 0,3. [default: 0]", show_default=False)
]


def train(  # noqa: PLR0913 - each option of a verb is a parameter
    recipe: RecipeFile = None,
    run_dir: NewFolder = None,
    settings: Settings = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and the command; start nothing.")] = False,
    no_check: NoCheck = False,
    profile: ProfileSteps = "",
    profile_ranks: ProfileRanks = "",
) -> int:
    """Train a model: plan, start the ranks, show the run live.

    Ctrl-C stops after the step at hand with a checkpoint, from which `trimaran resume` goes on; twice stops at once.

    A run on several nodes is only made ready here, and the command for each node is shown.

    The doctor looks at the run every ten seconds; what it finds comes with the command that mends it.

    Exit codes: 0 done; 2 a mistake in what was asked for; 75 stopped early with a complete checkpoint, start me again;
    93 no progress, do not start me again; others are faults.

    \b
    trimaran train
    trimaran train recipes/stdlib-tiny.yaml --set train.steps=300 --run-dir runs/longer
    trimaran train --profile 10:13
    torchrun --nproc-per-node=2 -m trimaran train recipes/stdlib-tiny.yaml
    """
    inside = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    asked = (settings or []) + profile_settings(profile, profile_ranks)
    request = resolve(recipe, asked, cluster=torchrun_cluster(os.environ) if inside else None)
    refuse_missing_sinks(request.recipe.telemetry)
    refuse_no_profile(request)
    path = run_dir or free_run_path(RUNS, request.recipe.name)
    if inside:
        refuse_other_size(request.plan, os.environ)
        refuse_unusable(os.environ, kernels=request.cluster.device.kind == "cuda")
        from trimaran.app.session.torchrun_rank import run_as_rank

        return run_as_rank(request, path, as_json=as_json, check=not no_check)
    from trimaran.app.session.prepare_data import look

    refuse_occupied(path)
    look(request.recipe)
    if dry_run:
        return _show_intention(request, RunDirectory(path), as_json=as_json)
    if request.cluster.num_nodes > 1:
        return _hand_over(request, path, as_json=as_json, check=not no_check)
    refuse_elsewhere(request.cluster)
    if not no_check:
        from trimaran.app.request.machine_check import refuse_unfit_machine

        refuse_unfit_machine(request)
    from trimaran.app.session.session import run_here

    return run_here(request, path, as_json=as_json, quiet=quiet)


def profile_settings(profile: str, ranks: str) -> list[str]:
    """Return the settings of the recipe that `--profile` and `--profile-ranks` stand for."""
    fields = {"telemetry.profile": profile, "telemetry.profile_ranks": ranks}
    return [f"{field}={json.dumps(value)}" for field, value in fields.items() if value]


def refuse_no_profile(request: Request) -> None:
    """Raise when a profile is asked for of steps or ranks that the run will not have."""
    asked = request.recipe.telemetry
    steps, world = request.recipe.train.steps, request.plan.mesh.world_size
    if not asked.profile:
        return
    if int(asked.profile.partition(":")[0]) > steps and not request.recipe.data.epochs:
        raise UserError("R013", f"telemetry.profile is {asked.profile}: the run has {steps} steps",
                        where="telemetry.profile", fix="name steps that the run comes to, such as 3:6")  # fmt: skip
    if asked.profile_ranks != "all" and max(map(int, asked.profile_ranks.split(","))) >= world:
        raise UserError("R013", f"telemetry.profile_ranks is {asked.profile_ranks}: the plan has {world} ranks",
                        where="telemetry.profile_ranks", fix=f"name some of 0 to {world - 1}, or all")  # fmt: skip


def _hand_over(request: Request, path: Path, *, as_json: bool, check: bool) -> int:
    """Claim the run directory of a run on several nodes, and tell what to start on each of them."""
    from trimaran.app.session.prepare_data import ready

    run = create_run(path, ready(request.recipe) if request.recipe.data.epochs else request.recipe, request.plan)
    nodes = request.cluster.num_nodes
    command = [*local_command(run), f"--nodes={nodes}", "--address=IP", *([] if check else ["--no-check"])]
    if as_json:
        typer.echo(json.dumps(answer(request) | {"run_dir": str(run.path), "command": command}))
        return 0
    typer.echo(
        f"{run.path} is ready. It must be on a disk that all nodes see. On each of the {nodes} nodes, with its own IP:"
    )
    typer.echo(shlex.join(command))
    return 0


def _show_intention(request: Request, run: RunDirectory, *, as_json: bool) -> int:
    command = local_command(run)
    if as_json:
        typer.echo(json.dumps(answer(request) | {"run_dir": str(run.path), "command": command}))
        return 0
    from rich.console import Console

    from trimaran.app.views.plan_view import show_plan

    show_plan(request, Console(highlight=False))
    typer.echo(f"\nwould run in {run.path}:\n{shlex.join(command)}")
    return 0
