"""This process as one of the ranks that an outside torchrun started."""

import ctypes
import logging
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from trimaran.app.request.machine_check import refuse_unfit_machine
from trimaran.app.request.options import own_name
from trimaran.app.request.request import Request
from trimaran.app.session.prepare_data import ready
from trimaran.app.session.session import conclude
from trimaran.app.views.live import print_plain
from trimaran.app.views.run_state import RunState
from trimaran.core import EXIT_DONE
from trimaran.data import cache_folder
from trimaran.launch.replace_plan import keep_plan, keep_recipe
from trimaran.launch.sidecar_process import SidecarProcess
from trimaran.run import RunDirectory, create_run, holds_run, open_run, writing
from trimaran.run.compile_cache import compile_cache
from trimaran.train.process.rank_info import RankInfo, read_rank_info
from trimaran.train.worker import in_torchrun, run_worker

SECONDS_BETWEEN_LINES = 5.0
PR_SET_NAME = 15  # of Linux's prctl.h


def run_as_rank(request: Request, path: Path, *, as_json: bool, check: bool = True) -> int:
    """Train this rank's part in the run directory `path` of rank 0, which also says what came out.

    A run of the same recipe that is there already is gone on with: that is what torchrun's restarts, and whoever starts
    the same command again, want. With `check`, machines are looked at before anything is made.
    """

    def make() -> RunDirectory:
        asked = replace(request, recipe=ready(request.recipe))
        if not holds_run(path) or open_run(path).read_recipe() != asked.recipe:
            return create_run(path, asked.recipe, asked.plan)
        return _go_on(asked, open_run(path), replan=False)

    news = f"training in {path}; `{own_name()} watch {path}` shows it"
    return _sail(request, make, as_json=as_json, check=check, news=news)


def resume_as_rank(request: Request, run: RunDirectory, *, replan: bool, as_json: bool, check: bool = True) -> int:
    """Go on with this rank's part of `run`, with the request's plan if `replan`; rank 0 says what came out."""
    return _sail(request, lambda: _go_on(request, run, replan=replan), as_json=as_json, check=check)


def _go_on(request: Request, run: RunDirectory, *, replan: bool) -> RunDirectory:
    with writing(run):
        if replan or run.read_plan().mesh.world_size != request.plan.mesh.world_size:
            keep_plan(run, request.plan)
        keep_recipe(run, request.recipe)
    return run


def _sail(request: Request, make: Callable[[], RunDirectory], *, as_json: bool, check: bool, news: str = "") -> int:
    os.environ.update(compile_cache(os.environ))
    place = read_rank_info(os.environ, on_cpu=request.cluster.device.kind == "cpu")
    console = Console(stderr=as_json, highlight=False)
    look = partial(refuse_unfit_machine, request, where=f"node {platform.node()}") if check else None

    def make_known() -> RunDirectory:
        _tell_progress(console)
        if news:
            print_plain(console, news)
        return make()

    with in_torchrun(place, make_known, look=look) as (run, link), _sidecar(run, place):
        code = run_worker(run, place, cache=cache_folder(os.environ), link=link)
    return _conclude(run, place, code, console, as_json=as_json)


@contextmanager
def _sidecar(run: RunDirectory, place: RankInfo) -> Iterator[None]:
    """Have the first rank of each machine keep a sidecar, which samples it and, on the first machine, feeds sinks."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, f"trimaran-{place.rank}".encode())  # by which the sidecar knows ranks
    if place.local_rank != 0:
        yield
        return
    line = SidecarProcess(run, os.environ, above=os.getppid())
    line.start(int(os.environ.get("GROUP_RANK", place.rank // place.local_world_size)))
    try:
        yield
    finally:
        line.end()


def _conclude(run: RunDirectory, place: RankInfo, code: int, console: Console, *, as_json: bool) -> int:
    """Say what went wrong on this rank or, on rank 0, what came out; return the exit code."""
    state = RunState(run)
    state.refresh()
    for event in state.of_kind("error"):
        if event.rank == place.rank and "code" in event.data:
            print_plain(Console(stderr=True), "{code}: {what}\n  where: {where}\n  fix:   {fix}".format(**event.data))
    if place.rank != 0 or code != EXIT_DONE:
        return code
    return conclude(state, console, code, as_json=as_json)


def _tell_progress(console: Console) -> None:
    """Print what the trainer logs, a line every few seconds: the launcher outside owns the screen, so no live view."""
    handler = logging.Handler()
    last = -SECONDS_BETWEEN_LINES

    def tell(record: logging.LogRecord) -> None:
        nonlocal last
        if record.levelno > logging.INFO or record.created - last >= SECONDS_BETWEEN_LINES:
            last = record.created
            print_plain(console, record.getMessage())

    handler.emit = tell
    logger = logging.getLogger("trimaran")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
