"""`trimaran jobs`: what was launched where, its state, and how to follow, stop and resume it."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated

import typer

from trimaran.app.recipe.options import Json, argument
from trimaran.app.show.terminal import aligned
from trimaran.core import UserError
from trimaran.launch import (
    JobRecord,
    JobState,
    find_record,
    job_id,
    open_target,
    read_records,
    state_folder,
    write_record,
)

MAX_QUESTIONS = 8  # to targets, at the same time
# Here, submitting again creates a job, whose nodes would join those of a job that runs. Elsewhere it starts what ended.
JOB_TARGETS = ("slurm", "k8s", "ray", "sky")


def complete_job(incomplete: str) -> list[str]:
    """Return the ids of the jobs that complete `incomplete`."""
    return [job.id for job in read_records(state_folder(os.environ)) if job.id.startswith(incomplete)]


JOB_HELP = "The id, name or run directory of a job. [default: all]"
Job = Annotated[str | None, argument("[JOB]", JOB_HELP, complete_job)]


def jobs(
    job: Job = None,
    stop: Annotated[bool, typer.Option("--stop", help="Ask the job to stop with a checkpoint.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Submit the job again: it continues.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job to its end; exit with its code.")] = False,
    as_json: Json = False,
) -> int:
    """List launched jobs and their states; show, stop, resume or follow one.

    \b
    trimaran jobs
    trimaran jobs slurm-4711
    trimaran jobs slurm-4711 --stop
    trimaran jobs slurm-4711 --resume --wait
    """
    folder = state_folder(os.environ)
    if job is None:
        if stop or resume or wait:
            raise UserError("L007", "which job is meant?", where="trimaran jobs",
                            fix="name it: trimaran jobs JOB --stop")  # fmt: skip
        return _print_all(read_records(folder), as_json=as_json)
    found = find_record(folder, job)
    from trimaran.app.show.clean_console import open_console
    from trimaran.app.train.launch_answer import print_job, wait_for_job

    target = open_target(found.target)
    if stop:
        target.stop(found)
    if resume:
        _refuse_unfinished(found)
        native_id, details = target.submit_again(found)
        found = replace(
            found, id=job_id(found.target, native_id), native_id=native_id, details=details, submitted=time.time()
        )
        write_record(found, folder)
    if wait:
        return wait_for_job(target, found, open_console(stderr=as_json), as_json=as_json)
    print_job(target, found, as_json=as_json)
    return 0


def _refuse_unfinished(job: JobRecord) -> None:
    """Raise UserError if a job of the same files waits or runs, also one that was submitted later."""
    if job.target not in JOB_TARGETS:
        return
    for other in read_records(state_folder(os.environ)):
        if (other.target, other.folder) == (job.target, job.folder):
            state = _state(other)
            if state.state in ("queued", "running"):
                raise UserError("L016", f"{other.id} has not ended: {state.native or state.state}", where=job.run_dir,
                                fix=f"stop it first: trimaran jobs {other.id} --stop --wait")  # fmt: skip


def _print_all(found: list[JobRecord], *, as_json: bool) -> int:
    from trimaran.app.train.launch_answer import job_as_dict

    with ThreadPoolExecutor(max_workers=MAX_QUESTIONS) as pool:  # a host that does not answer holds up nobody else
        states = list(zip(found, pool.map(_state, found), strict=True))
    if as_json:
        typer.echo(json.dumps({"jobs": [job_as_dict(open_target(job.target), job, state) for job, state in states]}))
        return 0
    if not states:
        typer.echo("no job was launched from this account; see `trimaran launch --help`")
        return 0
    rows = [("job", "name", "state", "nodes", "launched", "run")]
    for job, state in states:
        word = state.state if state.native in ("", state.state) else f"{state.state} ({state.native})"
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.submitted))
        rows.append((job.id, job.name, word, str(job.num_nodes), since, job.run_dir))
    for line in aligned(rows, 0):
        typer.echo(line)
    return 0


def _state(job: JobRecord) -> JobState:
    """Return a job's state; unknown, with the reason, if its target cannot be asked."""
    try:
        return open_target(job.target).state(job)
    except UserError as error:
        return JobState(state="unknown", reason=error.what)
