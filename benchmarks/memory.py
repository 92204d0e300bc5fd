"""The ladder of each model: what every way to save memory saves and costs, measured beside what is predicted.

usage: python -m benchmarks.memory [RESULTS.jsonl ...]   (rows of benchmarks/planner.py; no GPU is needed)
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.accuracy.ask import H200, question_of

from trimaran.cost import predict
from trimaran.hardware import parse_cluster

GIB = 2**30
RUNGS = ("precision", "recompute", "loss", "states", "offload", "compile")
HEAD = ("batch", *RUNGS, "peak GiB", "said", "tokens/s", "said", "of the plain one")


def ladders(rows: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table for each model that has several rungs, dearest in memory first."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["name"].split()[0], []).append(row)
    return "\n".join(_ladder(model, group) for model, group in groups.items() if len(group) > 1)


def _ladder(model: str, rows: Sequence[dict[str, Any]]) -> str:
    ran = sorted((row for row in rows if "peak_bytes" in row), key=lambda row: -row["peak_bytes"])
    plain = next((row["tokens_per_second"] for row in ran if _is_plain(row)), 0.0)
    lines = [f"### {model}", "", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
    lines += [_line(row, plain) for row in ran]
    lines += [f"| {' | '.join(_rung(row))} | {_why(row)} |" + " |" * 4 for row in rows if "peak_bytes" not in row]
    return "\n".join([*lines, ""])


def _rung(row: dict[str, Any]) -> list[str]:
    batch = f"{row['micro_batch']} x {row['seq_len']}" + (f" x {row['grad_accum']}" if row["grad_accum"] > 1 else "")
    recompute = row["recompute"] if isinstance(row["recompute"], str) else f"every {row['recompute']}"
    return [batch, *(str(row[key]) if key != "recompute" else recompute for key in RUNGS)]


def _is_plain(row: dict[str, Any]) -> bool:
    """Return whether the others are compared with this one: it saves nothing but what costs nothing."""
    return [row[key] for key in RUNGS] == ["bf16", "none", "fused", "fp32", "none", True] and row["seq_len"] == 4096


def _line(row: dict[str, Any], plain: float) -> str:
    job, plan = question_of(row)
    said = predict(job, parse_cluster("1xH200"), plan)
    speed = row["tokens_per_second"]
    figures = [
        f"{row['peak_bytes'] / GIB:.1f}", f"{said.peak_bytes / GIB:.1f}", f"{speed:,.0f}",
        f"{said.tokens_per_second:,.0f}", f"{speed / plain:.2f}" if plain else "-",
    ]  # fmt: skip
    return f"| {' | '.join([*_rung(row), *figures])} |"


def _why(row: dict[str, Any]) -> str:
    told = str(row.get("failed", "did not run"))
    return "out of memory" if "out of memory" in told else told.strip().splitlines()[-1][:80]


def main(*files: str) -> None:
    rows = [json.loads(line) for file in files or (str(H200),) for line in Path(file).read_text().splitlines() if line]
    print(ladders([row for row in rows if "loss" in row]))


if __name__ == "__main__":
    main(*sys.argv[1:])
