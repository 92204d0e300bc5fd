"""Rank reports: the stacks and collectives that ranks write when something is wrong, and their process state.

`collect_reports` has ranks write them before they are killed. The heartbeat thread of each rank
(`train/process/heartbeat_thread.py`) writes `rank-N.json` and `rank-N.stacks.txt`; each node writes `process-N.json`.
`read_rank_reports` reads them; any file may be missing or incomplete. `show_ranks` shows them as text.
"""

import contextlib
import ctypes
import json
import linecache
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trimaran.core import open_regular_file, read_regular_bytes, read_regular_text, show_bytes, write_atomically
from trimaran.launch.supervise.node import Node, on_all_nodes
from trimaran.runs import HeartbeatBoard, RunDirectory

log = logging.getLogger(__name__)

MAX_HEARTBEAT_AGE_SECONDS = 1.5  # a heartbeat thread that has not run for so long will not answer a request
# Process states in /proc. An empty one stands for a process that is gone.
STOPPED_STATES, ENDED_STATES = frozenset("Tt"), frozenset(("Z", "X", ""))
DUMP_SECONDS = 0.3  # for a stack dump by faulthandler


@dataclass(slots=True)
class LocalRank:
    """A rank of this machine: its row in the heartbeat board, its process and process group, and its exit code."""

    rank: int
    local_rank: int
    pid: int = 0
    code: int | None = None


def collect_reports(
    run: RunDirectory,
    board: HeartbeatBoard,
    ranks: Sequence[LocalRank],
    folder: Path,
    *,
    seconds: float,
    gently: bool,
) -> None:
    """Have `ranks` write their reports into `folder`, and wait at most `seconds` for them."""
    # The heartbeat thread of a rank writes its report (`train/process/heartbeat_thread.py`). `process-N.json` has the
    # process states of a node whose first rank is N. A rank whose heartbeat thread does not run gets a signal, whose
    # handler writes its stacks without needing the main thread or the GIL. A stopped rank has to be continued for that;
    # with `gently` no rank gets the signal.
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
            each for each in pending if board.read(each.local_rank).answered < request and process_state(each.pid)
        ]
    if not gently:
        _dump_stacks(run, pending, sizes, folder)


def _dump_stacks(run: RunDirectory, ranks: Sequence[LocalRank], sizes: dict[int, int], folder: Path) -> None:
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


def _process(each: LocalRank) -> dict[str, Any]:
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


STATUS_FIELDS = {"memory": "VmRSS", "threads": "Threads", "blocked_signals": "SigBlk"}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


LOG_TAIL_BYTES = 16384
ATTEMPT_LINE = re.compile(r"^-- start \d+ --$", re.MULTILINE)  # separates the attempts in a rank's log
# Calls in which torch waits, or may wait, for other ranks or for the device.
COMMUNICATION = re.compile(r"/torch/distributed/|/torch/autograd/|\bdist\.|\.wait\(|\.backward\(|synchronize\(")
LIBRARY = re.compile(r"/torch/|/python3\.\d+/(?!(site|dist)-packages/)|^<frozen")
WRAPPERS = re.compile(r"/torch/(_ops|_compile|utils/|_dynamo/|nn/modules/module)|/contextlib\.py$|/functools\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCall:
    """One call on a thread's stack."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        short = "/".join(Path(self.file).parts[-3:])
        return f"{short}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective that a rank has begun, the `number`-th of its group, with the sizes and dtypes of its inputs."""

    group: str
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    state: str = "scheduled"
    done: bool = False
    time: float = 0.0

    def __str__(self) -> str:
        sizes = " and ".join("x".join(map(str, each)) or "a scalar" for each in self.sizes[:2])
        return f"{self.op} of {sizes}" if sizes else self.op


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportMoment:
    """On which machine and when a rank wrote its report."""

    host: str = ""
    time: float = 0.0  # seconds since the epoch
    starved: float = 0.0  # seconds until then in which its threads were ready to run and had no core


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What is known of one rank."""

    rank: int
    answered: bool = False  # its heartbeat thread wrote a report
    state: str = ""  # its process state in /proc
    moment: ReportMoment = ReportMoment()
    step: int = 0
    calls: tuple[StackCall, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # the ranks of each group that it is in
    operations: tuple[Operation, ...] = ()
    sent: Mapping[int, int] = field(default_factory=dict)  # messages that it has begun, by peer
    received: Mapping[int, int] = field(default_factory=dict)  # the same
    messages: tuple[Mapping[str, Any], ...] = ()
    log_tail: str = ""

    @cached_property
    def arrived(self) -> dict[str, int]:
        """The number of the last collective that the rank has begun, by group."""
        last: dict[str, int] = {}
        for each in self.operations:
            last[each.group] = max(each.number, last.get(each.group, 0))
        return last

    @property
    def innermost_call(self) -> StackCall | None:
        """The innermost call, without wrappers of torch and Python."""
        return next((call for call in self.calls if not WRAPPERS.search(call.file)), None)

    @property
    def user_call(self) -> StackCall | None:
        """The innermost call outside torch and Python's standard library: the line that a user looks at."""
        return next((call for call in self.calls if not LIBRARY.search(call.file)), self.innermost_call)

    @property
    def may_be_waiting(self) -> bool:
        """Whether the main thread may be waiting for other ranks or for the device."""
        call = self.innermost_call
        return call is None or bool(COMMUNICATION.search(call.file) or COMMUNICATION.search(call.text))


def read_rank_reports(run: RunDirectory, folder: Path, ranks: Iterable[int]) -> dict[int, RankReport]:
    """Return what is known of each of `ranks`, from the files in `folder` and the ranks' logs."""
    processes = _read_processes(folder)
    return {rank: _read_report(run, folder, rank, processes.get(rank, {}).get("state", "")) for rank in ranks}


def read_tail(path: Path) -> str:
    """Return the end of a file; an empty string if it cannot be read."""
    try:
        with open_regular_file(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _read_report(run: RunDirectory, folder: Path, rank: int, state: str) -> RankReport:
    log_tail = ATTEMPT_LINE.split(read_tail(run.log(rank)))[-1]
    tree = _load(folder / f"rank-{rank}.json")
    if isinstance(tree, dict):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            known = [
                each | {"sizes": tuple(map(tuple, each.get("sizes", ()))), "dtypes": tuple(each.get("dtypes", ()))}
                for each in tree["operations"]
            ]
            return RankReport(
                rank=rank,
                answered=True,
                state=state,
                moment=ReportMoment(**{key: tree[key] for key in ("host", "time", "starved") if key in tree}),
                step=tree["step"],
                calls=tuple(StackCall(**call) for call in tree["frames"]),
                groups={name: tuple(ranks) for name, ranks in tree["groups"].items()},
                operations=tuple(Operation(**each) for each in known),
                sent={int(peer): count for peer, count in tree["sent"].items()},
                received={int(peer): count for peer, count in tree["received"].items()},
                messages=tuple(tree.get("messages", ())),
                log_tail=log_tail,
            )
    dumped = _dumped_calls(read_tail(folder / f"rank-{rank}.stacks.txt"))
    # The calls of a traceback are the innermost last.
    trace = log_tail.rpartition("Traceback (most recent call last):")[2]
    found = re.findall(r'(?m)^  File "(.*)", line (\d+), in (.*)\n(?:    (.*))?', trace)
    raised = [StackCall(file=file, line=int(line), function=name, text=text) for file, line, name, text in found]
    calls = dumped or _dumped_calls(log_tail) or tuple(reversed(raised))
    return RankReport(rank=rank, state=state, calls=calls, log_tail=log_tail)


def _dumped_calls(text: str) -> tuple[StackCall, ...]:
    """Return the main thread's calls from the last dump of faulthandler, which writes the main thread last."""
    thread = re.split(r"(?m)^(?:Current thread|Thread|Stack) .*$", text)[-1]
    found = re.findall(r'(?m)^  File "(.*)", line (\d+) in (.*)$', thread)
    return tuple(
        StackCall(file=file, line=int(line), function=function, text=linecache.getline(file, int(line)).strip())
        for file, line, function in found
    )


def _read_processes(folder: Path) -> dict[int, dict[str, Any]]:
    """Return what is known of the processes of all ranks. Each node writes a file with its own."""
    trees = (_load(path) for path in sorted(folder.glob("process*.json")))
    rows = (row for tree in trees if isinstance(tree, list) for row in tree)
    return {row["rank"]: row for row in rows if isinstance(row, dict) and "rank" in row}


def _load(path: Path) -> Any:
    try:
        return json.loads(read_regular_text(path))
    except (OSError, ValueError):
        return None


ANSWER_SECONDS = 1.5
STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a device or a disk", "Z": "dead"}
MEMORY_TEXTS = {"resident": "resident", "allocated": "allocated on the device", "reserved": "reserved there"}


def show_ranks(run: RunDirectory, nodes: Sequence[Node], ranks: Sequence[int], *, of: str = "") -> None:
    """Collect the stacks and memory of `ranks`, write them to `logs/ranks.txt`, and log them.

    A follower node shows only its own ranks: `of` is its name, and the file is `logs/ranks-NAME.txt`.
    """
    name = f"-{of}" if of else ""
    folder, shown = run.incident(f"shown{name}"), run.ranks_shown.with_name(f"ranks{name}.txt")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # reports of an earlier request
        on_all_nodes(nodes, lambda node: node.collect_reports(folder, seconds=ANSWER_SECONDS, gently=True))
        text = describe_ranks(folder, ranks)
        write_atomically(shown, text)
        log.info("the ranks at this moment:\n%s", text)
    except OSError as error:
        log.warning("the state of the ranks could not be written: %s", error)


def describe_ranks(folder: Path, ranks: Sequence[int]) -> str:
    """Return the rank reports in `folder` as text, rank by rank; the process state for a rank without a report."""
    processes, texts = _read_processes(folder), []
    for rank in ranks:
        report, process = _load(folder / f"rank-{rank}.json"), processes.get(rank, {})
        if not report:
            state, why = STATES.get(str(process.get("state", "")), "native code holds the GIL"), "it is not running"
            if process.get("pid"):
                why = f"process {process['pid']}, {process.get('memory', '?')}: {state}"
            texts.append(f"rank {rank} does not answer ({why})\n")
            continue
        held = report.get("memory", {})
        memory = ", ".join(f"{show_bytes(held[key])} {text}" for key, text in MEMORY_TEXTS.items() if key in held)
        where = f"step {report.get('step')}, {report.get('section')} for {report.get('entered_seconds_ago', 0.0):.1f} s"
        stacks = ""
        with contextlib.suppress(OSError):
            stacks = read_regular_text(folder / f"rank-{rank}.stacks.txt", errors="replace")
        texts.append(f"rank {rank} on {report.get('host')}, process {report.get('pid')}: {where}; {memory}\n{stacks}")
    return "\n".join(texts)
