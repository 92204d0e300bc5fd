"""Which measured plans there are: those of named folders, and the best one for a question of `trimaran plan`."""

import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from trimaran.app.recipe.options import RUNS
from trimaran.core import UserError
from trimaran.planner import Question
from trimaran.planner.measure.run_index import (
    MeasuredPlan,
    RunIndex,
    best_measured,
    find_runs,
    index_path,
    job_of_plan,
    open_index,
)

MAX_NEWEST_RUNS = 16  # of runs/, that `plan` looks at for changes
MAX_READ_RUNS = 8  # of these that are new or have changed, about 15 ms each


def runs_in(folders: Sequence[Path], environ: Mapping[str, str]) -> list[Path]:
    """Return the runs in the folders; without any, those under `runs/` and those of jobs that were launched."""
    if folders:
        for folder in folders:
            if not folder.is_dir():
                raise UserError("D001", "this folder does not exist", where=str(folder),
                                fix="name a folder that contains runs")  # fmt: skip
        return list(dict.fromkeys(run for folder in folders for run in find_runs(folder)))
    return list(dict.fromkeys([*find_runs(RUNS), *_launched_runs(environ)]))


def _launched_runs(environ: Mapping[str, str]) -> Iterator[Path]:
    from trimaran.launch.targets.target import read_records, state_folder

    try:
        records = read_records(state_folder(environ))
    except (OSError, RuntimeError):  # no state folder, or no home directory
        return
    for job in records:
        yield from find_runs(Path(job.run_dir), depth=0)


def read_index(runs: Sequence[Path], environ: Mapping[str, str]) -> RunIndex:
    """Return the index with what is on disk now about the runs."""
    index = open_index(index_path(environ))
    index.refresh(runs)
    index.write()
    return index


def best_measured_plan(question: Question, environ: Mapping[str, str]) -> MeasuredPlan | None:
    """Return the fastest plan that a run measured for the question's model, sizes and cluster; None if there is none.

    Only the index is read, and those of the newest runs under `runs/` that have changed since they were read.
    """
    path, newest = index_path(environ), _newest_runs()
    if question.outline is None or not (newest or (path and path.exists())):
        return None
    index = open_index(path)
    index.refresh(newest, limit=MAX_READ_RUNS)
    index.write()
    job = asdict(job_of_plan(question.recipe, question.outline, str(question.cluster), platform.node()))
    return best_measured(index, lambda each: each == job)


def _newest_runs() -> list[Path]:
    """Return the runs directly under `runs/`, the last changed first."""
    try:
        with os.scandir(RUNS) as entries:
            found = [(each.stat().st_mtime, each.name) for each in entries if each.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    newest = (RUNS / name for _, name in sorted(found, reverse=True)[:MAX_NEWEST_RUNS])
    return [run for path in newest for run in find_runs(path, depth=0)]
