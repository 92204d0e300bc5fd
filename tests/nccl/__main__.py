"""`python -m tests.nccl`: runs the rows that have not passed yet, and writes the page of results.

A command on a borrowed GPU machine may be limited in time: `--minutes` starts no further row after that, and the next
call with the same `--results` continues. `--only`, `--ranks` and `--rows` select rows.
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.matrix import write_documents
from tests.nccl.course_rows import CourseRunner, course_rows
from tests.nccl.faults import fault_rows, run_fault_rows
from tests.nccl.mps import mps_server
from tests.nccl.page import add_result, read_results, render_page
from tests.nccl.parity_rows import ParityRunner, parity_rows
from tests.nccl.resumes import resume_rows, run_resume_row

SECTIONS = ("parity", "faults", "resume", "course")


def parse_flags(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.nccl", description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="this section (may be repeated)")
    parser.add_argument("--ranks", default="1,2,4,8", help="rows with these numbers of ranks (1,2,4,8)")
    parser.add_argument("--rows", default="", help="rows whose name contains this text")
    parser.add_argument(
        "--variants", default="fp32,bf16,fp32-compiled,bf16-compiled", help="of the parity section (all)"
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo: on CPU ranks, to try it out")
    parser.add_argument(
        "--max-ranks", type=int, default=16, help="ranks that run at once in the sections parity and course (16)"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="start no row after this time")
    parser.add_argument("--results", type=Path, default=Path("build/nccl.jsonl"), help="results so far, a line each")
    parser.add_argument("--folder", type=Path, help="where the run directories go (a temporary folder)")
    parser.add_argument("--write", type=Path, help="write the page here")
    parser.add_argument("--list", action="store_true", help="list the rows and exit")
    return parser.parse_args(arguments)


def every_row() -> dict[str, list[Any]]:
    """Return the rows of each section. A row has a name and a number of ranks."""
    return {"parity": parity_rows(), "faults": fault_rows(), "resume": resume_rows(), "course": course_rows()}


def chosen_rows(flags: argparse.Namespace) -> dict[str, list[Any]]:
    """Return the rows of each section that `flags` select, without those that have passed."""
    done = {key for key, result in read_results(flags.results).items() if result["passed"]}
    ranks, variants = {int(each) for each in flags.ranks.split(",")}, flags.variants.split(",")

    def is_chosen(section: str, row: Any) -> bool:
        fits = row.ranks in ranks and flags.rows in row.name and (section, row.name) not in done
        return fits and (section != "parity" or row.variant in variants)

    chosen = flags.only or SECTIONS
    return {name: [row for row in rows if is_chosen(name, row)] for name, rows in every_row().items() if name in chosen}


def run_rows(flags: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    until = time.monotonic() + 60 * flags.minutes
    chosen = chosen_rows(flags)
    for row in chosen.get("resume", []):
        if time.monotonic() < until:
            yield run_resume_row(row, folder, flags.backend)
    yield from run_fault_rows(chosen.get("faults", []), folder, flags.backend, until)
    for section, runner in (("course", CourseRunner), ("parity", ParityRunner)):
        if chosen.get(section):
            with mps_server(folder) if flags.backend == "nccl" else nullcontext():
                yield from runner(folder, flags.backend, flags.max_ranks, until).run(chosen[section])


def machine_facts(backend: str) -> dict[str, str]:
    """Return what the page says about this machine, without initialising CUDA in this process."""
    device, nccl = platform.machine(), "none (gloo)"
    if backend == "nccl":
        code = "import torch; print(torch.cuda.get_device_name()); print(*torch.cuda.nccl.version(), sep='.')"
        asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        device, nccl = asked.stdout.splitlines()[:2]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"one {device} for all ranks, {os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "NCCL": nccl,
        "Python": platform.python_version(),
    }


def write_page(path: Path, results: Path, facts: dict[str, str]) -> None:
    """Write the page of all results so far; rows without one are listed as not run."""
    known = read_results(results)
    keys = [(section, row.name) for section, rows in every_row().items() for row in rows]
    missing = [name for section, name in keys if (section, name) not in known]
    path.write_text(render_page([known[key] for key in keys if key in known], facts, missing=missing))


def main(flags: argparse.Namespace) -> int:
    if flags.list:
        for section, rows in chosen_rows(flags).items():
            for row in rows:
                print(section, row.ranks, row.name)
        return 0
    flags.results.parent.mkdir(parents=True, exist_ok=True)
    failed = 0
    made = (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) if flags.folder is None else nullcontext(flags.folder)
    )
    with made as name:
        folder = Path(name).absolute()
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        write_documents(folder / "uneven.jsonl")
        for result in run_rows(flags, folder):
            add_result(flags.results, result)
            failed += not result["passed"]
            shown = {
                key: result[key] for key in ("loss", "norm", "weights", "synchronous", "limit", "what") if key in result
            }
            verdict = "pass" if result["passed"] else "FAIL"
            print(
                verdict, result["name"], f"{result.get('seconds', 0):.1f} s", shown, result.get("error", ""), flush=True
            )
    if flags.write:
        write_page(flags.write, flags.results, machine_facts(flags.backend))
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(parse_flags()))
