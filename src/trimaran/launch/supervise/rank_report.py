"""Reads rank reports: the stacks and collectives that ranks wrote when something was wrong, and their process state.

`collect_reports.py` fills a folder with them. The heartbeat thread of each rank (`train/process/heartbeat_thread.py`)
writes `rank-N.json` and `rank-N.stacks.txt`; each node writes `process-N.json`. Any file may be missing or incomplete.
"""

import contextlib
import json
import linecache
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import open_regular_file, read_regular_text
from trimaran.launch.supervise.collect_reports import STOPPED_STATES
from trimaran.runs import RunDirectory

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
        return f"{_short(self.file)}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


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
    """On which machine and when, in seconds since the epoch, a rank wrote its report.

    `starved`: the seconds until then in which its threads were ready to run and had no core.
    """

    host: str = ""
    time: float = 0.0
    starved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What is known of one rank. `answered`: its heartbeat thread wrote a report. `state`: its process state in /proc.

    `groups` are the ranks of each group it is in; `sent` and `received` count the messages it has begun, by peer.
    """

    rank: int
    answered: bool = False
    state: str = ""
    moment: ReportMoment = ReportMoment()
    step: int = 0
    calls: tuple[StackCall, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    operations: tuple[Operation, ...] = ()
    sent: Mapping[int, int] = field(default_factory=dict)
    received: Mapping[int, int] = field(default_factory=dict)
    messages: tuple[Mapping[str, Any], ...] = ()
    log_tail: str = ""

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED_STATES

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
    states = _states(folder)
    return {rank: _report(run, folder, rank, states.get(rank, "")) for rank in ranks}


def read_tail(path: Path) -> str:
    """Return the end of a file; an empty string if it cannot be read."""
    try:
        with open_regular_file(path) as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _report(run: RunDirectory, folder: Path, rank: int, state: str) -> RankReport:
    log_tail = ATTEMPT_LINE.split(read_tail(run.log(rank)))[-1]
    tree = _load(folder / f"rank-{rank}.json")
    if isinstance(tree, dict):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            return _parse(tree, rank, state, log_tail)
    dumped = _dumped_calls(read_tail(folder / f"rank-{rank}.stacks.txt"))
    calls = dumped or _dumped_calls(log_tail) or _traceback_calls(log_tail)
    return RankReport(rank=rank, state=state, calls=calls, log_tail=log_tail)


def _parse(tree: dict[str, Any], rank: int, state: str, log_tail: str) -> RankReport:
    return RankReport(
        rank=rank,
        answered=True,
        state=state,
        moment=ReportMoment(**{key: tree[key] for key in ("host", "time", "starved") if key in tree}),
        step=tree["step"],
        calls=tuple(StackCall(**call) for call in tree["frames"]),
        groups={name: tuple(ranks) for name, ranks in tree["groups"].items()},
        operations=tuple(_operation(each) for each in tree["operations"]),
        sent={int(peer): count for peer, count in tree["sent"].items()},
        received={int(peer): count for peer, count in tree["received"].items()},
        messages=tuple(tree.get("messages", ())),
        log_tail=log_tail,
    )


def _dumped_calls(text: str) -> tuple[StackCall, ...]:
    """Return the main thread's calls from the last dump of faulthandler, which writes the main thread last."""
    thread = re.split(r"(?m)^(?:Current thread|Thread|Stack) .*$", text)[-1]
    found = re.findall(r'(?m)^  File "(.*)", line (\d+) in (.*)$', thread)
    return tuple(
        StackCall(file=file, line=int(line), function=function, text=linecache.getline(file, int(line)).strip())
        for file, line, function in found
    )


def _traceback_calls(log_tail: str) -> tuple[StackCall, ...]:
    """Return the calls of the last traceback in a log, innermost first."""
    trace = log_tail.rpartition("Traceback (most recent call last):")[2]
    found = re.findall(r'(?m)^  File "(.*)", line (\d+), in (.*)\n(?:    (.*))?', trace)
    calls = [StackCall(file=file, line=int(line), function=name, text=text) for file, line, name, text in found]
    return tuple(reversed(calls))


def _operation(tree: dict[str, Any]) -> Operation:
    sizes = tuple(tuple(each) for each in tree.get("sizes", ()))
    return Operation(**tree | {"sizes": sizes, "dtypes": tuple(tree.get("dtypes", ()))})


def _states(folder: Path) -> dict[int, str]:
    """Return the process states of all ranks. Each node writes a file with its own."""
    found: dict[int, str] = {}
    for path in sorted(folder.glob("process*.json")):
        tree = _load(path)
        rows = tree if isinstance(tree, list) else []
        found |= {row["rank"]: row.get("state", "") for row in rows if isinstance(row, dict) and "rank" in row}
    return found


def _load(path: Path) -> Any:
    try:
        return json.loads(read_regular_text(path))
    except (OSError, ValueError):
        return None


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
