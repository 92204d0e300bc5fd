"""One run on this machine, from packed data to the last line on the screen."""

import json
import os
import shlex
from pathlib import Path
from tempfile import TemporaryFile

import typer
from rich.console import Console
from rich.text import Text

from trimaran.app.request.options import own_name, typed
from trimaran.app.request.request import Request
from trimaran.app.session.prepare_data import ready
from trimaran.app.session.stop_signals import HeldSupervisor, ShowButton, StopButton
from trimaran.app.views.live import follow, print_plain
from trimaran.app.views.progress_bar import packing_bar
from trimaran.app.views.run_findings import Visits, read_findings
from trimaran.app.views.run_state import RunState
from trimaran.app.views.summary import explain_failure, summarise
from trimaran.checkpoint.step_dirs import steps
from trimaran.core import EXIT_AGAIN, EXIT_DONE, Bytes, Recipe
from trimaran.core.optional_packages import refuse_missing_extras
from trimaran.cost import STATE_BYTES
from trimaran.cost.goodput import checkpoint_bytes
from trimaran.data.feature_cache import refuse_trained
from trimaran.launch.local import start_local
from trimaran.launch.replace_plan import keep_plan, keep_recipe
from trimaran.models import ModelSpec, model_folder, spec_to_hf, weight_files
from trimaran.run import RunDirectory, create_run, refuse_full_disk, writing
from trimaran.run.compile_cache import refuse_unusable


def run_here(request: Request, path: Path, *, as_json: bool, quiet: bool) -> int:
    """Train `request` in the run directory `path` and return the exit code.

    With `as_json` standard output is for the one answer at the end, and the show goes to standard error.
    """
    console = Console(stderr=as_json, highlight=False)
    _refuse_late_surprises(request, path)
    run = create_run(path, _ready(request, console), request.plan)
    return attend(run, console, as_json=as_json, quiet=quiet)


def resume_here(request: Request, run: RunDirectory, *, replan: bool, as_json: bool, quiet: bool) -> int:
    """Go on with `run` as `request` says, with its plan if `replan`, and return the exit code."""
    console = Console(stderr=as_json, highlight=False)
    _refuse_late_surprises(request, run.path)
    recipe = _ready(request, console)
    with writing(run):
        TemporaryFile(dir=run.path).close()  # a supervisor that cannot write could not even say so
        if replan:
            keep_plan(run, request.plan)
        keep_recipe(run, recipe)  # last: whoever is killed in between asks for the same plan again
    return attend(run, console, as_json=as_json, quiet=quiet)


def attend(run: RunDirectory, console: Console, *, as_json: bool, quiet: bool) -> int:
    """Start the supervisor of `run`, show what happens until it ends, and return the exit code."""
    state = RunState(run)
    state.refresh()  # what was before is not news
    ranks = start_local(run)
    visits = None if quiet else Visits(run, at_once=False)
    held = HeldSupervisor(ranks, lambda words: print_plain(console, words))
    shown = ShowButton(ranks, lambda words: print_plain(console, words))
    with shown, StopButton(ranks, lambda words: print_plain(console, words)) as button:

        def over() -> bool:
            button.act()
            held.look()
            shown.act()
            return ranks.poll() is not None

        follow(state, Console(quiet=True) if quiet else console, over=over, visits=visits)
    code = ranks.wait()
    state.refresh()
    if button.exit_code is not None and code != EXIT_DONE:
        code = button.exit_code
    elif code not in (EXIT_DONE, EXIT_AGAIN):
        code = explain_failure(state, console, code)
    return conclude(state, console, code, as_json=as_json)


def conclude(state: RunState, console: Console, code: int, *, as_json: bool) -> int:
    """Say what came out of a run, for a person or as one JSON object, and return the exit code."""
    told, trouble = read_findings(state.run)
    if as_json:
        found = {"findings": [each.as_dict() for each in told], "doctor_trouble": trouble}
        typer.echo(json.dumps(state.as_dict() | {"exit": code} | found))
        return code
    if state.status in ("done", "stopped"):
        summarise(state, console)
    if told:
        codes = ", ".join(dict.fromkeys(each.finding.code for each in told))
        words = f"found {len(told)} finding{'' if len(told) == 1 else 's'} ({codes}); more: "
        command = shlex.join([own_name(), "doctor", typed(state.run.path)])
        console.print(Text.assemble(words, (command, "bold")), soft_wrap=True)
    return code


def _refuse_late_surprises(request: Request, path: Path) -> None:
    """Raise now what a rank would find out minutes from here: a package, weights or room that are not there."""
    refuse_unusable(os.environ, kernels=request.cluster.device.kind == "cuda")
    refuse_missing_extras(request.plan)
    if request.recipe.data.samples.cache_features:
        refuse_trained(request.recipe)
    if folder := request.recipe.model.path:
        weight_files(model_folder(folder))
    if isinstance(request.spec, ModelSpec) and request.recipe.train.save:
        spec_to_hf(request.spec)
    if request.spec and request.outline:
        refuse_full_disk(path, _disk_bytes(request.recipe, request.outline.num_parameters, RunDirectory(path)))


def _disk_bytes(recipe: Recipe, num_parameters: int, run: RunDirectory) -> Bytes:
    """Return what the run is going to write to the disk beyond what it has there: an old checkpoint goes after a new
    one has come, so that there is one more than are kept."""
    moments = STATE_BYTES[recipe.train.optimizer.states]
    most = recipe.checkpoint.keep + 1 if recipe.checkpoint.every else 1
    coming = max(1, most - len(steps(run.checkpoints)))
    weights = 4 * num_parameters if recipe.train.save else 0
    return Bytes(coming * checkpoint_bytes(num_parameters, moment_bytes=moments) + weights)


def _ready(request: Request, console: Console) -> Recipe:
    with packing_bar(console) as progress:
        return ready(request.recipe, progress)
