"""Tables of memory against speed: what each memory saving of a model saves and costs, measured and predicted.

usage: python -m benchmarks.memory [RESULTS.jsonl ...]   (rows of benchmarks/planner.py; no GPU is needed)
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.ask import H200, question_of

from trimaran.cost import predict
from trimaran.machine import parse_cluster

GIB = 2**30
SETTINGS = ("precision", "recompute", "loss", "states", "offload", "compile")
HEAD = ("batch", *SETTINGS, "GiB", "predicted", "tokens/s", "predicted", "ratio")


def memory_tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table for each model with several rows, sorted by memory, largest first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"].split()[0], []).append(row)
    return "\n".join(_table(model, group) for model, group in groups.items() if len(group) > 1)


def _table(model: str, rows: Sequence[dict[str, Any]]) -> str:
    ran = sorted((row for row in rows if "peak_bytes" in row), key=lambda row: -row["peak_bytes"])
    plain = next((row["tokens_per_second"] for row in ran if _is_plain(row)), 0.0)
    lines = [f"### {model}", "", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [_line(row, plain) for row in ran]
    lines += [f"| {' | '.join(_settings(row))} | {_error(row)} |" + " |" * 4 for row in rows if "peak_bytes" not in row]
    return "\n".join([*lines, ""])


def _settings(row: dict[str, Any]) -> list[str]:
    batch = f"{row['micro_batch']} x {row['seq_len']}" + (f" x {row['grad_accum']}" if row["grad_accum"] > 1 else "")
    recompute = row["recompute"] if isinstance(row["recompute"], str) else f"every {row['recompute']}"
    return [batch, *(str(row[key]) if key != "recompute" else recompute for key in SETTINGS)]


def _is_plain(row: dict[str, Any]) -> bool:
    """Return whether the others are compared with this row: it has no setting that trades speed for memory."""
    return [row[key] for key in SETTINGS] == ["bf16", "none", "fused", "fp32", "none", True] and row["seq_len"] == 4096


def _line(row: dict[str, Any], plain: float) -> str:
    job, plan = question_of(row)
    prediction = predict(job, parse_cluster("1xH200"), plan)
    speed = row["tokens_per_second"]
    figures = [
        f"{row['peak_bytes'] / GIB:.1f}", f"{prediction.peak_bytes / GIB:.1f}", f"{speed:,.0f}",
        f"{prediction.tokens_per_second:,.0f}", f"{speed / plain:.2f}" if plain else "-",
    ]  # fmt: skip
    return f"| {' | '.join([*_settings(row), *figures])} |"


def _error(row: dict[str, Any]) -> str:
    text = str(row.get("failed", "did not run"))
    return "out of memory" if "out of memory" in text else text.strip().splitlines()[-1][:80]


def main(*files: str) -> None:
    rows = [json.loads(line) for file in files or (str(H200),) for line in Path(file).read_text().splitlines() if line]
    print(memory_tables([row for row in rows if "loss" in row]))


if __name__ == "__main__":
    main(*sys.argv[1:])
