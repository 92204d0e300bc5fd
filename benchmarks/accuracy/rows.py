"""Merges measured rows into their files: `python -m benchmarks.accuracy.rows NEW.jsonl ... [--forget-older]`.

Rows of `benchmarks/planner.py` go to h200.jsonl, h200_held_out.jsonl or h200_small.jsonl and replace rows of the same
name. Failed rows
are left out. Rows of the trainer before `plan.loss` are marked `older`; a new row replaces an older one with the same
settings, and `--forget-older` drops all of them. Run `make accuracy WRITE=1` afterwards.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.ask import H200, HELD_OUT, SMALL
from benchmarks.planner import configurations

Row = dict[str, Any]
FILES = {"": H200, "held-out": HELD_OUT, "small": SMALL}
SETTINGS = (
    "preset", "seq_len", "micro_batch", "grad_accum", "recompute", "compile", "precision", "offload", "states"
)  # fmt: skip


def merged(kept: Sequence[Row], fresh: Iterable[Row], *, forget_older: bool = False) -> list[Row]:
    """Return the rows of a file with the fresh ones merged in: the latest of each name, older ones last."""
    marked = [row if "loss" in row else row | {"older": True} for row in kept]
    newer = {row["name"]: row for row in marked if not row.get("older")}
    newer |= {row["name"]: row for row in fresh if "peak_bytes" in row}
    asked = {_question(row) for row in newer.values()}
    older = [row for row in marked if row.get("older") and _question(row) not in asked and not forget_older]
    return [*newer.values(), *older]


def _question(row: Row) -> str:
    """Return the settings of a row except the loss and the tied head: older rows had only one loss."""
    shape = {key: value for key, value in row["shape"].items() if key != "tied"}
    return json.dumps([*(row[key] for key in SETTINGS), shape], sort_keys=True)


def rows_of(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []


def main(*words: str) -> None:
    fresh = [row for word in words if not word.startswith("--") for row in rows_of(Path(word))]
    files = {name: path for which, path in FILES.items() for name in configurations(which)}
    for path in FILES.values():
        mine = [row for row in fresh if files.get(row["name"], H200) == path]
        rows = merged(rows_of(path), mine, forget_older="--forget-older" in words)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(path.name, len(rows), "rows,", sum(bool(row.get("older")) for row in rows), "of them older")


if __name__ == "__main__":
    main(*sys.argv[1:])
