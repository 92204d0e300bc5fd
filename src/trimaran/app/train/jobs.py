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


def jobs(
    job: Annotated[str | None, argument("[JOB]", JOB_HELP, complete_job)] = None,
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
    from trimaran.app.show.clean_console import open_console
    from trimaran.app.train.launch_answer import job_as_dict, print_job, wait_for_job

    folder = state_folder(os.environ)
    if job is None:
        if stop or resume or wait:
            raise UserError("L007.job-meant", where="trimaran jobs")
        records = read_records(folder)
        with ThreadPoolExecutor(max_workers=MAX_QUESTIONS) as pool:  # a host that does not answer holds up nobody else
            states = list(zip(records, pool.map(_state, records), strict=True))
        if as_json:
            typer.echo(
                json.dumps({"jobs": [job_as_dict(open_target(each.target), each, state) for each, state in states]})
            )
            return 0
        if not states:
            typer.echo("no job was launched from this account; see `trimaran launch --help`")
            return 0
        rows = [("job", "name", "state", "nodes", "launched", "run")]
        for each, state in states:
            word = state.state if state.native in ("", state.state) else f"{state.state} ({state.native})"
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.submitted))
            rows.append((each.id, each.name, word, str(each.num_nodes), since, each.run_dir))
        for line in aligned(rows, 0):
            typer.echo(line)
        return 0
    found = find_record(folder, job)
    target = open_target(found.target)
    if stop:
        target.stop(found)
    if resume:
        others = read_records(folder) if found.target in JOB_TARGETS else []
        for other in others:  # of the same files, also one that was submitted later
            if (other.target, other.folder) == (found.target, found.folder):
                state = _state(other)
                if state.state in ("queued", "running"):
                    raise UserError(
                        "L016.not-ended", where=found.run_dir, other=other.id, native=state.native or state.state
                    )
        native_id, details = target.submit_again(found)
        found = replace(
            found, id=job_id(found.target, native_id), native_id=native_id, details=details, submitted=time.time()
        )
        write_record(found, folder)
    if wait:
        return wait_for_job(target, found, open_console(stderr=as_json), as_json=as_json)
    print_job(target, found, as_json=as_json)
    return 0


def _state(job: JobRecord) -> JobState:
    """Return a job's state; unknown, with the reason, if its target cannot be asked."""
    try:
        return open_target(job.target).state(job)
    except UserError as error:
        return JobState(state="unknown", reason=error.what)
