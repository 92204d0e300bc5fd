"""A run on this machine: prepares the data, starts the supervisor, shows the run and prints the result."""

import json
import os
import shlex
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile

import typer
from rich.console import Console
from rich.text import Text

from trimaran.app.recipe.dry_run import refuse_before_start
from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.recipe.prepare_data import prepare_data
from trimaran.app.recipe.request import Request
from trimaran.app.runs.live import follow, print_plain
from trimaran.app.runs.run_findings import FindingsPoller, read_findings
from trimaran.app.runs.run_state import RunState
from trimaran.app.runs.summary import explain_failure, summarise
from trimaran.app.show.clean_console import open_console
from trimaran.app.show.progress_bar import progress_bar
from trimaran.app.train.autopilot_thread import AutopilotThread
from trimaran.app.train.moved_directory import MovedDirectoryNotice, end_deleted, is_deleted, moved_run
from trimaran.app.train.schedule_change import schedule_notice
from trimaran.app.train.stop_signals import PausedSupervisorNotice, ShowRanksSignal, StopSignals
from trimaran.checkpoint.step_dirs import complete_steps
from trimaran.core import EXIT_AGAIN, EXIT_DONE, Bytes, Recipe
from trimaran.cost import STATE_BYTES
from trimaran.cost.goodput import checkpoint_bytes
from trimaran.launch.supervise.local import LocalRun, start_local
from trimaran.runs import RunDirectory, create_run, refuse_full_disk, writing
from trimaran.runs.compile_cache import refuse_unusable
from trimaran.runs.held_directory import HeldDirectory
from trimaran.runs.run_requests import replace_plan, replace_recipe

POLL_SECONDS = 0.1


def run_here(request: Request, path: Path, *, as_json: bool, quiet: bool, warm: bool = False) -> int:
    """Train `request` in the run directory `path` and return the exit code.

    With `as_json`, standard output is for the JSON result only, and the live view goes to standard error. `warm`: use
    the user's warm fork server.
    """
    console = open_console(stderr=as_json)
    return run_and_show(create_checked_run(request, path, console), console, as_json=as_json, quiet=quiet, warm=warm)


def create_checked_run(request: Request, path: Path, console: Console) -> RunDirectory:
    """Check that `request` can run here, prepare its data, and create the run directory."""
    _check_before_start(request, path)
    return create_run(path, _prepare_data(request, console), request.plan)


def resume_here(
    request: Request, run: RunDirectory, *, replan: bool, as_json: bool, quiet: bool, warm: bool = False
) -> int:
    """Resume `run` with the recipe of `request`, and with its plan if `replan`, and return the exit code."""
    console = open_console(stderr=as_json)
    _check_before_start(request, run.path)
    recipe = _prepare_data(request, console)
    if notice := schedule_notice(run, recipe):
        print_plain(console, notice)
    with writing(run):
        TemporaryFile(dir=run.path).close()  # a supervisor that cannot write cannot even report it
        if replan:
            replace_plan(run, request.plan)
        replace_recipe(run, recipe)  # last: if this process is killed in between, the next resume replans again
    return run_and_show(run, console, as_json=as_json, quiet=quiet, warm=warm)


def run_and_show(run: RunDirectory, console: Console, *, as_json: bool, quiet: bool, warm: bool = False) -> int:
    """Start the supervisor of `run`, show the run until it ends, and return the exit code."""
    state, held = RunState(run), HeldDirectory(run.path)
    held.watch()
    state.refresh()  # earlier events are not shown again
    ranks = start_local(run, warm=warm)
    poller = None if quiet else FindingsPoller(run, at_once=False)
    moved = MovedDirectoryNotice(held, lambda text: print_plain(console, text))
    paused = PausedSupervisorNotice(ranks, lambda text: print_plain(console, text))
    show_ranks = ShowRanksSignal(ranks, lambda text: print_plain(console, text))
    with (
        ExitStack() as at_the_end,
        show_ranks,
        AutopilotThread(run),
        StopSignals(ranks, lambda text: print_plain(console, text)) as stop,
    ):
        at_the_end.callback(held.stop_watching)

        def has_ended() -> bool:
            stop.handle()
            paused.check()
            show_ranks.handle()
            return ranks.poll() is not None

        follow(
            state,
            Console(quiet=True) if quiet else console,
            has_ended=lambda: has_ended() or moved.check(),
            poller=poller,
        )
        while not has_ended():  # the files at the run's path are not its own any more
            time.sleep(POLL_SECONDS)
    return _end(state, held, ranks, console, stopped_by=stop.exit_code, as_json=as_json)


def _end(
    state: RunState, held: HeldDirectory, ranks: LocalRun, console: Console, *, stopped_by: int | None, as_json: bool
) -> int:
    """Print the result of a run that has ended, where its directory is now, and return the exit code."""
    code = ranks.wait()
    if is_deleted(held):
        return end_deleted(held, code, as_json=as_json)
    if code not in (EXIT_DONE, EXIT_AGAIN) and (error := ranks.read_error()):
        raise error
    if (run := moved_run(held)) is not None:
        print_plain(console, held.explain("moved"))
        state = RunState(run)
    state.refresh()
    if stopped_by is not None and code != EXIT_DONE:
        code = stopped_by
    elif code not in (EXIT_DONE, EXIT_AGAIN):
        code = explain_failure(state, console, code)
    return print_result(state, console, code, as_json=as_json)


def print_result(state: RunState, console: Console, code: int, *, as_json: bool) -> int:
    """Print the result of a run, as text or as one JSON object, and return the exit code."""
    findings, error, _ = read_findings(state.run)
    if as_json:
        keys = {"findings": [each.as_dict() for each in findings], "doctor_trouble": error}
        typer.echo(json.dumps(state.as_dict() | {"exit": code} | keys))
        return code
    if state.status in ("done", "stopped"):
        summarise(state, console)
    if findings:
        codes = ", ".join(dict.fromkeys(each.finding.code for each in findings))
        text = f"{len(findings)} finding{'' if len(findings) == 1 else 's'} ({codes}); details: "
        command = shlex.join([program_name(), "doctor", path_argument(state.run.path)])
        console.print(Text.assemble(text, (command, "bold")), soft_wrap=True)
    return code


def _check_before_start(request: Request, path: Path) -> None:
    """Raise now what a rank would find minutes later: a missing package, missing weights, a full disk."""
    refuse_unusable(os.environ, kernels=request.cluster.device.traits.has_kernels)
    refuse_before_start(request)
    if request.spec and request.outline:
        refuse_full_disk(path, _disk_bytes(request.recipe, request.outline.saved_parameters, RunDirectory(path)))


def _disk_bytes(recipe: Recipe, num_parameters: int, run: RunDirectory) -> Bytes:
    """Return the bytes that the run will add to the disk.

    An old checkpoint is deleted after the new one is complete, so there is one more than `checkpoint.keep`; and another
    one that is being uploaded.
    """
    moments = STATE_BYTES[recipe.train.optimizer.states]
    most = recipe.checkpoint.keep + 1 + bool(recipe.checkpoint.store) if recipe.checkpoint.every else 1
    added = 0 if recipe.checkpoint.is_off else max(1, most - len(complete_steps(run.checkpoints)))
    weights = 4 * num_parameters if recipe.train.save else 0
    return Bytes(added * checkpoint_bytes(num_parameters, moment_bytes=moments) + weights)


def _prepare_data(request: Request, console: Console) -> Recipe:
    with progress_bar(console) as progress:
        return prepare_data(request.recipe, progress, partial(print_plain, console))
