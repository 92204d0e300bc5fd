"""`trimaran resume`: go on with a run from the newest state there is, also with another plan or on other devices."""

import json
import os
import shlex
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.request.options import Json, NoCheck, RunName, Settings, find_run

if TYPE_CHECKING:
    from trimaran.app.request.request import Request
    from trimaran.app.views.run_state import RunState
    from trimaran.core import Recipe
    from trimaran.hardware import Cluster
    from trimaran.run import RunDirectory


def resume(
    run: RunName,
    settings: Settings = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show only the end.")] = False,
    no_check: NoCheck = False,
) -> int:
    """Go on with a run from its newest complete checkpoint.

    With --set the number of steps, the cluster, the plan, checkpoints and what is done about faults may be changed; the
    model, the data and the optimizer may not: that would be another run.

    The doctor looks at the run every ten seconds; what it finds comes with the command that mends it.

    Exit codes: 0 done; 2 a mistake in what was asked for; 75 stopped early with a complete checkpoint, start me again;
    93 no progress, do not start me again; others are faults.

    \b
    trimaran resume runs/stdlib-tiny
    trimaran resume runs/stdlib-tiny --set train.steps=300
    trimaran resume runs/stdlib-tiny --set cluster=4xcpu --json
    """
    from trimaran.app.request.request import refuse_elsewhere, refuse_other_size, torchrun_cluster, with_whole_paths
    from trimaran.run.compile_cache import refuse_unusable
    from trimaran.telemetry.sinks.open import refuse_missing_sinks

    found = find_run(run)
    inside = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    old = with_whole_paths(found.read_recipe())
    request = _resolve(found, old, settings or [], cluster=torchrun_cluster(os.environ) if inside else None)
    refuse_other_run(old, request.recipe, where=str(found.path))
    refuse_missing_sinks(request.recipe.telemetry)
    if _is_done(found, request):
        return _say_done(found, request, as_json=as_json)
    _refuse_fewer_steps(found, request)
    replan = _wants_another_plan(found, old, request)
    if inside:
        refuse_other_size(request.plan if replan else found.read_plan(), os.environ)
        refuse_unusable(os.environ, kernels=request.cluster.device.kind == "cuda")
        from trimaran.app.session.torchrun_rank import resume_as_rank

        return resume_as_rank(request, found, replan=replan, as_json=as_json, check=not no_check)
    _refuse_held(found)
    refuse_elsewhere(request.cluster)
    if not no_check:
        from trimaran.app.request.machine_check import refuse_unfit_machine

        refuse_unfit_machine(request)
    from trimaran.app.session.session import resume_here

    return resume_here(request, found, replan=replan, as_json=as_json, quiet=quiet)


def _resolve(run: "RunDirectory", old: "Recipe", settings: list[str], *, cluster: "Cluster | None") -> "Request":
    """Return what to go on with. The batch of a run stays: one that does not split needs other devices instead."""
    from trimaran.app.request.request import resolve
    from trimaran.core import UserError
    from trimaran.planner.degrees import divisors, either

    try:
        return resolve(str(run.recipe), settings, cluster=cluster)
    except UserError as error:
        batch = old.train.global_batch
        if error.code != "P006" or any(setting.startswith("train.global_batch") for setting in settings):
            raise
        sizes = either(divisors(batch, most=batch))
        fix = f"the batch of a run stays as it is: go on with {sizes} data ranks, see --set cluster=..."
        raise UserError("P006", error.what, where="cluster", fix=fix) from None


def refuse_other_run(old: "Recipe", new: "Recipe", *, where: str) -> None:
    """Raise when `new` would train something else than `old` has begun to."""
    from trimaran.core import UserError, changes_of_course

    if changed := changes_of_course(old, new):
        raise UserError("S001", f"{', '.join(changed)} cannot change on the way: it would be another run",
                        where=where, fix="leave it out, or start a new run: `trimaran train "
                        f"{where}/recipe.yaml --set ...`")  # fmt: skip


def _refuse_fewer_steps(run: "RunDirectory", request: "Request") -> None:
    """Raise when the run has come farther than it is to go: before its recipe is touched."""
    from trimaran.checkpoint.step_dirs import steps
    from trimaran.core import UserError

    asked, made = request.recipe.train.steps, max(steps(run.checkpoints), default=0)
    if made > asked:
        raise UserError("R013", f"train.steps is {asked}: the run has made {made} steps already", where="train.steps",
                        fix=f"ask for more than {made}: --set train.steps={2 * made}")  # fmt: skip


def _wants_another_plan(run: "RunDirectory", old: "Recipe", request: "Request") -> bool:
    """Whether the run's plan is not for what it is to go on with: a person asked for another, or devices have changed.

    A plan that the supervisor changed, because memory or ranks were lacking, stays.
    """
    asked = (old.cluster, old.plan) != (request.recipe.cluster, request.recipe.plan)
    return asked or (old.cluster == "auto" and request.cluster.world_size != run.read_plan().mesh.world_size)


def _refuse_held(run: "RunDirectory") -> None:
    """Raise when somebody runs the run: before its recipe is touched. Who is elsewhere is watched for a few seconds."""
    from trimaran.run.lease import LOOK_SECONDS, LeaseWatch, refusal

    watch = LeaseWatch(run)
    while not isinstance(holder := watch.look(), int):
        if watch.certain:
            raise refusal(run, holder)
        time.sleep(LOOK_SECONDS)


def _is_done(run: "RunDirectory", request: "Request") -> bool:
    state = _state(run)
    return state.status == "done" and state.step >= request.recipe.train.steps


def _state(run: "RunDirectory") -> "RunState":
    from trimaran.app.views.run_state import RunState

    state = RunState(run)
    state.refresh()
    return state


def _say_done(run: "RunDirectory", request: "Request", *, as_json: bool) -> int:
    if as_json:
        typer.echo(json.dumps(_state(run).as_dict() | {"exit": 0}))
        return 0
    from trimaran.app.request.options import own_name, typed

    steps, done = request.recipe.train.steps, _state(run).step
    longer = shlex.join([own_name(), "resume", typed(run.path), "--set", f"train.steps={2 * done}"])
    words = f"this run is done: all of its {steps} steps"
    if done > steps:
        words = f"this run has made {done} steps already, and {steps} were asked for"
    typer.echo(f"{words}. To train on: {longer}")
    return 0
