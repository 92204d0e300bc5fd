"""Runs this process as one rank of an outside torchrun."""

import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from trimaran.app.machine.machine_check import refuse_unfit_machine
from trimaran.app.recipe.options import program_name
from trimaran.app.recipe.prepare_data import prepare_data
from trimaran.app.recipe.request import Request
from trimaran.app.runs.live import print_plain
from trimaran.app.runs.run_state import RunState
from trimaran.app.show.clean_console import open_console
from trimaran.app.show.error_language import chosen_language, error_lines, shown_errors
from trimaran.app.train.session import print_result, schedule_notice
from trimaran.core import EXIT_DONE, Recipe, UserError
from trimaran.data import cache_folder
from trimaran.launch.supervise.side_processes import SidecarProcess, autopilot_process
from trimaran.models import model_folder
from trimaran.runs import RunDirectory, compile_cache, create_run, holds_run, open_run, writing
from trimaran.runs.process_control import raise_soft_limits, set_process_name
from trimaran.runs.run_requests import replace_plan, replace_recipe
from trimaran.train import RankInfo, read_rank_info, run_worker
from trimaran.train.process.torchrun_ranks import open_torchrun_run

SECONDS_BETWEEN_LINES = 5.0
EXIT_CONNECTION_LOST = 1  # a fault, not a user's mistake of this rank


def run_as_rank(request: Request, path: Path, *, as_json: bool, check: bool = True) -> int:
    """Train as this rank in `path`, or resume there if torchrun restarts us; rank 0 prints. Return the exit code."""

    def open_or_create() -> RunDirectory:
        notify = partial(print_plain, open_console(stderr=as_json))
        ready = replace(request, recipe=prepare_data(as_recorded(request.recipe, path), notify=notify))
        if not holds_run(path) or open_run(path).read_recipe() != ready.recipe:
            return create_run(path, ready.recipe, ready.plan)
        return _update_run(ready, open_run(path), replan=False)

    notice = f"training in {path}; `{program_name()} watch {path}` shows it"
    return _run_rank(request, open_or_create, as_json=as_json, check=check, notice=notice)


def as_recorded(recipe: Recipe, path: Path) -> Recipe:
    """Return the recipe with bytes and template of an older run in `path`, which recorded no tokenizer."""
    model = recipe.model.path
    is_default = model is not None and recipe.data.tokenizer == str(model_folder(model).absolute())
    if not is_default or not holds_run(path):
        return recipe
    old = open_run(path).read_recipe().data
    if old.tokenizer is not None:
        return recipe
    samples = recipe.data.samples.model_copy(update={"template": old.samples.template})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": None, "samples": samples})})


def resume_as_rank(request: Request, run: RunDirectory, *, replan: bool, as_json: bool, check: bool = True) -> int:
    """Resume `run` as this rank, with the request's plan if `replan`; rank 0 prints the result."""
    notice = schedule_notice(run, request.recipe)
    make = partial(_update_run, request, run, replan=replan)
    return _run_rank(request, make, as_json=as_json, check=check, notice=notice)


def _update_run(request: Request, run: RunDirectory, *, replan: bool) -> RunDirectory:
    with writing(run):
        if replan or run.read_plan().mesh.world_size != request.plan.mesh.world_size:
            replace_plan(run, request.plan)
        replace_recipe(run, request.recipe)
    return run


def _run_rank(
    request: Request, make: Callable[[], RunDirectory], *, as_json: bool, check: bool, notice: str = ""
) -> int:
    raise_soft_limits()
    os.environ.update(compile_cache(os.environ))
    rank_info = read_rank_info(os.environ, on_cpu=request.cluster.device.traits.shares_cores)
    console = open_console(stderr=as_json)
    check_machine = partial(refuse_unfit_machine, request, where=f"node {platform.node()}") if check else None

    def make_and_show() -> RunDirectory:
        handler = logging.Handler()
        last = -SECONDS_BETWEEN_LINES

        def emit(record: logging.LogRecord) -> None:
            nonlocal last
            if record.levelno > logging.INFO or record.created - last >= SECONDS_BETWEEN_LINES:
                last = record.created
                print_plain(console, record.getMessage())

        handler.emit = emit
        logger = logging.getLogger("trimaran")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        if notice:
            print_plain(console, notice)
        return make()

    try:
        with open_torchrun_run(rank_info, make_and_show, check=check_machine) as (run, link), _sidecar(run, rank_info):
            code = run_worker(run, rank_info, cache=cache_folder(os.environ), link=link, environment=os.environ)
    except dist.DistError as error:
        print(
            f"rank {rank_info.rank} lost the connection to the other ranks before training began "
            f"({str(error).strip().partition(chr(10))[0]}); the output of the rank that ended first says why",
            file=sys.stderr,
        )
        return EXIT_CONNECTION_LOST
    state, language = RunState(RunDirectory(run.location)), chosen_language(os.environ)
    state.refresh()
    for event in state.events_of_kind("error"):
        if event.rank == rank_info.rank and "code" in event.data:
            data = event.data
            shown_error = UserError(data["code"], data["what"], where=data["where"], fix=data["fix"])
            (shown,) = shown_errors(shown_error, language)
            print_plain(open_console(stderr=True), f"{shown.code}{error_lines(shown, language)}".rstrip("\n"))
    if rank_info.rank != 0 or code != EXIT_DONE:
        return code
    return print_result(state, console, code, as_json=as_json)


@contextmanager
def _sidecar(run: RunDirectory, rank_info: RankInfo) -> Iterator[None]:
    """Run a sidecar on the first rank of each machine: it samples the machine and, on the first, feeds the sinks."""
    set_process_name(f"trimaran-{rank_info.rank}")  # the sidecar finds ranks by this name
    if rank_info.local_rank != 0:
        yield
        return
    line = SidecarProcess(run, os.environ, above=os.getppid())
    line.start(int(os.environ.get("GROUP_RANK", rank_info.rank // rank_info.local_world_size)))
    try:
        with autopilot_process(run, os.environ) if rank_info.rank == 0 else nullcontext():
            yield
    finally:
        line.end()
