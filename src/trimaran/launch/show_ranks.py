"""What every rank does and holds at this moment, in the order of ranks, for a person. The run goes on meanwhile."""

import contextlib
import json
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimaran.core import show_bytes
from trimaran.launch.node import Node, on_all
from trimaran.run import RunDirectory

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.5
STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "waiting for a device or a disk", "Z": "dead"}
MEMORY = {"resident": "resident", "allocated": "allocated on the device", "reserved": "reserved there"}


def show_ranks(run: RunDirectory, nodes: Sequence[Node], ranks: Sequence[int], *, of: str = "") -> None:
    """Have `ranks` tell their stacks and memory; write that down in `logs/ranks.txt`, and log it.

    Where a node that does not coordinate shows its own, `of` is its name, and the file is `logs/ranks-NAME.txt`.
    """
    name = f"-{of}" if of else ""
    folder, shown = run.incident(f"shown{name}"), run.ranks_shown.with_name(f"ranks{name}.txt")
    try:
        shutil.rmtree(folder, ignore_errors=True)  # what ranks said before must not be taken for an answer
        on_all(nodes, lambda node: node.collect_reports(folder, seconds=ANSWER_SECONDS, gently=True))
        text = describe_ranks(folder, ranks)
        draft = shown.with_name(f".{shown.name}")
        draft.write_text(text, encoding="utf-8")
        draft.replace(shown)
        log.info("asked what the ranks do\n%s", text)
    except OSError as error:
        log.warning("what the ranks do could not be written: %s", error)


def describe_ranks(folder: Path, ranks: Sequence[int]) -> str:
    """Return what `collect_reports` had the ranks file in `folder`, rank by rank; one that did not answer has its process told
    of."""
    processes = {row["rank"]: row for path in sorted(folder.glob("process-*.json")) for row in _load(path, [])
                 if isinstance(row, dict) and "rank" in row}  # fmt: skip
    return "\n".join(_describe(folder, rank, processes.get(rank, {})) for rank in ranks)


def _describe(folder: Path, rank: int, process: dict[str, Any]) -> str:
    told = _load(folder / f"rank-{rank}.json", {})
    if not told:
        state = STATES.get(str(process.get("state", "")), "other code holds its interpreter")
        why = (
            f"process {process['pid']}, {process.get('memory', '?')}: {state}"
            if process.get("pid")
            else "it is not running"
        )
        return f"rank {rank} does not answer ({why})\n"
    held = told.get("memory", {})
    memory = ", ".join(f"{show_bytes(held[key])} {words}" for key, words in MEMORY.items() if key in held)
    where = f"step {told.get('step')}, {told.get('section')} for {told.get('entered_seconds_ago', 0.0):.1f} s"
    stacks = ""
    with contextlib.suppress(OSError):
        stacks = (folder / f"rank-{rank}.stacks.txt").read_text(encoding="utf-8", errors="replace")
    return f"rank {rank} on {told.get('host')}, process {told.get('pid')}: {where}; {memory}\n{stacks}"


def _load(path: Path, otherwise: Any) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return otherwise
