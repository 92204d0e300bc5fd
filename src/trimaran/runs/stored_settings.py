"""Reads the recipe and the plan of a run directory, and creates a run from those in a folder.

`RunDirectory` imports it when they are read: a process that only needs paths, such as the sidecar, starts without
pydantic.
"""

import logging
import time
from functools import lru_cache
from pathlib import Path

from pydantic import ValidationError

from trimaran.core import (
    Plan,
    Prediction,
    Recipe,
    UserError,
    dump_recipe,
    fixed_field_changes,
    parse_recipe,
    show_bytes,
)
from trimaran.core.parse_text import TextError, load_json
from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.runs.run_directory import RunDirectory, create_run, dump_plan, holds_run, writing

MAX_FILE_BYTES = 16 << 20


def read_stored_recipe(path: Path) -> Recipe:
    """Return the recipe in this file; raise UserError if it is missing or damaged."""
    return _parsed_recipe(_read_text(path), str(path))


def read_stored_plan(path: Path) -> Plan:
    """Return the plan in this file with its prediction; raise UserError if it is missing or damaged."""
    try:
        tree = load_json(_read_text(path))
        prediction = Prediction.model_validate(tree["prediction"]) if tree.get("prediction") else None
        return Plan.model_validate(tree["plan"]).model_copy(update={"prediction": prediction})
    except TextError as error:
        raise _unreadable(path, error.what, line=error.line) from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _unreadable(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (KeyError, TypeError, AttributeError):
        raise _unreadable(path, "it has no plan") from None


def _read_text(path: Path) -> str:
    """Return the text of a file that the run cannot do without."""
    try:
        data = read_regular_bytes(path, limit_bytes=MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise _unreadable(path, f"it is larger than {show_bytes(MAX_FILE_BYTES)}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _unreadable(path, "it is not UTF-8 text", line=data.count(b"\n", 0, error.start) + 1) from None


@lru_cache(maxsize=4)
def _parsed_recipe(text: str, name: str) -> Recipe:
    """Return the recipe of the text. A process reads that of its run several times, and parsing takes 14 ms.

    Its plug-ins need not be installed where it is read: only the ranks and the sinks load them.
    """
    return parse_recipe(text, name=name, any_plugin=True)


def _unreadable(path: Path, why: str, *, line: int = 0) -> UserError:
    return UserError(
        "A008.run-cannot-read", where=f"{path}, line {line}" if line else str(path), path=path.name, why=why
    )


log = logging.getLogger(__name__)

COMPLETE_SECONDS = 10.0  # then the node that was to write the files is taken for lost
POLL_SECONDS = 0.1


def create_run_from(folder: Path, path: Path, *, complete_seconds: float = COMPLETE_SECONDS) -> RunDirectory:
    """Return the run at `path`, which one caller creates from `recipe.yaml` and `plan.json` in `folder`.

    Others wait `complete_seconds`, then complete it. Raises if `path` holds another run, or other files.
    """
    source, run = RunDirectory(folder), RunDirectory(path)
    if not (source.recipe.is_file() and source.plan.is_file()):
        raise UserError("L021.folder-no-recipe", where=f"--create-from {folder}")
    recipe, plan = source.read_recipe(), source.read_plan()
    if not holds_run(path):
        try:
            return create_run(path, recipe, plan)
        except UserError as error:
            if error.code != "D004":  # another node was faster
                raise
    _wait_until_complete(run, recipe, plan, complete_seconds)
    if changed := fixed_field_changes(run.read_recipe(), recipe):
        raise UserError("L021.run-directory-holds", where=str(path), changed=", ".join(changed))
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
