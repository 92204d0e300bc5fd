"""One run on this machine, from packed data to the last line on the screen."""

import json
import os
from pathlib import Path

import typer
from rich.console import Console

from trimaran.app.cli.live import follow, print_plain
from trimaran.app.cli.packing import packing_bar
from trimaran.app.cli.request import Request
from trimaran.app.cli.state import RunState
from trimaran.app.cli.stop_button import StopButton
from trimaran.app.cli.summary import explain_failure, summarise
from trimaran.core import Bytes
from trimaran.core.extras import refuse_missing_extras
from trimaran.data import TokenShards, cache_folder, prepare
from trimaran.launch import start_local
from trimaran.models import model_folder, spec_to_hf, weight_files
from trimaran.telemetry import create_run, refuse_full_disk


def run_here(request: Request, path: Path, *, as_json: bool, quiet: bool) -> int:
    """Train `request` in the run directory `path` and return the exit code.

    With `as_json` standard output is for the one answer at the end, and the show goes to standard error.
    """
    console = Console(stderr=as_json, highlight=False)
    _refuse_late_surprises(request, path)
    _prepare_data(request, console)
    run = create_run(path, request.recipe, request.plan)
    state = RunState(run)
    ranks = start_local(
        run,
        world_size=request.plan.mesh.world_size,
        on_cpu=request.cluster.device.kind == "cpu",
        deterministic=request.recipe.train.deterministic,
    )
    with StopButton(ranks, lambda words: print_plain(console, words)) as button:

        def over() -> bool:
            button.act()
            return ranks.poll() is not None

        follow(state, Console(quiet=True) if quiet else console, over=over)
    code = ranks.wait()
    if button.exit_code is not None and state.status != "done":
        code = button.exit_code
    elif code:
        code = explain_failure(state, console)
    return conclude(state, console, code, as_json=as_json)


def conclude(state: RunState, console: Console, code: int, *, as_json: bool) -> int:
    """Say what came out of a run, for a person or as one JSON object, and return the exit code."""
    if as_json:
        typer.echo(json.dumps(state.as_dict() | {"exit": code}))
    elif state.status in ("done", "stopped"):
        summarise(state, console)
    return code


def _refuse_late_surprises(request: Request, path: Path) -> None:
    """Raise now what a rank would find out minutes from here: a package, weights or room that are not there."""
    refuse_missing_extras(request.plan)
    if folder := request.recipe.model.path:
        weight_files(model_folder(folder))
    if request.spec and request.recipe.train.save:
        spec_to_hf(request.spec)
        refuse_full_disk(path, Bytes(4 * request.spec.num_parameters))


def _prepare_data(request: Request, console: Console) -> None:
    """Pack what is not packed yet, so that the ranks find it, and refuse tokens that the model does not know."""
    with packing_bar(console) as progress:
        path = prepare(request.recipe.data, cache=cache_folder(os.environ), progress=progress)
    if request.spec:
        TokenShards.open(path).refuse_unknown(request.spec.vocab)
