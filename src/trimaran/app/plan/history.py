"""`trimaran history`: the plans that runs measured, by model and cluster."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimaran.app.recipe.options import RUNS, Json, argument, cluster_option
from trimaran.core import UserError, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from trimaran.planner import Question
    from trimaran.planner.measure.run_index import MeasuredPlan, RunIndex

FOLDERS_HELP = "Folders with runs. [default: runs/, and the runs of `trimaran jobs`]"
Folders = Annotated[list[Path] | None, argument("[FOLDER...]", FOLDERS_HELP, file_okay=False)]
ClusterName = Annotated[str | None, cluster_option("Only clusters whose name contains C, such as H100 or 2x8xH100.")]
COLUMNS = ("tokens/s", "step", "mfu", "memory", "predicted", "goodput", "batch", "date", "run", "plan")
NUM_FIGURES = 7  # columns that are aligned to the right
MAX_NEWEST_RUNS = 16  # of runs/, that `plan` looks at for changes
MAX_READ_RUNS = 8  # of these that are new or have changed, about 15 ms each


def history(
    folders: Folders = None,
    model: Annotated[str | None, typer.Option(metavar="X", help="Only models whose name contains X.")] = None,
    cluster: ClusterName = None,
    as_json: Json = False,
) -> int:
    """List the plans that runs measured: speed, memory, what was predicted, goodput; the fastest first.

    Each run counts with its steady steps, without warm-up, checkpoints and evaluation.

    \b
    trimaran history
    trimaran history /shared/runs --model llama --cluster H100
    trimaran history --json | jq '.groups[].plans[0]'
    """
    from rich.text import Text

    from trimaran.app.show.clean_console import open_console
    from trimaran.app.show.terminal import aligned

    with open_console(stderr=True).status("reading runs"):
        runs = runs_in(folders or [], os.environ)
        index = read_index(runs, os.environ)
    known = {str(run): index.runs[str(run)] for run in runs}
    plans = [
        each
        for run in known.values()
        for each in run.measured
        if (model or "").casefold() in each.model.casefold()
        and (cluster or "").casefold() in each.job.cluster.casefold()
    ]
    plans.sort(key=lambda each: -each.measured.tokens_per_second)
    groups: dict[tuple[str, int, str], list[MeasuredPlan]] = {}  # by model, its parameters, and cluster
    for each in plans:
        groups.setdefault((each.model, each.parameters, each.job.cluster), []).append(each)
    groups = dict(sorted(groups.items()))
    skipped = {key: run.reason for key, run in known.items() if run.reason}
    if as_json:
        found = [{"model": name, "parameters": parameters, "cluster": where,
                  "plans": [each.as_dict() | {"error": each.error} for each in group]}
                 for (name, parameters, where), group in groups.items()]  # fmt: skip
        reasons = [{"run": run, "reason": reason} for run, reason in skipped.items()]
        typer.echo(json.dumps({"groups": found, "num_runs": len(runs), "skipped": reasons}))
        return 0
    console = open_console()
    for number, ((model, parameters, cluster), group) in enumerate(groups.items()):
        size = f", {show_count(parameters)} parameters" if parameters else ""
        console.print(Text(f"{chr(10) if number else ''}{model}{size}, on {cluster or 'an unknown cluster'}",
                           style="bold"))  # fmt: skip
        for at, line in enumerate(aligned([COLUMNS, *map(_row, group)], NUM_FIGURES)):
            console.print(Text(line, style="" if at else "dim"), soft_wrap=True)
    if not plans:
        typer.echo("no measured plan was found; name folders with runs: trimaran history FOLDER")
    if skipped:
        typer.echo(f"\n{len(skipped)} of {len(runs)} runs have no measured plan; --json says why")
    return 0


def _row(plan: "MeasuredPlan") -> tuple[str, ...]:
    measured, predicted = plan.measured, plan.predicted
    return (
        show_count(measured.tokens_per_second),
        show_seconds(measured.step_seconds),
        f"{measured.mfu:.0%}" if measured.mfu else "-",
        show_bytes(measured.peak_bytes),
        f"{show_seconds(predicted.step_seconds)} {plan.error:+.0%}" if predicted else "-",
        f"{plan.run.goodput:.0%}",
        f"{plan.job.global_batch} x {plan.job.seq_len}",
        show_date(plan.run.time),
        short_path(plan.run.path),
        plan.layout,
    )


def show_date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def short_path(run: str) -> str:
    """Return a path relative to this folder if it is below it."""
    try:
        here = Path.cwd()
    except OSError:
        return run
    return os.path.relpath(run, here) if Path(run).is_relative_to(here) else run


def runs_in(folders: Sequence[Path], environ: Mapping[str, str]) -> list[Path]:
    """Return the runs in the folders; without any, those under `runs/` and those of jobs that were launched."""
    from trimaran.launch.targets.target import read_records, state_folder
    from trimaran.planner.measure.run_index import find_runs

    if folders:
        for folder in folders:
            if not folder.is_dir():
                raise UserError("D001.folder-not-exist", where=str(folder))
        return list(dict.fromkeys(run for folder in folders for run in find_runs(folder)))
    try:
        launched = read_records(state_folder(environ))
    except (OSError, RuntimeError):  # no state folder, or no home directory
        launched = []
    runs = (run for job in launched for run in find_runs(Path(job.run_dir), depth=0))
    return list(dict.fromkeys([*find_runs(RUNS), *runs]))


def read_index(runs: Sequence[Path], environ: Mapping[str, str]) -> "RunIndex":
    """Return the index with what is on disk now about the runs."""
    from trimaran.planner.measure.run_index import index_path, open_index

    index = open_index(index_path(environ))
    index.refresh(runs)
    index.write()
    return index


def best_measured_plan(question: "Question", environ: Mapping[str, str]) -> "MeasuredPlan | None":
    """Return the fastest plan in the index for the question; None if there is none. Reads runs that changed."""
    from trimaran.planner.measure.run_index import best_measured, find_runs, index_path, job_of_plan, open_index

    try:
        with os.scandir(RUNS) as entries:
            found = [(each.stat().st_mtime, each.name) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        found = []
    folders = (RUNS / name for _, name in sorted(found, reverse=True)[:MAX_NEWEST_RUNS])
    newest = [run for folder in folders for run in find_runs(folder, depth=0)]
    path = index_path(environ)
    if question.outline is None or not (newest or (path and path.exists())):
        return None
    index = open_index(path)
    index.refresh(newest, limit=MAX_READ_RUNS)
    index.write()
    job = asdict(job_of_plan(question.recipe, question.outline, str(question.cluster), platform.node()))
    return best_measured(index, lambda each: each == job)
