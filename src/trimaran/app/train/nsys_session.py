"""`trimaran profile --nsys`: runs the ranks of a short run under nsys, and reads what it recorded."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimaran.app.recipe.prepare_data import check_data
from trimaran.app.train.nsys_request import STATS, NsysRequest
from trimaran.core import UserError
from trimaran.runs import RunDirectory, create_run
from trimaran.runs.read.traces import read_nsys_stats

POLL_SECONDS = 0.2
END_SECONDS = 10.0  # for the other ranks after one has failed
STATS_SECONDS = 600.0
EXAMPLE_PORT = 29500  # in the commands of a dry run


def planned_commands(request: NsysRequest, port: int = EXAMPLE_PORT) -> list[str]:
    """Return the command line of each rank, for a shell."""
    shared = request.worker_variables(os.environ)
    lines = []
    for rank in range(request.plan.mesh.world_size):
        variables = shared | request.variables(rank, port)
        pairs = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        lines.append(" ".join([*pairs, shlex.join(request.command(rank))]))
    return lines


def record(request: NsysRequest) -> RunDirectory:
    """Run all ranks to their end, and return the run. Raises UserError if one fails or nsys wrote no file."""
    check_data(request.recipe)
    run = create_run(request.path, request.recipe, request.plan)
    run.profiles.mkdir(exist_ok=True)
    run.agent_log.parent.mkdir(exist_ok=True)
    shared, port = {**os.environ, **request.worker_variables(os.environ)}, _free_port()
    with run.agent_log.open("ab", buffering=0) as log:
        log.write("".join(f"{line}\n" for line in planned_commands(request, port)).encode())
        ranks = [
            subprocess.Popen(
                request.command(rank),
                env=shared | request.variables(rank, port),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(request.plan.mesh.world_size)
        ]
    try:
        _wait(ranks, run)
    finally:
        _end(ranks)
    for rank in request.ranks:
        if not request.report(rank).is_file():
            raise UserError("D019", f"nsys wrote no file for rank {rank}", where=str(run.agent_log),
                            fix="see the end of this log")  # fmt: skip
    return run


def summaries(request: NsysRequest) -> list[dict[str, Any]]:
    """Return the NVTX ranges of each recorded rank by time, from `nsys stats`; without rows if it cannot say."""
    found = []
    for rank in request.ranks:
        rows = read_nsys_stats(_stats(request.nsys, request.report(rank)))
        found.append({"rank": rank, "ranges": [each.as_dict() | {"is_phase": each.is_phase} for each in rows]})
    return found


def _stats(nsys: str, report: Path) -> str:
    try:
        done = subprocess.run(
            [nsys, *STATS, str(report)], capture_output=True, text=True, timeout=STATS_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _wait(ranks: Sequence[subprocess.Popen[bytes]], run: RunDirectory) -> None:
    """Return when all ranks have ended well; raise when one has failed."""
    while (codes := [each.poll() for each in ranks]) != [0] * len(ranks):
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            raise UserError("D019", f"rank {failed[0]} ended with exit code {codes[failed[0]]} under nsys",
                            where=str(run.log(failed[0])), fix="see the end of this log")  # fmt: skip
        time.sleep(POLL_SECONDS)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, with what they have started."""
    left = [each for each in ranks if each.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for each in left:
            if each.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, number)
        until = time.monotonic() + END_SECONDS
        while time.monotonic() < until and any(each.poll() is None for each in left):
            time.sleep(POLL_SECONDS)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
