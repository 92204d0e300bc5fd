"""Creates a run from a folder with its recipe and plan, where several nodes of the run may do so at the same time."""

import logging
import time
from pathlib import Path

from trimaran.core import Plan, Recipe, UserError, dump_recipe, fixed_field_changes
from trimaran.core.regular_files import write_atomically
from trimaran.runs.run_directory import RunDirectory, create_run, dump_plan, holds_run, writing

log = logging.getLogger(__name__)

COMPLETE_SECONDS = 10.0  # then the node that was to write the files is taken for lost
POLL_SECONDS = 0.1


def create_run_from(folder: Path, path: Path, *, complete_seconds: float = COMPLETE_SECONDS) -> RunDirectory:
    """Return the run at `path`, which exactly one caller creates from `recipe.yaml` and `plan.json` in `folder`.

    The others wait until it is complete; after `complete_seconds` they complete it. Raises if `path` holds another run,
    or other files.
    """
    source, run = RunDirectory(folder), RunDirectory(path)
    if not (source.recipe.is_file() and source.plan.is_file()):
        raise UserError("L021", "this folder has no recipe.yaml and plan.json", where=f"--create-from {folder}",
                        fix="name the folder that `trimaran launch --out` wrote")  # fmt: skip
    recipe, plan = source.read_recipe(), source.read_plan()
    if not holds_run(path):
        try:
            return create_run(path, recipe, plan)
        except UserError as error:
            if error.code != "D004":  # another node was faster
                raise
    _wait_until_complete(run, recipe, plan, complete_seconds)
    if changed := fixed_field_changes(run.read_recipe(), recipe):
        raise UserError("L021", f"the run directory holds another run: {', '.join(changed)} differ", where=str(path),
                        fix="name a new run directory, or the folder that this run was made from")  # fmt: skip
    return run


def _wait_until_complete(run: RunDirectory, recipe: Recipe, plan: Plan, complete_seconds: float) -> None:
    """Return when recipe and plan can be read. If the node that was to write them is lost, write them.

    Raises if the run has started before: then its files are damaged.
    """
    until = time.monotonic() + complete_seconds
    while True:
        try:
            run.read_plan()  # written last
            run.read_recipe()
            return
        except UserError:
            if run.lease.exists() or run.attempts.exists():
                raise
        if time.monotonic() >= until:
            break
        time.sleep(POLL_SECONDS)
    log.warning("the node that began to create %s has not finished; completing it", run.path)
    with writing(run):
        for folder in ("events", "logs"):
            (run.path / folder).mkdir(exist_ok=True)
        for file, text in ((run.recipe, dump_recipe(recipe)), (run.plan, dump_plan(plan))):
            write_atomically(file, text)
