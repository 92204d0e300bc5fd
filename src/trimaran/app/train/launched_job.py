"""A launched job: what the target and the run say of it, and how it is followed to its end."""

import json
import shlex
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from trimaran.app.recipe.options import path_argument, program_name
from trimaran.app.runs.live import follow, print_plain
from trimaran.app.runs.run_findings import FindingsPoller
from trimaran.app.runs.run_state import RunState
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, EXIT_USER, UserError
from trimaran.launch.supervise.recovery_policy import EXIT_FAULT
from trimaran.launch.targets.target import JobRecord, JobState, Target
from trimaran.runs import RunDirectory, open_run
from trimaran.runs.run_records import read_attempts

STATE_SECONDS = 2.0  # between questions to the target about a job's state
OVER = ("done", "stopped", "failed")


def print_job(target: Target, job: JobRecord, *, as_json: bool) -> None:
    """Print a job's state and the commands behind it."""
    state = target.state(job)
    if as_json:
        typer.echo(json.dumps(job_as_dict(target, job, state)))
        return
    commands = target.commands(job)
    typer.echo(f"{job.id}: {' '.join(filter(None, (state.native or state.state, state.reason)))}")
    typer.echo(f"  files   {job.folder}\n  run     {job.run_dir}")
    for name in ("follow", "stop", "resume"):
        typer.echo(f"  {name:7} {shlex.join(getattr(commands, name))}")
    if run_of(job) is not None:
        typer.echo(f"  watch   {shlex.join([program_name(), 'watch', path_argument(Path(job.run_dir))])}")


def run_of(job: JobRecord) -> RunDirectory | None:
    """Return the run directory of a job; None if this machine does not see it (yet)."""
    try:
        return open_run(Path(job.run_dir))
    except UserError:
        return None


def job_as_dict(target: Target, job: JobRecord, state: JobState) -> dict[str, Any]:
    """Return a job for `--json`: its record, its state, and the commands behind it."""
    commands = target.commands(job)
    run, step = run_of(job), None
    if run is not None:
        shown = RunState(run, only_status=True)
        shown.refresh()
        step = shown.step
    return asdict(job) | {"state": asdict(state), "step": step, "commands": asdict(commands)}


def wait_for_job(target: Target, job: JobRecord, console: Console, *, as_json: bool) -> int:
    """Show the run until the job is over, and return the run's exit code."""
    asked, seen = 0.0, JobState(state="queued")

    def is_over() -> bool:
        nonlocal asked, seen
        if time.monotonic() - asked > STATE_SECONDS:
            seen, asked = target.state(job), time.monotonic()
        return seen.state in OVER

    with console.status(f"{job.id} is queued") as status:
        while not is_over() and run_of(job) is None:
            status.update(f"{job.id}: {seen.native or seen.state} {seen.reason}".rstrip())
            time.sleep(0.2)
    run = run_of(job)
    if run is not None:
        state = RunState(run)
        follow(state, console, has_ended=is_over, poller=None if as_json else FindingsPoller(run, at_once=False))
    code = exit_code(run, job, seen)
    if as_json:
        typer.echo(json.dumps(job_as_dict(target, job, seen) | {"exit": code}))
    else:
        print_plain(console, f"{job.id}: {seen.native or seen.state}, exit code {code}")
    return code


def exit_code(run: RunDirectory | None, job: JobRecord, seen: JobState) -> int:
    """Return the exit code of a job that is over.

    It is a code of ours that the target reports, else what a supervisor recorded since the job was submitted. An end
    that a resumed run has recorded before does not count, and Slurm's 0 of a cancelled job does not either.
    """
    if seen.state == "done":
        return EXIT_DONE
    if seen.exit_code in (EXIT_USER, EXIT_AGAIN, EXIT_STUCK):
        return seen.exit_code
    known = read_attempts(run) if run is not None else None
    if known is not None and known.over is not None and known.over_time >= job.submitted:
        return known.over
    return seen.exit_code or (EXIT_AGAIN if seen.state == "stopped" else EXIT_FAULT)
