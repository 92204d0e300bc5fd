"""Shows the stacks and memory of every rank of a running run, as text."""

import contextlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimaran.core import show_bytes
from trimaran.core.regular_files import read_regular_text, write_atomically
from trimaran.launch.supervise.node import Node, on_all_nodes
from trimaran.runs import RunDirectory

log = logging.getLogger(__name__)

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
    processes = {row["rank"]: row for path in sorted(folder.glob("process-*.json")) for row in _load(path, [])
                 if isinstance(row, dict) and "rank" in row}  # fmt: skip
    return "\n".join(_describe(folder, rank, processes.get(rank, {})) for rank in ranks)


def _describe(folder: Path, rank: int, process: dict[str, Any]) -> str:
    report = _load(folder / f"rank-{rank}.json", {})
    if not report:
        state = STATES.get(str(process.get("state", "")), "native code holds the GIL")
        why = (
            f"process {process['pid']}, {process.get('memory', '?')}: {state}"
            if process.get("pid")
            else "it is not running"
        )
        return f"rank {rank} does not answer ({why})\n"
    held = report.get("memory", {})
    memory = ", ".join(f"{show_bytes(held[key])} {text}" for key, text in MEMORY_TEXTS.items() if key in held)
    where = f"step {report.get('step')}, {report.get('section')} for {report.get('entered_seconds_ago', 0.0):.1f} s"
    stacks = ""
    with contextlib.suppress(OSError):
        stacks = read_regular_text(folder / f"rank-{rank}.stacks.txt", errors="replace")
    return f"rank {rank} on {report.get('host')}, process {report.get('pid')}: {where}; {memory}\n{stacks}"


def _load(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(read_regular_text(path))
    except (OSError, ValueError):
        return otherwise
