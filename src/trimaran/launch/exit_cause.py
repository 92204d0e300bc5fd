"""How a rank's end is read: exit codes, error events and last words, each in a table."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_USER, Cause

CGROUP = Path("/sys/fs/cgroup")

# A rank whose error says this has only lost the others. Such ranks are victims, unless nobody else is to blame.
LOST_OTHERS = re.compile(
    r"(closed|reset) by peer|connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)"
    r"|timed out|timeout|remote process exited|communicator was aborted|watchdog|no longer reachable",
    re.IGNORECASE,
)
GLOO = re.compile(r"^\[\S+\.cc:\d+\] |\.? This is typically caused by .*")  # what adds nothing to its messages
# What a process says when it ends, and what that means. The first that fits counts.
WORDS: dict[Cause, re.Pattern[str]] = {
    "oom": re.compile(r"out ?of ?memory|can(no|')t allocate memory|std::bad_alloc|MemoryError", re.IGNORECASE),
    "mismatch": re.compile(r"collective mismatch|mismatch between collectives|doesn't match expected size"),
    "storage": re.compile(r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error"),
}
TYPES: dict[str, Cause] = {"OutOfMemoryError": "oom", "MemoryError": "oom", "LoaderFault": "data"}
CAUSES: tuple[Cause, ...] = get_args(Cause)
FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Why one rank ended. `own`: of itself, not since others had left it. `what` follows on `rank 3`."""

    cause: Cause
    what: str
    own: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_end(code: int, error: Mapping[str, Any] | None, words: str, *, oom_killed: bool = False) -> Fault:
    """Return why a rank ended, from its exit code, the data of its `error` event if it has one, and its last words."""
    if error is not None:
        return _read_error(error)
    if code < 0:
        return _read_signal(-code, words, oom_killed=oom_killed)
    if code == EXIT_DONE:
        return Fault(cause="exit", what="left early and said that all was well (exit code 0)")
    if code == EXIT_AGAIN:
        return Fault(cause="preempted", what="was asked to stop", own=False)
    if code == EXIT_USER:
        return Fault(cause="user", what="reported a mistake (exit code 2)")
    for cause, pattern in WORDS.items():
        if pattern.search(words):
            return Fault(cause=cause, what=f"ended with exit code {code}: {_line_with(pattern, words)}")
    return Fault(cause="crash", what=f"ended with exit code {code} and no error of its own")


def _read_error(error: Mapping[str, Any]) -> Fault:
    if "code" in error:
        return Fault(cause="user", what=f"found a mistake: {error['code']}: {error['what']}", facts=dict(error))
    kind, message = str(error.get("type", "an error")), str(error.get("message", ""))
    said: Cause | None = next((each for each in CAUSES if each == error.get("cause")), None)
    cause = said or TYPES.get(kind) or _by_words(f"{kind}: {message}")
    what = f"raised {kind}: {_first_line(message)}"
    if cause is not None:
        return Fault(cause=cause, what=what, facts={key: error[key] for key in ("sample_ids", "step") if key in error})
    if LOST_OTHERS.search(message):
        return Fault(cause="network", what=f"lost the others: {GLOO.sub('', _first_line(message))}", own=False)
    return Fault(cause="crash", what=what)


def _read_signal(number: int, words: str, *, oom_killed: bool) -> Fault:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL and oom_killed:
        return Fault(cause="oom", what="was killed by the kernel, since the host's memory ran out")
    if number in FATAL:
        for cause, pattern in WORDS.items():
            if pattern.search(words):
                return Fault(cause=cause, what=f"died of {name}: {_line_with(pattern, words)}")
    return Fault(cause="crash", what=f"{'was killed by' if number not in FATAL else 'died of'} {name}")


def count_oom_kills(cgroup: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many processes of this control group the kernel has killed for want of memory; 0 where unknown."""
    try:
        groups = [line.split(":", 2)[1:] for line in membership.read_text().splitlines()]
    except OSError:
        return 0
    files = [cgroup / path.lstrip("/") / "memory.events" for controllers, path in groups if not controllers]
    # The first version of control groups has a folder for each controller.
    older = [path for controllers, path in groups if "memory" in controllers.split(",")]
    files += [cgroup / "memory" / path.lstrip("/") / "memory.oom_control" for path in older]
    return sum(_oom_kills(file) for file in files)


def _oom_kills(file: Path) -> int:
    try:
        return sum(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill "))
    except OSError:
        return 0


def _by_words(text: str) -> Cause | None:
    return next((cause for cause, pattern in WORDS.items() if pattern.search(text)), None)


def _line_with(pattern: re.Pattern[str], words: str) -> str:
    return next((line.strip()[:300] for line in reversed(words.splitlines()) if pattern.search(line)), "")


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or [""])[0][:300]
