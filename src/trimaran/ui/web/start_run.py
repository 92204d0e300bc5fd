"""Starts a run from the web page, if the command allows it: always the same command, with a recipe that is a file."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trimaran.app.recipe.request import refuse_other_machine, resolve
from trimaran.app.show.logs import tail
from trimaran.core import UserError
from trimaran.runs.run_directory import free_run_path, holds_run
from trimaran.ui.web.runs_root import SLUG, RunsRoot

FOLDER = ".ui"  # in the runs' root: recipes and output of what was started here; no run has such a name
SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that was started: its name, its process and the file of its output."""

    slug: str
    path: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def recipe(self) -> Path:
        """The file of its recipe."""
        return self.log.with_suffix(".yaml")

    @property
    def exists(self) -> bool:
        """Whether its run directory is there, so that its page can be opened."""
        return holds_run(self.path)

    @property
    def failure(self) -> str:
        """The end of its output if the command has ended with an error; otherwise ''."""
        code = self.process.poll()
        return "" if code in (None, 0) else "\n".join(tail(self.log, SHOWN_LINES)) or f"exit code {code}"


def start_run(root: RunsRoot, recipe: str, name: str, *, may_write: bool) -> StartedRun:
    """Write the recipe into the runs' root, check it, and start `trimaran train` with it, detached from this process.

    Raises UserError for what `trimaran train` would refuse at once, and if the page may only read.
    """
    if not may_write:
        raise UserError("W007", "this page may only read", where="trimaran ui",
                        fix="end it, and start it with --write")  # fmt: skip
    if not SLUG.fullmatch(name):
        raise UserError("W003", f"'{name[:60]}' is not the name of a run", where="name",
                        fix="use letters, digits, dots and dashes")  # fmt: skip
    path = free_run_path(root.path, name)
    folder = root.path / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise UserError("W003", "the folder for recipes is a link", where=str(folder), fix="remove it")
    file, log = folder / f"{path.name}.yaml", folder / f"{path.name}.log"
    file.write_text(recipe, encoding="utf-8")
    refuse_other_machine(resolve(str(file), []).cluster)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trimaran", "train", str(file), "--run-dir", str(path), "--quiet"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return StartedRun(path.name, path, process, log)
