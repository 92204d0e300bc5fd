"""Collects rank reports from live and hung ranks before they are killed, and reads process states from /proc."""

import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs import HeartbeatBoard, RunDirectory

MAX_HEARTBEAT_AGE_SECONDS = 1.5  # a heartbeat thread that has not run for so long will not answer a request
# Process states in /proc. An empty one stands for a process that is gone.
STOPPED_STATES, ENDED_STATES = frozenset("Tt"), frozenset(("Z", "X", ""))
DUMP_SECONDS = 0.3  # for a stack dump by faulthandler


@dataclass(frozen=True, slots=True)
class ReportTarget:
    """A rank to report, its row in the heartbeat board and its process."""

    rank: int
    local_rank: int
    pid: int


def collect_reports(
    run: RunDirectory,
    board: HeartbeatBoard,
    ranks: Sequence[ReportTarget],
    folder: Path,
    *,
    seconds: float,
    gently: bool,
) -> None:
    """Have `ranks` write their reports into `folder`, and wait at most `seconds` for them.

    The heartbeat thread of a rank writes its report (`train/process/heartbeat_thread.py`). `process-N.json` has the
    process states of a node whose first rank is N. A rank whose heartbeat thread does not run gets a signal, whose
    handler writes its stacks without needing the main thread or the GIL. A stopped rank has to be continued for that;
    with `gently` no rank gets the signal.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = {each.rank: _process(each) for each in ranks}
    if ranks:
        write_atomically(folder / f"process-{min(processes)}.json", json.dumps([*processes.values()]))
    for each in ranks:  # one file for each rank: nodes may request different folders at the same time
        write_atomically(run.report_request(each.rank), json.dumps({"folder": str(folder.relative_to(run.path))}))
    sizes = {each.rank: _size(run.stacks(each.rank)) for each in ranks}
    request, requested = board.request_reports(), time.monotonic()
    running = [each for each in ranks if processes[each.rank]["state"] not in STOPPED_STATES]
    oldest = requested - MAX_HEARTBEAT_AGE_SECONDS
    pending = [each for each in running if board.read(each.local_rank).alive > oldest]
    if not gently:
        _dump_stacks(run, [each for each in ranks if each not in pending], sizes, folder)
    while pending and time.monotonic() < requested + seconds:
        time.sleep(0.01)
        pending = [
            each for each in pending if board.read(each.local_rank).answered < request and not _is_gone(each.pid)
        ]
    if not gently:
        _dump_stacks(run, pending, sizes, folder)


def _dump_stacks(run: RunDirectory, ranks: Sequence[ReportTarget], sizes: dict[int, int], folder: Path) -> None:
    """Have faulthandler write the stacks of `ranks`, and copy what is new into `folder`."""
    for each in ranks:
        # To the main thread: another thread that handles the signal may have no Python stack.
        ctypes.CDLL(None).tgkill(each.pid, each.pid, int(signal.SIGUSR2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGCONT)  # a stopped process handles the signal once it continues
    until = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < until and any(_size(run.stacks(each.rank)) <= sizes[each.rank] for each in ranks):
        time.sleep(0.01)
    time.sleep(0.02 if ranks else 0.0)  # for the rest of a dump that has begun
    for each in ranks:
        with contextlib.suppress(FileNotFoundError):
            if data := read_regular_bytes(run.stacks(each.rank))[sizes[each.rank] :]:
                (folder / f"rank-{each.rank}.stacks.txt").write_bytes(data)


def _process(each: ReportTarget) -> dict[str, Any]:
    """Return what /proc says about a rank's process; `state` is empty if it is gone."""
    facts: dict[str, Any] = {"rank": each.rank, "pid": each.pid, "state": "", "wchan": ""}
    with contextlib.suppress(OSError, IndexError):
        facts["state"] = process_state(each.pid)
        facts["wchan"] = Path(f"/proc/{each.pid}/wchan").read_text(encoding="utf-8", errors="replace")
        status = Path(f"/proc/{each.pid}/status").read_text(encoding="utf-8", errors="replace")
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        facts |= {key: lines[name].strip() for key, name in STATUS_FIELDS.items() if name in lines}
    return facts


def process_state(pid: int) -> str:
    """Return the state letter of a process in /proc; an empty string if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def queued_seconds(pid: int) -> float:
    """Return for how long the main thread of a process was ready to run and had no core; 0 if that is unknown."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def process_group(pid: int) -> int | None:
    """Return the process group of a process; None if it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


STATUS_FIELDS = {"memory": "VmRSS", "threads": "Threads", "blocked_signals": "SigBlk"}


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
