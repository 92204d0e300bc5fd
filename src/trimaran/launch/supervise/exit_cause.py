"""Finds why a rank ended, from its exit code, its error event and the end of its log."""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_USER, Cause
from trimaran.runs.connection_lost import CONNECTION_LOST, GLOO_NOISE
from trimaran.runs.out_of_memory import HOST_RAN_OUT, OUT_OF_MEMORY, memory_holes

# What torch's watchdog logs before it aborts a rank whose NCCL peers are gone. NCCL reports a peer that was killed as a
# remote or a system error, depending on how its socket was closed.
NCCL_PEER_LOST = re.compile(
    r"ncclRemoteError|remote process exited|closed by remote peer|Watchdog caught collective operation timeout"
    r"|failed : (Connection reset by peer|Connection refused|Broken pipe)"
)

# The cause that a message at the end of a log stands for. The first match counts.
CAUSE_PATTERNS: dict[Cause, re.Pattern[str]] = {
    "oom": OUT_OF_MEMORY,
    "mismatch": re.compile(
        r"collective mismatch|mismatch between collectives|doesn't match expected size"
        r"|[Mm]essage truncated|mismatch in collective sizes"  # NCCL
    ),
    "storage": re.compile(r"No space left on device|Disk quota exceeded|Read-only file system|Input/output error"),
}
CAUSE_OF_TYPE: dict[str, Cause] = {"OutOfMemoryError": "oom", "MemoryError": "oom", "LoaderFault": "data"}
CAUSES: tuple[Cause, ...] = get_args(Cause)
CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFault:
    """Why one rank ended. `what` is a sentence whose subject is the rank.

    `primary`: the rank failed by itself, not because it lost the connection to others.
    """

    cause: Cause
    what: str
    primary: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)


def read_exit(code: int, error: Mapping[str, Any] | None, log_tail: str, *, oom_killed: bool = False) -> RankFault:
    """Return why a rank ended, from its exit code, the data of its `error` event if any, and the end of its log."""
    if error is not None:
        return _read_error(error)
    if code < 0:
        return _read_signal(-code, log_tail, oom_killed=oom_killed)
    if code == EXIT_DONE:
        return RankFault(cause="exit", what="exited with code 0 before training was done")
    if code == EXIT_AGAIN:
        return RankFault(cause="preempted", what="was asked to stop", primary=False)
    if code == EXIT_USER:
        return RankFault(cause="user", what="reported a configuration error (exit code 2)")
    for cause, pattern in CAUSE_PATTERNS.items():
        if pattern.search(log_tail):
            return RankFault(cause=cause, what=f"exited with code {code}: {_line_with(pattern, log_tail)}")
    return RankFault(cause="crash", what=f"exited with code {code} without an error event")


def _read_error(error: Mapping[str, Any]) -> RankFault:
    if "code" in error and error.get("cause") == "storage":
        return RankFault(cause="storage", what=f"reported {error['code']}: {error['what']}", facts=dict(error))
    if "code" in error:
        what = f"reported a configuration error: {error['code']}: {error['what']}"
        return RankFault(cause="user", what=what, facts=dict(error))
    kind, message = str(error.get("type", "an error")), str(error.get("message", ""))
    reported: Cause | None = next((each for each in CAUSES if each == error.get("cause")), None)
    cause = reported or CAUSE_OF_TYPE.get(kind) or _cause_in_text(f"{kind}: {message}")
    what = f"raised {kind}: {_first_line(message)}"
    if cause is not None:
        facts = {key: error[key] for key in ("sample_ids", "step") if key in error}
        facts |= memory_holes(message) if cause == "oom" else {}
        return RankFault(cause=cause, what=what, facts=facts)
    if CONNECTION_LOST.search(message):
        what = f"lost the connection to other ranks: {GLOO_NOISE.sub('', _first_line(message))}"
        return RankFault(cause="network", what=what, primary=False)
    return RankFault(cause="crash", what=what)


def _read_signal(number: int, log_tail: str, *, oom_killed: bool) -> RankFault:
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL and oom_killed:
        return RankFault(cause="oom", what=f"was killed by the kernel's OOM killer: {HOST_RAN_OUT}")
    if number in CRASH_SIGNALS:
        for cause, pattern in CAUSE_PATTERNS.items():
            if pattern.search(log_tail):
                return RankFault(cause=cause, what=f"crashed with {name}: {_line_with(pattern, log_tail)}")
    if number == signal.SIGABRT and NCCL_PEER_LOST.search(log_tail):
        what = f"was aborted by torch's watchdog after other ranks were lost: {_line_with(NCCL_PEER_LOST, log_tail)}"
        return RankFault(cause="network", what=what, primary=False)
    return RankFault(cause="crash", what=f"{'crashed with' if number in CRASH_SIGNALS else 'was killed by'} {name}")


def _cause_in_text(text: str) -> Cause | None:
    return next((cause for cause, pattern in CAUSE_PATTERNS.items() if pattern.search(text)), None)


def _line_with(pattern: re.Pattern[str], log_tail: str) -> str:
    """Return the last line of a log that matches `pattern`."""
    return next((line.strip()[:300] for line in reversed(log_tail.splitlines()) if pattern.search(line)), "")


def _first_line(message: str) -> str:
    return (message.strip().splitlines() or [""])[0][:300]
