"""`trimaran resume`: resumes a run from its newest state, also with another plan or on other devices."""

import json
import os
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.recipe.options import (
    RUNS,
    Json,
    NoCheck,
    Quiet,
    Settings,
    Warm,
    complete_run,
    find_run,
    path_argument,
    program_name,
)
from trimaran.core import Plan, Recipe, UserError, fixed_field_changes, parse_recipe, templated
from trimaran.runs import RunDirectory, create_run, holds_run, open_run, read_holder
from trimaran.runs.lease import held_lease_error, is_running
from trimaran.runs.run_directory import run_paths

if TYPE_CHECKING:
    from trimaran.checkpoint.manifest import Manifest

RUN_HELP = "A run directory, its name under runs/, or its checkpoint.store: s3://bucket/my-run."


def resume(
    run: Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP, autocompletion=complete_run)],
    settings: Settings = None,
    as_json: Json = False,
    quiet: Quiet = False,
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
        resolve,
        torchrun_cluster,
        with_absolute_paths,
    )
    from trimaran.planner.rules.axis_rules import divisors, either
    from trimaran.runs import refuse_missing_sinks, refuse_unusable

    found = _open(run, run_dir)
    is_torchrun = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    old = with_absolute_paths(found.read_recipe())
    overrides, batch = settings or [], old.train.global_batch
    try:
        request = resolve(str(found.recipe), overrides, cluster=torchrun_cluster(os.environ) if is_torchrun else None)
    except UserError as error:
        if error.code != "P006" or any(setting.startswith("train.global_batch") for setting in overrides):
            raise
        # The batch of a run is fixed: if it does not split, the devices must change.
        sizes = either(divisors(batch, most=batch))
        fix = templated(
            "the batch of a run is fixed: resume with {sizes} data ranks, see --set cluster=...", sizes=sizes
        )
        raise UserError("P006", error.what, where="cluster", fix=fix) from None
    refuse_other_run(old, request.recipe, where=str(found.path))
    refuse_missing_sinks(request.recipe.telemetry)
    request = replace(request, recipe=_with_requested_length(old, request.recipe, overrides))
    from trimaran.app.runs.run_state import read_state
    from trimaran.checkpoint.step_dirs import complete_steps

    state = read_state(found)
    is_complete = not state.current_events("unfinished")  # else the last evaluation and the sample are repeated
    if state.status == "done" and state.step >= request.recipe.train.steps and is_complete:
        if as_json:
            typer.echo(json.dumps(read_state(found, only_status=False).as_dict() | {"exit": 0}))
            return 0
        steps, done = request.recipe.train.steps, state.step
        longer = shlex.join([program_name(), "resume", path_argument(found.path), "--set", f"train.steps={2 * done}"])
        text = f"this run is done: all {steps} steps"
        if done > steps:
            text = f"this run has already made {done} steps, more than the requested {steps}"
        typer.echo(f"{text}. To train longer: {longer}")
        return 0
    asked, made = request.recipe.train.steps, max(complete_steps(found.checkpoints), default=0)
    if made > asked:
        raise UserError("R013.train-steps-run", where="train.steps", asked=asked, made=made, more=2 * made)
    differs = (old.cluster, old.plan) != (request.recipe.cluster, request.recipe.plan)
    replan = differs or (old.cluster == "auto" and request.cluster.world_size != found.read_plan().mesh.world_size)
    if is_torchrun:
        refuse_wrong_world_size(request.plan if replan else found.read_plan(), os.environ)
        refuse_unusable(os.environ, kernels=request.cluster.device.traits.has_kernels)
        from trimaran.app.train.torchrun_rank import resume_as_rank

        return resume_as_rank(request, found, replan=replan, as_json=as_json, check=not no_check)
    if is_running(found) and (holder := read_holder(found)) is not None:
        raise held_lease_error(found, holder)
    refuse_other_machine(request.cluster)
    if not no_check:
        from trimaran.app.machine.machine_check import refuse_unfit_machine

        refuse_unfit_machine(request)
    from trimaran.app.train.session import resume_here

    return resume_here(request, found, replan=replan, as_json=as_json, quiet=quiet, warm=warm)


def _open(run: str, run_dir: Path | None) -> RunDirectory:
    """Return the run of that name, or a run directory for the run in that store."""
    if "://" in run:
        # The run directory that was made from this store before, or a new one with the recipe and plan of its newest
        # checkpoint.
        url = run.rstrip("/")
        manifest = newest_manifest(url)
        recipe = parse_recipe(manifest.recipe, name=f"the recipe in {url}")
        names = run_paths(RUNS, recipe.name)
        path = run_dir or next(each for each in names if not each.exists() or _belongs_to(each, url))
        if _belongs_to(path, url):
            found = open_run(path)
        else:
            section = recipe.checkpoint.model_copy(update={"store": url})
            stored = recipe.model_copy(update={"checkpoint": section})
            found = create_run(path, stored, Plan.model_validate(manifest.plan))
        typer.echo(f"{found.path} is the run directory of {run}", err=True)
        return found
    if run_dir is not None:
        raise UserError("A001.run-dir-run", where=f"--run-dir {run_dir}")
    return find_run(run)


def refuse_other_run(old: Recipe, new: Recipe, *, where: str) -> None:
    """Raise if `new` changes a field that must not change when a run is resumed."""
    changed = fixed_field_changes(old, new)
    if (old.model.adapter is None) != (new.model.adapter is None):
        changed = {"model.adapter": ()} | {name: each for name, each in changed.items() if "model.adapter" not in name}
    if changed:
        raise UserError("S001.cannot-change-when", where=where, changed=", ".join(changed), place=where)


def _with_requested_length(old: Recipe, new: Recipe, settings: list[str]) -> Recipe:
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


def refuse_occupied_store(recipe: Recipe, *, must_reach: bool = True) -> None:
    """Raise if a new run's store has checkpoints, or, with `must_reach`, if it cannot be used from here."""
    url = recipe.checkpoint.store
    if not url:
        return
    from trimaran.checkpoint.store.object_store import StoreError, open_store, unusable_store

    try:
        steps = [each for each in open_store(url).steps() if each.complete]
    except StoreError as error:
        if must_reach:
            raise unusable_store(url, str(error)) from None
        return
    except UserError:
        if must_reach:
            raise
        return
    if steps:
        raise UserError(
            "K062.store-already-checkpoints",
            where=f"checkpoint.store ({url})",
            step=steps[-1].step,
            program_name=program_name(),
            url=url,
        )


def newest_manifest(url: str) -> "Manifest":
    """Return the manifest of the newest checkpoint in a store that can be read. Raises UserError if there is none."""
    from trimaran.checkpoint import DamagedError, StoreError, open_store, unusable_store

    store = open_store(url)
    try:
        names = [each.name for each in store.steps() if each.complete]
        for name in reversed(names):
            with suppress(DamagedError):
                return store.read_manifest(name)[0]
    except StoreError as error:
        raise unusable_store(url, str(error)) from None
    why = "none of its manifests is intact" if names else "it has no complete checkpoint"
    raise UserError("K028.nothing-resume-store", where=url, why=why)


def _belongs_to(path: Path, url: str) -> bool:
    return holds_run(path) and open_run(path).read_recipe().checkpoint.store == url.rstrip("/")
