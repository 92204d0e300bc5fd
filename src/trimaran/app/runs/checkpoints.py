"""`trimaran checkpoints`: list, verify, compare, prune and import the checkpoints of a run."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from trimaran.app.recipe.options import Json, RunName, Settings, complete_recipe, complete_run, find_run
from trimaran.app.show.clean_console import open_console, plain_table, progress_bar
from trimaran.checkpoint import DamagedError, ObjectStore, StoredStep, StoreError, open_store, unusable_store
from trimaran.checkpoint.checkpoint_list import count_drafts, find_step, list_checkpoints, verify_present
from trimaran.checkpoint.step_dirs import complete_steps, prune, step_of, step_path, steps_to_prune, without_manifest
from trimaran.core import UserError, read_regular_text, show_bytes
from trimaran.runs import RunDirectory, create_run, open_run, refuse_occupied, take_lease
from trimaran.runs.reserve import DISK_FULL_ERRORS

EXIT_DAMAGED = 1
MAX_SHOWN_DIFFERENCES = 20


class ListByDefault(TyperGroup):
    """Reads `checkpoints RUN` as `checkpoints list RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_run = bool(args) and args[0] not in self.commands and args[0] != "--help"
        return super().parse_args(ctx, ["list", *args] if is_run else args)


HELP = """List the checkpoints of a run; verify, compare, prune or import them.

\b
trimaran checkpoints runs/stdlib-tiny
trimaran checkpoints verify runs/stdlib-tiny
"""
checkpoints = typer.Typer(cls=ListByDefault, help=HELP, rich_markup_mode=None, subcommand_metavar="RUN | COMMAND ...")

Step = Annotated[int, typer.Argument(metavar="STEP", min=0)]


@checkpoints.command("list")
def list_all(run: RunName, as_json: Json = False) -> None:
    """List the checkpoints of a run: time, size, number of ranks, and damages.

    \b
    trimaran checkpoints runs/stdlib-tiny
    trimaran checkpoints list runs/stdlib-tiny --json
    trimaran checkpoints s3://bucket/my-run
    """
    if "://" in run:
        stored = list_stored(run)
        typer.echo(json.dumps({"store": stored})) if as_json else show_stored(stored)
        return
    directory = find_run(run)
    rows, drafts = list_checkpoints(directory.checkpoints), count_drafts(directory.checkpoints)
    url = directory.read_recipe().checkpoint.store
    stored = list_stored(url) if url else None
    if as_json:
        answer = {"run_dir": str(directory.path), "checkpoints": [row.as_dict() for row in rows], "drafts": drafts}
        typer.echo(json.dumps(answer | ({"store": stored} if stored else {})))
        return
    if not rows:
        typer.echo(f"no checkpoint in {directory.checkpoints} yet")
    else:
        table = plain_table("step", "size", "written", texts=("when", "ranks", "plan", "state"))
        for row in rows:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.time)) if row.time else ""
            ranks = "" if row.world_size is None else str(row.world_size)
            sizes = (show_bytes(row.bytes), show_bytes(row.written_bytes))
            table.add_row(str(row.step), *sizes, when, ranks, row.plan, row.status)
        open_console().print(table)
        for row in (each for each in rows if each.why):
            typer.echo(f"step {row.step} is {row.status}: {row.why}")
        if nodes := sorted({node for row in rows for node in row.on_nodes}):
            typer.echo(f"files are also on the disks of {', '.join(nodes)}, which were not looked at")
    if drafts:
        typer.echo(f"{drafts} unfinished: still being written, or left by a killed run")
    if stored:
        show_stored(stored)


@checkpoints.command("verify")
def verify_run(
    run: RunName,
    step: Annotated[int | None, typer.Argument(metavar="[STEP]", min=0, show_default=False)] = None,
    as_json: Json = False,
    store: Annotated[bool, typer.Option("--store", help="Verify those in the run's object store instead.")] = False,
) -> int:
    """Read every byte of a checkpoint, or of all, and compare the checksums. Exit code 1 if one is damaged.

    \b
    trimaran checkpoints verify runs/stdlib-tiny
    trimaran checkpoints verify runs/stdlib-tiny 40
    trimaran checkpoints verify runs/stdlib-tiny --store
    trimaran checkpoints verify s3://bucket/my-run
    """
    if store or "://" in run:
        url = run if "://" in run else find_run(run).read_recipe().checkpoint.store
        if not url:
            raise UserError("A001.run-no-object", where=run)
        with progress_bar(open_console(stderr=True)) as progress:
            answers = verify_stored(url, step, progress)
        if as_json:
            typer.echo(json.dumps({"store": url, "checkpoints": answers}))
        else:
            for answer in answers:
                typer.echo(f"step {answer['step']} in the store: {'; '.join(answer['damages']) or 'verified'}")
        return EXIT_DAMAGED if any(answer["damages"] for answer in answers) else 0
    from trimaran.checkpoint.manifest import read_manifest
    from trimaran.checkpoint.step_files import files_elsewhere

    directory = find_run(run)
    folder = directory.checkpoints
    paths = sorted([*(step_path(folder, each) for each in complete_steps(folder)), *without_manifest(folder)])
    chosen = [path for path in paths if step in (None, step_of(path))]
    chosen = chosen or [find_step(folder, step, where=str(directory.path))]
    answers: list[dict[str, Any]] = []
    for path in chosen:
        if (damages := _damages(path)) is not None:
            elsewhere: list[str] = []
            with suppress(UserError):  # `_damages` has said why
                elsewhere = sorted(files_elsewhere(path, read_manifest(path)))
            answers.append({"step": int(path.name.removeprefix("step-")), "damages": damages, "on_nodes": elsewhere})
    if as_json:
        typer.echo(json.dumps({"run_dir": str(directory.path), "checkpoints": answers}))
    else:
        for answer in answers:
            here = f"verified, but for the files on {', '.join(nodes)}" if (nodes := answer["on_nodes"]) else "verified"
            typer.echo(f"step {answer['step']}: {'; '.join(answer['damages']) or here}")
    return EXIT_DAMAGED if any(answer["damages"] for answer in answers) else 0


@checkpoints.command("compare")
def compare_steps(run: RunName, one: Step, other: Step, as_json: Json = False) -> None:
    """Show how two checkpoints of a run differ, even if they are sharded differently.

    \b
    trimaran checkpoints compare runs/stdlib-tiny 20 40
    """
    from trimaran.checkpoint import StepFiles, compare

    directory = find_run(run)
    paths = [find_step(directory.checkpoints, each, where=str(directory.path)) for each in (one, other)]
    total = len({key for path in paths for key in StepFiles(path).index})
    found = compare(*paths)
    if as_json:
        differences = [{"key": each.key, "what": each.what, "values": each.num_values,
                        "different": each.num_different, "largest": each.largest} for each in found]  # fmt: skip
        typer.echo(json.dumps({"steps": [one, other], "tensors": total, "identical": total - len(found),
                               "differences": differences}))  # fmt: skip
        return
    typer.echo(f"{total - len(found)} of {total} tensors are identical")
    for each in sorted(found, key=lambda each: -(each.largest or 0))[:MAX_SHOWN_DIFFERENCES]:
        shown = f"{each.num_different:,} of {each.num_values:,} values differ" if each.num_values else each.what
        typer.echo(f"  {each.key}: {shown}{'' if each.largest is None else f', at most by {each.largest:.3g}'}")
    if len(found) > MAX_SHOWN_DIFFERENCES:
        typer.echo(f"  and {len(found) - MAX_SHOWN_DIFFERENCES} more")


@checkpoints.command("prune")
def prune_run(
    run: RunName,
    keep: Annotated[int, typer.Option(min=1, help="How many of the newest to keep.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which would be deleted.")] = False,
    as_json: Json = False,
) -> None:
    """Delete all but the newest checkpoints.

    The newest verified checkpoint and everything after it are always kept, and so are multiples of
    checkpoint.keep_every. The run must not be running: a live run prunes by itself.

    \b
    trimaran checkpoints prune runs/stdlib-tiny --keep 2 --dry-run
    """
    from trimaran.checkpoint.durable import DurableDisk, report_disk_errors

    directory = find_run(run)
    folder, keep_every = directory.checkpoints, directory.read_recipe().checkpoint.keep_every
    find_step(folder, None, where=str(directory.path))
    newest_first = reversed(complete_steps(folder))
    verified = next((step for step in newest_first if _damages(step_path(folder, step)) == []), None)
    if verified is None:
        raise UserError("K028.no-checkpoint-run", where=str(folder))
    if dry_run:
        gone = steps_to_prune(complete_steps(folder), keep=keep, keep_every=keep_every, verified=verified)
    else:
        with _exclusive(directory), report_disk_errors(folder):
            gone = prune(folder, keep=keep, keep_every=keep_every, verified=verified, disk=DurableDisk())
    left = [step for step in complete_steps(folder) if step not in gone]
    if as_json:
        typer.echo(json.dumps({"deleted": gone, "kept": left, "verified": verified, "dry_run": dry_run}))
    else:
        typer.echo(f"{'would delete' if dry_run else 'deleted'} {_step_list(gone)}; kept {_step_list(left)}")


@checkpoints.command("import")
def import_folder(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What torch.distributed.checkpoint.save wrote.")],
    run_dir: Annotated[
        Path, typer.Option(metavar="DIR", help="The run that resumes from it, or a new folder.",
                           autocompletion=complete_run)],
    recipe: Annotated[
        str | None, typer.Option(metavar="FILE", help="The recipe of a new run.", autocompletion=complete_recipe)
    ] = None,
    settings: Settings = None,
    step: Annotated[int | None, typer.Option(metavar="N", min=0, help="[default: the optimizer's]")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Import a torch distributed checkpoint (DCP), exported by Trimaran or saved with FSDP, as a checkpoint of a run.

    Weights and AdamW states are matched by name. Without states the optimizer starts fresh. Nothing in the folder is
    unpickled: anything but tensors is skipped.

    \b
    trimaran checkpoints import /data/fsdp/step-1000 --run-dir runs/mine --recipe mine.yaml
    trimaran resume runs/mine
    """
    from trimaran.app.recipe.recipe_files import with_model_tokenizer
    from trimaran.app.recipe.request import resolve
    from trimaran.checkpoint import DcpSource, Manifest, find_imported_tensors, write_imported_tensors

    is_new = not run_dir.exists()
    if not is_new and (recipe or settings):
        raise UserError("A001.recipe-set-new", where=str(run_dir))
    if is_new and not recipe and not settings:
        raise UserError("A001.new-run", where=str(run_dir))
    source = DcpSource(folder)
    if is_new:
        refuse_occupied(run_dir)
        request = resolve(recipe, settings or [])
        arrivals = find_imported_tensors(source, request.recipe)
        run = create_run(run_dir, with_model_tokenizer(request.recipe), request.plan)
    else:
        run = open_run(run_dir)
        arrivals = find_imported_tensors(source, run.read_recipe())
    at = arrivals.step if step is None else step
    trained = run.read_recipe()
    with progress_bar(open_console(stderr=True)) as progress, take_lease(run) as lease:
        newest = max(complete_steps(run.checkpoints), default=-1)
        if at <= newest:
            raise UserError(
                "K029.run-already-checkpoint", where=str(run.checkpoints), newest=newest, next_step=newest + 1
            )
        facts = {"seed": trained.train.seed, "global_batch": trained.train.global_batch}
        about = Manifest(step=at, time=time.time(), term=lease.term, recipe=read_regular_text(run.recipe),
                         progress=facts)  # fmt: skip
        path = write_imported_tensors(arrivals, source, run.checkpoints, manifest=about, progress=progress)
    answer = {"run_dir": str(run.path), "path": str(path), "step": int(path.name.removeprefix("step-")),
            "tensors": len(arrivals.tensors), "with_moments": arrivals.with_moments,
            "passed_over": source.skipped_keys}  # fmt: skip
    if as_json:
        typer.echo(json.dumps(answer))
        return
    moments = "with optimizer states" if answer["with_moments"] else "with a fresh optimizer"
    typer.echo(f"step {answer['step']} is in {answer['path']}, {moments}\nnext  trimaran resume {run_dir}")


def _exclusive(run: RunDirectory) -> AbstractContextManager[Any]:
    """Return a lease on `run`, so that no other process runs it meanwhile. On a full disk none is needed."""
    try:
        return take_lease(run)
    except UserError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in DISK_FULL_ERRORS:
            return nullcontext()  # no process holds the lease, and none can take it on a full disk
        raise


def _damages(path: Path) -> list[str] | None:
    """Return the damages of a checkpoint; None if a live run has pruned it meanwhile."""
    with progress_bar(open_console(stderr=True)) as progress:
        found = verify_present(path, lambda fraction: progress(f"verifying {path.name}", fraction))
    return None if found is None else [str(each) for each in found]


def _step_list(numbers: list[int]) -> str:
    return f"step {', '.join(map(str, numbers))}" if numbers else "none"


def list_stored(url: str) -> dict[str, Any]:
    """Return the checkpoints in the store, oldest first. If it cannot be used, `error` says why."""
    try:
        store = open_store(url)
        rows = [_stored_row(store, each) for each in store.steps()]
    except (StoreError, UserError) as error:
        why = f"{error.what}; {error.fix}" if isinstance(error, UserError) else str(error)
        return {"url": url, "checkpoints": [], "error": why}
    return {"url": url, "checkpoints": rows}


def _stored_row(store: ObjectStore, stored: StoredStep) -> dict[str, Any]:
    row = {"step": stored.step, "name": stored.name, "status": "unfinished", "bytes": sum(stored.sizes.values())}
    if stored.refused:
        return row | {"status": "refused", "why": "the run went back to an earlier step, because this state was bad"}
    if not stored.complete:
        return row
    try:
        manifest, _ = store.read_manifest(stored.name)
    except DamagedError as error:
        return row | {"status": "damaged", "why": str(error.damages[0])}
    wrong = [file for file, record in manifest.files.items() if stored.sizes.get(file) != record.bytes]
    status = {"status": "damaged", "why": f"{wrong[0]} is missing or has another length"} if wrong else {}
    return row | {"status": "complete", "time": manifest.time} | status


def show_stored(stored: dict[str, Any]) -> None:
    """Print the checkpoints in the store, one a line."""
    if stored.get("error"):
        typer.echo(f"the store {stored['url']} cannot be read: {stored['error']}")
        return
    typer.echo(f"in {stored['url']}:" if stored["checkpoints"] else f"no checkpoint in {stored['url']} yet")
    for row in stored["checkpoints"]:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"])) if "time" in row else ""
        parts = [f"  step {row['step']}", show_bytes(row["bytes"]), when, row["status"], row.get("why", "")]
        typer.echo("  ".join(filter(None, parts)))


def verify_stored(url: str, step: int | None, progress: Callable[[str, float], None]) -> list[dict[str, Any]]:
    """Return what is wrong with the checkpoint of `step` in the store, or with each, after reading every byte."""
    store = open_store(url)
    try:
        steps = [each for each in store.steps() if each.complete]
        chosen = [each for each in steps if step in (None, each.step)]
        if not chosen:
            known = ", ".join(str(each.step) for each in steps) or "none yet"
            raise UserError("K028.store-no", where=url, known=known)
        return [
            {"step": each.step, "name": each.name, "damages": _stored_damages(store, each, progress)} for each in chosen
        ]
    except StoreError as error:
        raise unusable_store(url, str(error)) from None


def _stored_damages(store: ObjectStore, stored: StoredStep, progress: Callable[[str, float], None]) -> list[str]:
    total, done = max(1, sum(stored.sizes.values())), 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes

    def show() -> None:
        progress(f"verifying {stored.name} in the store", min(1.0, done / total))

    return [str(each) for each in store.verify(stored.name, count, show)]
