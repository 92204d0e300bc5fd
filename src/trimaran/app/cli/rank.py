"""This process as one of the ranks that an outside torchrun started."""

import logging
import os
from pathlib import Path

from rich.console import Console

from trimaran.app.cli.live import print_plain
from trimaran.app.cli.options import own_name
from trimaran.app.cli.request import Request
from trimaran.app.cli.session import conclude
from trimaran.app.cli.state import RunState
from trimaran.core import EXIT_DONE
from trimaran.data import cache_folder
from trimaran.telemetry import open_run
from trimaran.train.place import place_of
from trimaran.train.worker import run_in_torchrun

SECONDS_BETWEEN_LINES = 5.0


def run_as_rank(request: Request, path: Path, *, as_json: bool) -> int:
    """Train this rank's part in the run directory `path` of rank 0, which also says what came out."""
    place = place_of(os.environ, on_cpu=request.cluster.device.kind == "cpu")
    console = Console(stderr=as_json, highlight=False)
    if place.rank == 0:
        _tell_progress(console)
        print_plain(console, f"training in {path}; `{own_name()} watch {path}` shows it")
    code = run_in_torchrun(request.recipe, request.plan, path, place, cache=cache_folder(os.environ))
    state = RunState(open_run(path))
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
