"""Evidence from ranks that live, also from those that stand still, before they are killed."""

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

from trimaran.run import HeartbeatBoard, RunDirectory

DEAF_SECONDS = 1.5  # a heartbeat thread that has not run for so long will not hear a question
STOPPED, ENDED = frozenset("Tt"), frozenset(("Z", "X", ""))  # the kernel's letters; an empty one is of no process
DUMP_SECONDS = 0.3  # for a stack dump from below Python


@dataclass(frozen=True, slots=True)
class ProcessObservation:
    """A rank that is asked: its row on the board, its process."""

    rank: int
    place: int
    pid: int


def collect_reports(
    run: RunDirectory,
    board: HeartbeatBoard,
    ranks: Sequence[ProcessObservation],
    folder: Path,
    *,
    seconds: float,
    gently: bool,
) -> None:
    """Have the rank report of `ranks` filed in `folder`, see `train/process/heartbeat_thread.py`; waits at most `seconds` for them.

    `process-N.json` is what the kernel says of the processes of a node, whose first rank is N. A rank whose heartbeat thread is
    silent is made to write its stacks by a signal, whose handler needs neither the rank's loop nor its interpreter
    lock; but one that was stopped has to go on for that, so it is not asked when it is to be done `gently`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    processes = {each.rank: _process(each) for each in ranks}
    if ranks:
        _write(folder / f"process-{min(processes)}.json", [*processes.values()])
    for each in ranks:  # one file each: nodes may ask their ranks for different things at the same time
        _write(run.question(each.rank), {"folder": str(folder.relative_to(run.path))})
    sizes = {each.rank: _size(run.stacks(each.rank)) for each in ranks}
    question, asked = board.ask(), time.monotonic()
    running = [each for each in ranks if processes[each.rank]["state"] not in STOPPED]
    hearing = [each for each in running if board.read(each.place).alive > asked - DEAF_SECONDS]
    if not gently:
        _dump_stacks(run, [each for each in ranks if each not in hearing], sizes, folder)
    while hearing and time.monotonic() < asked + seconds:
        time.sleep(0.01)
        hearing = [each for each in hearing if board.read(each.place).answered < question and not _is_gone(each.pid)]
    if not gently:
        _dump_stacks(run, hearing, sizes, folder)


def _dump_stacks(run: RunDirectory, ranks: Sequence[ProcessObservation], sizes: dict[int, int], folder: Path) -> None:
    """Have `ranks` write their stacks from below Python, and copy what is new of them into `folder`."""
    for each in ranks:
        # To the main thread: another one that takes the signal has no Python stack to tell of.
        ctypes.CDLL(None).tgkill(each.pid, each.pid, int(signal.SIGUSR2))
        with contextlib.suppress(ProcessLookupError):
            os.kill(each.pid, signal.SIGCONT)  # one that was stopped takes the signal when it goes on
    until = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < until and any(_size(run.stacks(each.rank)) <= sizes[each.rank] for each in ranks):
        time.sleep(0.01)
    time.sleep(0.02 if ranks else 0.0)  # for the rest of a dump that has begun
    for each in ranks:
        with contextlib.suppress(FileNotFoundError):
            if data := run.stacks(each.rank).read_bytes()[sizes[each.rank] :]:
                (folder / f"rank-{each.rank}.stacks.txt").write_bytes(data)


def _process(each: ProcessObservation) -> dict[str, Any]:
    """Return what the kernel says of a rank's process; an empty `state` when it is gone."""
    found: dict[str, Any] = {"rank": each.rank, "pid": each.pid, "state": "", "wchan": ""}
    with contextlib.suppress(OSError, IndexError):
        found["state"] = process_state(each.pid)
        found["wchan"] = Path(f"/proc/{each.pid}/wchan").read_text(encoding="utf-8", errors="replace")
        status = Path(f"/proc/{each.pid}/status").read_text(encoding="utf-8", errors="replace")
        lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        found |= {key: lines[name].strip() for key, name in STATUS.items() if name in lines}
    return found


def process_state(pid: int) -> str:
    """Return the kernel's letter for what a process does; an empty one when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def queued_seconds(pid: int) -> float:
    """Return for how long the main thread of a process could have run and was given no core; 0 where nobody counts."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text(encoding="utf-8").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def process_group(pid: int) -> int | None:
    """Return the group that a process belongs to; None when it is gone."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


STATUS = {"memory": "VmRSS", "threads": "Threads", "blocked_signals": "SigBlk"}


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _write(path: Path, tree: Any) -> None:
    """Write JSON so that nobody reads half of it."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(json.dumps(tree), encoding="utf-8")
    draft.replace(path)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
