"""Recognises faults by the texts of errors: memory that ran out, a lost connection, a rank that refused to run."""

import re
import time
from typing import Any

from trimaran.runs.journal import parse_lines
from trimaran.runs.line_files import last_lines
from trimaran.runs.run_directory import RunDirectory

HOST_RAN_OUT = "the host ran out of memory"  # in what is said about a rank that the kernel's OOM killer ended
WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)")
HOLES = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB) is reserved by PyTorch but unallocated")
UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
OUT_OF_MEMORY = re.compile(
    r"out ?of ?memory"  # torch.OutOfMemoryError, CUDA and NCCL
    r"|can(no|')t allocate memory"  # torch's CPU allocator on x86, and the system's ENOMEM
    r"|DefaultCPUAllocator: not enough memory"  # torch's CPU allocator on aarch64
    r"|std::bad_alloc|MemoryError",
    re.IGNORECASE,
)


def says_out_of_memory(text: str) -> bool:
    """Return whether `text`, an error's type and message or the end of a log, says that memory ran out."""
    return OUT_OF_MEMORY.search(text) is not None


def memory_holes(text: str) -> dict[str, int]:
    """Return the bytes that torch's message says were wanted, and those free in pieces; empty unless it says both."""
    wanted, holes = WANTED.search(text), HOLES.search(text)
    if wanted is None or holes is None:
        return {}
    found = {"wanted_bytes": wanted, "hole_bytes": holes}
    return {name: int(float(match[1].rstrip(".")) * UNITS[match[2]]) for name, match in found.items()}


# A rank with such an error lost the connection to the others: another rank or the network is at fault.
CONNECTION_LOST = re.compile(
    r"(closed|reset) by peer|connection (was )?(closed|reset|refused|aborted)|broken pipe|socket (closed|timeout)"
    r"|timed out|timeout|remote process exited|communicator was aborted|watchdog|no longer reachable",
    re.IGNORECASE,
)
GLOO_NOISE = re.compile(r"^\[\S+\.cc:\d+\] |\.? This is typically caused by .*")  # uninformative parts of its messages
NETWORK_ERROR_TYPES = ("DistNetworkError", "DistStoreError", "DistBackendError")
WAIT_SECONDS = 2.0  # until the event of another node is on a shared disk
POLL_SECONDS = 0.1
CLOCK_SECONDS = 5.0  # by which the clocks of nodes may differ
MAX_READ_LINES = 50  # of a rank's events, from the end


def says_connection_lost(error: BaseException) -> bool:
    """Return whether `error` is what a rank raises when another rank is gone."""
    return type(error).__name__ in NETWORK_ERROR_TYPES or CONNECTION_LOST.search(str(error)) is not None


def find_refusal(
    run: RunDirectory, rank: int, *, since: float, wait_seconds: float = WAIT_SECONDS
) -> tuple[int, dict[str, Any]] | None:
    """Return another rank that ended with a user's mistake since the time `since`, and the mistake; None if none did.

    Waits `wait_seconds` for it: the rank may be on another node.
    """
    until = time.monotonic() + wait_seconds
    while True:
        for path in sorted(run.events(rank).parent.glob("rank-*.jsonl")):
            events = parse_lines(reversed(last_lines(path, MAX_READ_LINES)))
            newest = next((each for each in events if each.get("kind") == "error"), None)
            if newest is None or newest["rank"] == rank:
                continue
            if "code" in newest["data"] and newest["time"] >= since - CLOCK_SECONDS:
                return newest["rank"], newest["data"]
        if time.monotonic() >= until:
            return None
        time.sleep(POLL_SECONDS)
