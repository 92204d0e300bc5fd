"""A launch from the recipe to the submitted job, which is then shown and followed to its end."""

import json
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import NamedTemporaryFile
from typing import Any

import typer
from rich.console import Console

from trimaran.app.plan.plan import plan_as_dict
from trimaran.app.plan.plan_answer import NODE_DISK_BANDWIDTH
from trimaran.app.recipe.options import RUNS, path_argument, program_name
from trimaran.app.recipe.prepare_data import check_data, prepare_data
from trimaran.app.recipe.recipe_files import with_local_files, with_model_tokenizer
from trimaran.app.recipe.request import Request, resolve
from trimaran.app.runs.live import follow, print_plain
from trimaran.app.runs.run_findings import FindingsPoller
from trimaran.app.runs.run_state import RunState, read_state
from trimaran.app.show.clean_console import open_console
from trimaran.app.train.resume import refuse_occupied_store
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, EXIT_USER, UserError, dump_recipe
from trimaran.core.errors import raise_together
from trimaran.cost import STATE_BYTES, checkpoint_bytes, write_seconds
from trimaran.launch import EXIT_FAULT, read_site_file, site_path, site_section
from trimaran.launch.targets.target import (
    SAVE_SECONDS,
    JobRecord,
    JobState,
    LaunchFiles,
    LaunchRequest,
    Target,
    job_name,
    new_record,
    state_folder,
    write_record,
)
from trimaran.runs import RunDirectory, create_run, dump_plan, free_run_path, open_run, read_attempts, refuse_occupied
from trimaran.runs.sinks.open_sinks import refuse_missing_sinks

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")  # what libraries of ours read from the environment
EXAMPLE_IMAGE = "registry.example/trimaran:1.0"
HOST = re.compile(r"[^\s,]+")
LAUNCH_FOLDER = "launch"  # in the run directory
STATE_SECONDS = 2.0  # between questions to the target about a job's state
OVER = ("done", "stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `trimaran launch`. `site` are settings `FIELD=VALUE` of the target's section in the site file."""

    run_dir: Path | None = None
    hosts: str = ""
    site: Sequence[str] = ()
    check: bool = True


def resolve_launch(recipe: str | None, settings: Sequence[str]) -> Request:
    """Return the recipe and its plan as they are launched. Reads no data."""
    request = resolve(recipe, settings)
    local = with_local_files(request.recipe, weights=False)
    return replace(request, recipe=with_model_tokenizer(local))


def read_site(target: Target, settings: Sequence[str]) -> object:
    """Return the target's section of the site file, with `settings` on top."""
    path = site_path(os.environ)
    return site_section(read_site_file(path), target.name, target.site_model, settings, where=str(path))


def preview_options(target: Target) -> LaunchOptions:
    """Return the options to show launch files with: an image to replace, where the site file names none."""
    needs_image = target.name == "k8s" and not getattr(read_site(target, ()), "image", "")
    return LaunchOptions(site=[f"image={EXAMPLE_IMAGE}"] if needs_image else [])


def launch_request(target: Target, request: Request, options: LaunchOptions) -> LaunchRequest:
    """Return what to launch on `target`. Touches nothing."""
    site = read_site(target, options.site)
    # The run directory as the nodes see it. It is created here if it is on a disk that they share.
    runs, run_exists = getattr(site, "runs", ""), getattr(site, "shared_disk", target.shares_disk)
    if run_exists:
        run_dir = (options.run_dir or free_run_path(Path(runs) if runs else RUNS, request.recipe.name)).absolute()
        refuse_occupied(run_dir)
    else:
        asked = PurePosixPath(str(options.run_dir)) if options.run_dir else PurePosixPath(runs) / request.recipe.name
        if not asked.is_absolute():
            raise UserError("L005.run-directory", where="--run-dir", asked=asked, target=target.name)
        run_dir = Path(asked)
    save_seconds = SAVE_SECONDS
    if request.outline:  # with the disk bandwidth that `trimaran plan` assumes for a node
        moments = STATE_BYTES[request.recipe.train.optimizer.states]
        states = checkpoint_bytes(request.outline.saved_parameters, moment_bytes=moments)
        save_seconds = write_seconds(states, disk_bandwidth=NODE_DISK_BANDWIDTH * request.cluster.num_nodes)
    return LaunchRequest(
        name=job_name(run_dir.name),
        run_dir=run_dir,
        recipe=request.recipe,
        plan=request.plan,
        cluster=request.cluster,
        site=site,
        hosts=tuple(HOST.findall(options.hosts)),
        run_exists=bool(run_exists),
        check=options.check,
        save_seconds=save_seconds,
        secrets=tuple(name for name in SECRETS if os.environ.get(name)),
    )


def launch_on(
    target: Target,
    recipe: str | None,
    settings: Sequence[str],
    options: LaunchOptions,
    *,
    dry_run: bool,
    out: Path | None,
    wait: bool,
    as_json: bool,
) -> int:
    """Launch a run on `target` and return the exit code. `out` is the folder of its files, by default in the run."""
    console = open_console(stderr=as_json)
    planned = resolved(target, recipe, settings, options)
    request = launch_request(target, planned, options)
    if options.check:
        if dry_run:
            offline = getattr(target, "check_request", None)
            checks = offline(request) if offline else []
        else:
            with console.status(f"checking {target.name}"):
                checks = target.check(request, request.site)
        raise_together([each.error for each in checks if each.error is not None])
    if dry_run and out:
        request = replace(request, run_exists=False)  # the files are submitted later, and create the run then
    files = target.render(request)
    folder = (out or request.run_dir / LAUNCH_FOLDER).absolute()
    if not request.run_exists and out is None:
        folder = Path(LAUNCH_FOLDER, request.name).absolute()
    if out:  # first, so that a folder that cannot be used leaves no run behind
        write_files(files, request, folder)
    if dry_run:
        # The command that measures ranks of the plan on one device first. Standard input cannot be read again.
        rehearsal: list[str] = []
        if planned.plan.mesh.world_size > 1 and recipe != "-" and planned.plan.engine_traits.can_rehearse:
            cluster = [f"cluster={planned.cluster}"] if planned.recipe.cluster == "auto" else []
            words = [word for each in (*settings, *cluster) for word in ("--set", each)]
            rehearsal = ["trimaran", "rehearse", *([recipe] if recipe else []), *words]
        submit = [[*each] for each in files.submit]
        if as_json:
            answer = {"run_dir": str(request.run_dir), "files": dict(files.files), "main": files.main, "submit": submit}
            answer |= {"rehearse": rehearsal} if rehearsal else {}
            typer.echo(json.dumps(plan_as_dict(planned) | answer | {"folder": str(folder) if out else None}))
            return EXIT_DONE
        for name, text in sorted(files.files.items(), key=lambda item: item[0] != files.main):
            typer.echo(f"# ---- {name}\n{text.rstrip()}\n")
        where = f"written to {folder}" if out else "nothing was written; --out DIR writes the files"
        typer.echo(f"# {where}. To submit them from their folder:")
        for command in submit:
            typer.echo(f"# {shlex.join(command)}")
        if rehearsal:
            typer.echo(f"# To measure ranks of this plan on one device first:\n# {shlex.join(rehearsal)}")
        return EXIT_DONE
    records = state_folder(os.environ)
    try:  # before anything is submitted
        records.mkdir(parents=True, exist_ok=True, mode=0o700)
        NamedTemporaryFile(dir=records).close()
    except OSError as error:
        raise UserError("L015.jobs-cannot-recorded", where=str(records), reason=error.strerror or error) from None
    refuse_occupied_store(request.recipe, must_reach=False)
    if request.run_exists:
        create_run(request.run_dir, prepare_data(request.recipe), request.plan)
    if not out:
        write_files(files, request, folder)
    try:
        native_id, details = target.submit(request, folder)
    except UserError as error:
        commands = [["cd", path_argument(folder)], *files.submit]
        left = path_argument(request.run_dir if request.run_exists else folder)
        kept = UserError(
            "L009.files-job-written",
            where=str(folder),
            commands=" && ".join(map(shlex.join, commands)),
            names=shlex.join(["rm", "-r", left]),
        )
        error.others = (*error.others, kept)
        raise
    job = new_record(request, target.name, folder, native_id, details)
    write_record(job, records)
    if not as_json or not wait:
        print_job(target, job, as_json=as_json)
    return wait_for_job(target, job, console, as_json=as_json) if wait else EXIT_DONE


def preview_launch(target: Target, recipe: str | None, settings: Sequence[str], options: LaunchOptions) -> LaunchFiles:
    """Return the files that `launch --dry-run` shows. Nothing is written or submitted."""
    return target.render(launch_request(target, resolved(target, recipe, settings, options), options))


def resolved(target: Target, recipe: str | None, settings: Sequence[str], options: LaunchOptions) -> Request:
    """Return the recipe and its plan, after the checks that need no machine of the target."""
    request = resolve_launch(recipe, settings)
    refuse_missing_sinks(request.recipe.telemetry)
    data, runs = request.recipe.data, Path(getattr(read_site(target, options.site), "runs", ""))
    paths = [Path(each.path) for each in data.mixture or (data,) if each.path]
    remote = [str(path) for path in paths if runs in path.parents and not path.exists()]
    if remote and not target.shares_disk:
        are = "are" if len(remote) > 1 else "is"
        typer.echo(f"{', '.join(remote)} {are} on the volume of the nodes: the data is not checked here", err=True)
    else:
        check_data(request.recipe)
    return request


def write_files(files: LaunchFiles, request: LaunchRequest, folder: Path) -> None:
    """Write the launch files with recipe and plan into `folder`. No file is replaced by a different one."""
    texts = {"recipe.yaml": dump_recipe(request.recipe), "plan.json": dump_plan(request.plan), **files.files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            path = folder / name
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise UserError("L006.exists-another-file", where=str(path), path=path.name)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755 if name in files.executable else 0o644)
    except OSError as error:
        raise UserError("L008.launch-files", where=str(folder), reason=error.strerror or error) from None


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
    step = read_state(run).step if (run := run_of(job)) is not None else None
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
