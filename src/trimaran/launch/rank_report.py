"""What ranks said about themselves when something was wrong, and what was seen of them from outside.

`collect_reports.py` has a folder filled with it: for each rank `rank-N.json` and `rank-N.stacks.txt` by its heartbeat thread
(`train/process/heartbeat_thread.py`), and for each node `process-N.json`. Any of it may be missing or half-written.
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

from trimaran.run import RunDirectory

STOPPED = frozenset("Tt")
LAST_BYTES = 16384
ATTEMPT = re.compile(r"^-- start \d+ --$", re.MULTILINE)  # where the fork server starts a rank anew in the same log
# Where torch waits, or may wait, for other ranks or for the device.
COMMUNICATION = re.compile(r"/torch/distributed/|/torch/autograd/|\bdist\.|\.wait\(|\.backward\(|synchronize\(")
LIBRARY = re.compile(r"/torch/|/python3\.\d+/(?!(site|dist)-packages/)|^<frozen")
THROUGH = re.compile(r"/torch/(_ops|_compile|utils/|_dynamo/|nn/modules/module)|/contextlib\.py$|/functools\.py$")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCall:
    """One call of a thread."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}" + (f": {self.text}" if self.text else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A collective that a rank has begun, the `number`-th of its group. Sizes and dtypes are those of its inputs."""

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
    """On which machine and when a rank spoke, in seconds since the epoch, and for how many seconds until then its
    threads were `starved`: ready to run while others had the cores."""

    host: str = ""
    time: float = 0.0
    starved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What is known of one rank. `answered`: its heartbeat thread could speak. `state` is the kernel's letter for its process.

    `groups` are the ranks of each group it is in; `sent` and `received` count the messages it has begun, by peer.
    `words` is the end of its log.
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
    words: str = ""

    @property
    def stopped(self) -> bool:
        return self.state in STOPPED

    @cached_property
    def arrived(self) -> dict[str, int]:
        """The number of the last collective that the rank has begun, by group."""
        last: dict[str, int] = {}
        for each in self.operations:
            last[each.group] = max(each.number, last.get(each.group, 0))
        return last

    @property
    def site(self) -> StackCall | None:
        """The innermost call that says something: torch's own corridors are passed by."""
        return next((call for call in self.calls if not THROUGH.search(call.file)), None)

    @property
    def place(self) -> StackCall | None:
        """The innermost call outside of torch and Python's own library: the line a person would look at."""
        return next((call for call in self.calls if not LIBRARY.search(call.file)), self.site)

    @property
    def communicates(self) -> bool:
        """Whether the rank's loop may be waiting for others where it stands."""
        return self.site is None or bool(COMMUNICATION.search(self.site.file) or COMMUNICATION.search(self.site.text))


def read_rank_reports(run: RunDirectory, folder: Path, ranks: Iterable[int]) -> dict[int, RankReport]:
    """Return what is known of each of `ranks`, from the answers in `folder` and the ranks' logs."""
    states = _states(folder)
    return {rank: _report(run, folder, rank, states.get(rank, "")) for rank in ranks}


def last_words(path: Path) -> str:
    """Return the end of a log, or nothing."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LAST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _report(run: RunDirectory, folder: Path, rank: int, state: str) -> RankReport:
    words = ATTEMPT.split(last_words(run.log(rank)))[-1]
    tree = _load(folder / f"rank-{rank}.json")
    if isinstance(tree, dict):
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            return _parse(tree, rank, state, words)
    calls = (
        _dumped_calls(last_words(folder / f"rank-{rank}.stacks.txt")) or _dumped_calls(words) or _raised_calls(words)
    )
    return RankReport(rank=rank, state=state, calls=calls, words=words)


def _parse(tree: dict[str, Any], rank: int, state: str, words: str) -> RankReport:
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
        words=words,
    )


def _dumped_calls(text: str) -> tuple[StackCall, ...]:
    """Return the main thread's calls from what faulthandler wrote last; of several threads the oldest comes last."""
    thread = re.split(r"(?m)^(?:Current thread|Thread|Stack) .*$", text)[-1]
    found = re.findall(r'(?m)^  File "(.*)", line (\d+) in (.*)$', thread)
    return tuple(
        StackCall(file=file, line=int(line), function=function, text=linecache.getline(file, int(line)).strip())
        for file, line, function in found
    )


def _raised_calls(words: str) -> tuple[StackCall, ...]:
    """Return the calls of the last traceback in a log."""
    trace = words.rpartition("Traceback (most recent call last):")[2]
    found = re.findall(r'(?m)^  File "(.*)", line (\d+), in (.*)\n(?:    (.*))?', trace)
    calls = [StackCall(file=file, line=int(line), function=name, text=text) for file, line, name, text in found]
    return tuple(reversed(calls))


def _operation(tree: dict[str, Any]) -> Operation:
    sizes = tuple(tuple(each) for each in tree.get("sizes", ()))
    return Operation(**tree | {"sizes": sizes, "dtypes": tuple(tree.get("dtypes", ()))})


def _states(folder: Path) -> dict[int, str]:
    """Return the kernel's state letters of all ranks; each node files its own."""
    found: dict[int, str] = {}
    for path in sorted(folder.glob("process*.json")):
        tree = _load(path)
        rows = tree if isinstance(tree, list) else []
        found |= {row["rank"]: row.get("state", "") for row in rows if isinstance(row, dict) and "rank" in row}
    return found


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _short(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
