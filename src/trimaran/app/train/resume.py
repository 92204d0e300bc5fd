"""`trimaran resume`: resumes a run from its newest state, also with another plan or on other devices."""

import json
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.recipe.options import Json, NoCheck, Settings, Warm, complete_run, find_run

if TYPE_CHECKING:
    from trimaran.app.recipe.request import Request
    from trimaran.app.runs.run_state import RunState
    from trimaran.core import Recipe
    from trimaran.machine import Cluster
    from trimaran.runs import RunDirectory


def resume(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run directory, its name under runs/, or its checkpoint.store: s3://bucket/my-run.",
            autocompletion=complete_run,
        ),
    ],
    settings: Settings = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the result.")] = False,
    no_check: NoCheck = False,
    warm: Warm = False,
    run_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder of a run from a store. [default: runs/NAME]")
    ] = None,
) -> int:
    """Resume a run from its newest complete checkpoint, on disk or in its object store.

    --set may change the number of steps, the cluster, the plan, checkpoints and fault handling. It may not change the
    model, the data or the optimizer: that would be another run. To train longer, set train.steps or data.epochs: the
    run ends where the one that you set says.

    The doctor checks the run every ten seconds; each finding comes with the command that fixes it.

    Exit codes: 0 done; 2 a mistake in the recipe or the options; 75 stopped early with a complete checkpoint, resume
    it; 93 no progress, do not restart it; others are faults.

    \b
    trimaran resume runs/stdlib-tiny
    trimaran resume runs/stdlib-tiny --set train.steps=300 --set cluster=4xcpu
    trimaran resume s3://bucket/my-run
    """
    from trimaran.app.recipe.request import (
        refuse_other_machine,
        refuse_wrong_world_size,
        torchrun_cluster,
        with_absolute_paths,
    )
    from trimaran.runs.compile_cache import refuse_unusable
    from trimaran.runs.sinks.open_sinks import refuse_missing_sinks

    found = _open(run, run_dir)
    is_torchrun = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    old = with_absolute_paths(found.read_recipe())
    request = _resolve(found, old, settings or [], cluster=torchrun_cluster(os.environ) if is_torchrun else None)
    refuse_other_run(old, request.recipe, where=str(found.path))
    refuse_missing_sinks(request.recipe.telemetry)
    request = replace(request, recipe=_with_requested_length(old, request.recipe, settings or []))
    if _is_done(found, request):
        return _print_done(found, request, as_json=as_json)
    _refuse_fewer_steps(found, request)
    replan = _needs_new_plan(found, old, request)
    if is_torchrun:
        refuse_wrong_world_size(request.plan if replan else found.read_plan(), os.environ)
        refuse_unusable(os.environ, kernels=request.cluster.device.traits.has_kernels)
        from trimaran.app.train.torchrun_rank import resume_as_rank

        return resume_as_rank(request, found, replan=replan, as_json=as_json, check=not no_check)
    _refuse_running(found)
    refuse_other_machine(request.cluster)
    if not no_check:
        from trimaran.app.machine.machine_check import refuse_unfit_machine

        refuse_unfit_machine(request)
    from trimaran.app.train.session import resume_here

    return resume_here(request, found, replan=replan, as_json=as_json, quiet=quiet, warm=warm)


def _open(run: str, run_dir: Path | None) -> "RunDirectory":
    """Return the run of that name, or a run directory for the run in that store."""
    from trimaran.app.train.stored_run import is_store_url, open_stored_run
    from trimaran.core import UserError

    if is_store_url(run):
        found = open_stored_run(run.rstrip("/"), run_dir)
        typer.echo(f"{found.path} is the run directory of {run}", err=True)
        return found
    if run_dir is not None:
        raise UserError("A001", "--run-dir is for a run that is resumed from a store", where=f"--run-dir {run_dir}",
                        fix="leave it out: a run stays in its run directory")  # fmt: skip
    return find_run(run)


def _resolve(run: "RunDirectory", old: "Recipe", settings: list[str], *, cluster: "Cluster | None") -> "Request":
    """Return the request to resume with. The batch of a run is fixed: if it does not split, the devices must change."""
    from trimaran.app.recipe.request import resolve
    from trimaran.core import UserError
    from trimaran.planner.rules.axis_rules import divisors, either

    try:
        return resolve(str(run.recipe), settings, cluster=cluster)
    except UserError as error:
        batch = old.train.global_batch
        if error.code != "P006" or any(setting.startswith("train.global_batch") for setting in settings):
            raise
        sizes = either(divisors(batch, most=batch))
        fix = f"the batch of a run is fixed: resume with {sizes} data ranks, see --set cluster=..."
        raise UserError("P006", error.what, where="cluster", fix=fix) from None


def refuse_other_run(old: "Recipe", new: "Recipe", *, where: str) -> None:
    """Raise if `new` changes a field that must not change when a run is resumed."""
    from trimaran.core import UserError, fixed_field_changes

    changed = fixed_field_changes(old, new)
    if (old.model.adapter is None) != (new.model.adapter is None):
        changed = {"model.adapter": ()} | {name: each for name, each in changed.items() if "model.adapter" not in name}
    if changed:
        raise UserError("S001", f"{', '.join(changed)} cannot change when a run is resumed: it would be another run",
                        where=where, fix="leave it out, or start a new run: `trimaran train "
                        f"{where}/recipe.yaml --set ...`")  # fmt: skip


def _with_requested_length(old: "Recipe", new: "Recipe", settings: list[str]) -> "Recipe":
    """Return `new` with the end that the settings name.

    The stored train.steps is that of the stored data.epochs. So more steps switch data.epochs off, and other epochs
    replace the stored steps.
    """
    from trimaran.app.recipe.prepare_data import prepare_data

    named = {setting.partition("=")[0].strip() for setting in settings}
    if "data.epochs" in named and new.data.epochs:
        if "train.steps" not in named:
            stored = new.train.model_dump(exclude={"steps"})
            new = new.model_copy(update={"train": type(new.train).model_validate(stored)})
        return prepare_data(new)
    if not old.data.epochs or new.data.epochs != old.data.epochs or new.train.steps <= old.train.steps:
        return new
    if os.environ.get("RANK", "0") == "0":
        switched = f"data.epochs {old.data.epochs:g} is switched off"
        typer.echo(f"train.steps {new.train.steps} ends the run now; {switched}", err=True)
    return new.model_copy(update={"data": new.data.model_copy(update={"epochs": 0})})


def _refuse_fewer_steps(run: "RunDirectory", request: "Request") -> None:
    """Raise if the run has made more steps than requested, before its recipe is changed."""
    from trimaran.checkpoint.step_dirs import complete_steps
    from trimaran.core import UserError

    asked, made = request.recipe.train.steps, max(complete_steps(run.checkpoints), default=0)
    if made > asked:
        raise UserError("R013", f"train.steps is {asked}: the run has already made {made} steps", where="train.steps",
                        fix=f"use more than {made}: --set train.steps={2 * made}")  # fmt: skip


def _needs_new_plan(run: "RunDirectory", old: "Recipe", request: "Request") -> bool:
    """Return whether the run needs a new plan: the user asked for another, or the devices have changed.

    A plan that the supervisor changed, because memory or ranks were missing, is kept.
    """
    asked = (old.cluster, old.plan) != (request.recipe.cluster, request.recipe.plan)
    return asked or (old.cluster == "auto" and request.cluster.world_size != run.read_plan().mesh.world_size)


def _refuse_running(run: "RunDirectory") -> None:
    """Raise if another process runs the run, before its recipe is changed.

    The lease of another machine is watched for a few seconds.
    """
    from trimaran.runs.lease import POLL_SECONDS, LeaseWatch, held_lease_error

    watch = LeaseWatch(run)
    while not isinstance(holder := watch.poll(), int):
        if watch.certain:
            raise held_lease_error(run, holder)
        time.sleep(POLL_SECONDS)


def _is_done(run: "RunDirectory", request: "Request") -> bool:
    state = _state(run, only_status=True)
    is_complete = not state.current_events("unfinished")  # else the last evaluation and the sample are repeated
    return state.status == "done" and state.step >= request.recipe.train.steps and is_complete


def _state(run: "RunDirectory", *, only_status: bool = False) -> "RunState":
    from trimaran.app.runs.run_state import RunState

    state = RunState(run, only_status=only_status)
    state.refresh()
    return state


def _print_done(run: "RunDirectory", request: "Request", *, as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps(_state(run).as_dict() | {"exit": 0}))
        return 0
    from trimaran.app.recipe.options import path_argument, program_name

    steps, done = request.recipe.train.steps, _state(run, only_status=True).step
    longer = shlex.join([program_name(), "resume", path_argument(run.path), "--set", f"train.steps={2 * done}"])
    text = f"this run is done: all {steps} steps"
    if done > steps:
        text = f"this run has already made {done} steps, more than the requested {steps}"
    typer.echo(f"{text}. To train longer: {longer}")
    return 0
