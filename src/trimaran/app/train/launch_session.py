"""A launch from the recipe to the submitted job."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import typer
from rich.console import Console

from trimaran.app.plan.plan import plan_as_dict
from trimaran.app.recipe.options import path_argument
from trimaran.app.recipe.prepare_data import check_data, prepare_data
from trimaran.app.recipe.request import Request
from trimaran.app.show.clean_console import open_console
from trimaran.app.train.launch_request import LaunchOptions, launch_request, read_site, resolve_launch
from trimaran.app.train.launched_job import print_job, wait_for_job
from trimaran.app.train.stored_run import refuse_occupied_store
from trimaran.core import EXIT_DONE, UserError, dump_recipe
from trimaran.core.errors import raise_together
from trimaran.launch.targets.site_file import read_site_file, site_path
from trimaran.launch.targets.target import (
    JobRecord,
    LaunchFiles,
    LaunchRequest,
    SiteCheck,
    Target,
    new_record,
    open_target,
    state_folder,
    target_names,
    write_record,
)
from trimaran.runs import create_run
from trimaran.runs.run_directory import dump_plan
from trimaran.runs.sinks.open_sinks import refuse_missing_sinks

LAUNCH_FOLDER = "launch"  # in the run directory


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSteps:
    """What to do with the launch files: `out` is their folder, by default `launch` in the run directory."""

    dry_run: bool = False
    out: Path | None = None
    wait: bool = False
    as_json: bool = False


def check_launch(
    target: Target, recipe: str | None, settings: Sequence[str], options: LaunchOptions
) -> list[SiteCheck]:
    """Return the checks of the site file and of the target; with a recipe, also of what its run needs."""
    path = site_path(os.environ)
    sections = read_site_file(path)
    found = (
        f"{path}: {', '.join(sections) or 'no sections'}" if path.exists() else f"{path} does not exist: no defaults"
    )
    checks = [SiteCheck(name="site file", found=found)]
    for name in target_names():
        if name in sections and name != target.name:
            read_site(open_target(name), ())  # raises if a section has a mistake
    if recipe is None and not settings:
        return [*checks, *target.check(None, read_site(target, options.site))]
    request = launch_request(target, _resolved(target, recipe, settings, options), options)
    return [*checks, *target.check(request, request.site)]


def launch_on(
    target: Target, recipe: str | None, settings: Sequence[str], options: LaunchOptions, steps: LaunchSteps
) -> int:
    """Launch a run on `target` and return the exit code."""
    console = open_console(stderr=steps.as_json)
    planned = _resolved(target, recipe, settings, options)
    request = launch_request(target, planned, options)
    if options.check:
        _refuse_failed_checks(target, request, console, dry_run=steps.dry_run)
    if steps.dry_run and steps.out:
        request = replace(request, run_exists=False)  # the files are submitted later, and create the run then
    files = target.render(request)
    folder = (steps.out or request.run_dir / LAUNCH_FOLDER).absolute()
    if not request.run_exists and steps.out is None:
        folder = Path(LAUNCH_FOLDER, request.name).absolute()
    if steps.out:  # first, so that a folder that cannot be used leaves no run behind
        write_files(files, request, folder)
    if steps.dry_run:
        return _show_files(planned, request, files, folder, steps, rehearsal=_rehearsal(planned, recipe, settings))
    records = _writable_records()
    refuse_occupied_store(request.recipe, must_reach=False)
    if request.run_exists:
        create_run(request.run_dir, prepare_data(request.recipe), request.plan)
    if not steps.out:
        write_files(files, request, folder)
    job = _submitted(target, request, files, folder, records)
    if not steps.as_json or not steps.wait:
        print_job(target, job, as_json=steps.as_json)
    return wait_for_job(target, job, console, as_json=steps.as_json) if steps.wait else EXIT_DONE


def preview_launch(target: Target, recipe: str | None, settings: Sequence[str], options: LaunchOptions) -> LaunchFiles:
    """Return the files that `launch --dry-run` shows. Nothing is written or submitted."""
    return target.render(launch_request(target, _resolved(target, recipe, settings, options), options))


def _submitted(target: Target, request: LaunchRequest, files: LaunchFiles, folder: Path, records: Path) -> JobRecord:
    """Submit the files in `folder` and record the job. A mistake also says where the files are, and what to do."""
    try:
        native_id, details = target.submit(request, folder)
    except UserError as error:
        commands = [["cd", path_argument(folder)], *files.submit]
        left = path_argument(request.run_dir if request.run_exists else folder)
        kept = UserError("L009", "the files of the job were written, but their submission failed", where=str(folder),
                         fix=f"submit them by hand: {' && '.join(map(shlex.join, commands))}; or remove them and "
                         f"launch again: {shlex.join(['rm', '-r', left])}")  # fmt: skip
        error.others = (*error.others, kept)
        raise
    job = new_record(request, target.name, folder, native_id, details)
    write_record(job, records)
    return job


def _writable_records() -> Path:
    """Return the folder of the records of jobs; raise UserError, before anything is submitted, if it is unusable."""
    folder = state_folder(os.environ)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        NamedTemporaryFile(dir=folder).close()
    except OSError as error:
        raise UserError("L015", f"jobs cannot be recorded: {error.strerror or error}", where=str(folder),
                        fix="make it writable, or name another folder in XDG_STATE_HOME") from None  # fmt: skip
    return folder


def _resolved(target: Target, recipe: str | None, settings: Sequence[str], options: LaunchOptions) -> Request:
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


def _refuse_failed_checks(target: Target, request: LaunchRequest, console: Console, *, dry_run: bool) -> None:
    """Raise if a check fails. A dry run makes those that ask nothing of the target."""
    if dry_run:
        offline = getattr(target, "check_request", None)
        checks = offline(request) if offline else []
    else:
        with console.status(f"checking {target.name}"):
            checks = target.check(request, request.site)
    raise_together([each.error for each in checks if each.error is not None])


def write_files(files: LaunchFiles, request: LaunchRequest, folder: Path) -> None:
    """Write the launch files with recipe and plan into `folder`. No file is replaced by a different one."""
    texts = {"recipe.yaml": dump_recipe(request.recipe), "plan.json": dump_plan(request.plan), **files.files}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _write_once(folder / name, text, mode=0o755 if name in files.executable else 0o644)
    except OSError as error:
        raise UserError("L008", f"the launch files cannot be written: {error.strerror or error}", where=str(folder),
                        fix="name a folder that you can write to: --out DIR") from None  # fmt: skip


def _write_once(path: Path, text: str, *, mode: int) -> None:
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError("L006", f"{path.name} exists and is another file", where=str(path),
                        fix="name another folder: --out DIR")  # fmt: skip
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def _rehearsal(planned: Request, recipe: str | None, settings: Sequence[str]) -> list[str]:
    """Return the command that measures ranks of the plan on one device before the job is submitted; empty for one rank.

    A recipe from standard input cannot be read again.
    """
    if planned.plan.mesh.world_size == 1 or recipe == "-" or not planned.plan.engine_traits.can_rehearse:
        return []
    cluster = [f"cluster={planned.cluster}"] if planned.recipe.cluster == "auto" else []
    words = [word for each in (*settings, *cluster) for word in ("--set", each)]
    return ["trimaran", "rehearse", *([recipe] if recipe else []), *words]


def _show_files(
    planned: Request,
    request: LaunchRequest,
    files: LaunchFiles,
    folder: Path,
    steps: LaunchSteps,
    *,
    rehearsal: Sequence[str],
) -> int:
    submit = [[*each] for each in files.submit]
    if steps.as_json:
        answer = {"run_dir": str(request.run_dir), "files": dict(files.files), "main": files.main, "submit": submit}
        answer |= {"rehearse": [*rehearsal]} if rehearsal else {}
        typer.echo(json.dumps(plan_as_dict(planned) | answer | {"folder": str(folder) if steps.out else None}))
        return EXIT_DONE
    for name, text in sorted(files.files.items(), key=lambda item: item[0] != files.main):
        typer.echo(f"# ---- {name}\n{text.rstrip()}\n")
    where = f"written to {folder}" if steps.out else "nothing was written; --out DIR writes the files"
    typer.echo(f"# {where}. To submit them from their folder:")
    for command in submit:
        typer.echo(f"# {shlex.join(command)}")
    if rehearsal:
        typer.echo(f"# To measure ranks of this plan on one device first:\n# {shlex.join(rehearsal)}")
    return EXIT_DONE
