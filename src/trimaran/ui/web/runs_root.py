"""The runs below one folder: listed fast, opened by name only, and started if the command allows it."""

import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from trimaran.app import ACTIVE_STATUSES, RunState, Status, finite, refuse_other_machine, resolve, tail
from trimaran.core import UserError, did_you_mean, file_error
from trimaran.runs import MARKER, RunDirectory, free_run_path, holds_run, open_run

SLUG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
SETTLED_SECONDS = 2.0  # a folder that changed this recently may change again without a new time stamp
MAX_KEPT = 2000  # runs whose facts are kept in memory
MAX_FILTERED = 500  # newest runs whose state is read for a filter by state


Key = TypeVar("Key")
Value = TypeVar("Value")


class RecentValues(Generic[Key, Value]):
    """Keeps the values that were used last, each with the version of the files of its files. Threads may share it."""

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._kept: OrderedDict[Key, tuple[tuple[int, ...], Value]] = OrderedDict()

    def get(self, key: Key) -> tuple[tuple[int, ...], Value] | None:
        """Return the version and the value; None without one."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def add(self, key: Key, version: tuple[int, ...], value: Value) -> None:
        with self._lock:
            self._kept[key] = version, value
            self._kept.move_to_end(key)
            while len(self._kept) > self._most:
                self._kept.popitem(last=False)


class ListedRun(NamedTuple):
    created: float
    slug: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """A row of the list: what `trimaran watch RUN --json` answers, for the newest steps. `error`: why it is unknown."""

    slug: str
    created: float
    status: Status | None = None
    model: str = ""
    plan: str = ""
    cluster: str = ""
    step: int = 0
    total_steps: int = 0
    tokens_per_second: float | None = None
    unit: str = "tokens"
    loss: float | None = None
    changed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """Some of the `total` runs that match, newest first. `is_cut`: a filter by state did not look at all of them."""

    runs: tuple[RunRow, ...]
    total: int
    is_cut: bool = False


class RunsRoot:
    """The folder of the runs. Names are slugs, links are refused, and nothing outside of the folder is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._created: dict[str, float] = {}
        self._newest: list[ListedRun] = []
        self._scanned: int | None = None  # the folder's time stamp, if the list is that of the folder
        self._facts = RecentValues[str, RunRow](MAX_KEPT)

    def list(self, *, search: str = "", statuses: Collection[Status] = (), first: int = 0, count: int = 50) -> RunPage:
        """Return the runs from `first` on whose name contains all words of `search`, and whose status is one given."""
        found, words = self.names(), search.casefold().split()
        if words:
            found = [each for each in found if all(word in each.slug.casefold() for word in words)]
        if not statuses:
            return RunPage(runs=tuple(map(self._facts_of, found[first : first + count])), total=len(found))
        facts = [each for each in map(self._facts_of, found[:MAX_FILTERED]) if each.status in statuses]
        return RunPage(runs=tuple(facts[first : first + count]), total=len(facts), is_cut=len(found) > MAX_FILTERED)

    def names(self) -> Sequence[ListedRun]:
        """Return all runs, newest first. The folder is read again only if its entries have changed."""
        with self._lock:
            try:
                changed = os.stat(self.path).st_mtime_ns
            except FileNotFoundError:
                return []  # the default folder, before the first run
            if self._scanned == changed:
                return self._newest
            names, created = _read_folder(self.path, self._created)
            self._created = created
            pairs = sorted(zip(created.values(), created, strict=True), reverse=True)
            self._newest = list(map(ListedRun._make, pairs))
            is_settled = time.time() - changed / 1e9 > SETTLED_SECONDS and len(created) == names
            self._scanned = changed if is_settled else None
            return self._newest

    def open(self, slug: str) -> RunDirectory:
        """Return the run of that name; raise UserError if it is no name, a link, or no run."""
        if not SLUG.fullmatch(slug):
            raise UserError("W003.not-name-run-choose", where="the address of the page", slug=slug[:60])
        path = self.path / slug
        try:
            is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
        except (OSError, ValueError):
            is_folder = False
        if not is_folder:
            near = did_you_mean(slug, [each.slug for each in self.names()[:1000]])
            raise UserError("W003.no-run", where=str(self.path), slug=slug, near=near)
        return open_run(path)

    def _facts_of(self, run: ListedRun) -> RunRow:
        """Return what the run's files say now; they are read again only if they have changed, or it is at work."""
        directory = RunDirectory(self.path / run.slug)
        version = version_of((directory.metrics, directory.attempts, directory.plan, directory.events(0)))
        kept = self._facts.get(run.slug)
        if kept is not None and kept[0] == version and kept[1].status not in ACTIVE_STATUSES:
            return kept[1]
        changed = max(version_of((directory.metrics, directory.attempts))[1::2]) / 1e9
        facts = RunRow(slug=run.slug, created=run.created, changed=changed if changed > 0 else run.created)
        try:
            state = RunState(directory, only_status=True)
            state.refresh()
        except (UserError, OSError) as error:  # its page says what is wrong
            if isinstance(error, OSError) and file_error(error) is None:
                raise
        else:
            model, last = state.recipe.model, state.steps[-1] if state.steps else None
            facts = replace(
                facts,
                status=state.status,
                model=Path(model.path).name if model.path else model.preset or model.family,
                plan=str(state.plan.mesh),
                cluster=state.recipe.cluster,
                step=state.step,
                total_steps=state.recipe.train.steps,
                tokens_per_second=finite([last.tokens_per_second]) if last else None,
                unit=state.unit,
                loss=finite([last.loss]) if last else None,
            )
        self._facts.add(run.slug, version, facts)
        return facts


def check_runs_root(path: Path, *, named: bool) -> RunsRoot:
    if (path.exists() and not path.is_dir()) or (named and not path.exists()):
        what = "this is a file, not a folder of runs" if path.exists() else "this folder of runs does not exist"
        raise UserError("W002", what, where=str(path),
                        fix="name the folder that has the run directories: --runs DIR")  # fmt: skip
    return RunsRoot(path.absolute())


def _read_folder(path: Path, known: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """Return how many folders there are, and when those that are runs were created; `known` ones are not looked at."""
    created: dict[str, float] = {}
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # so that no path is looked up from the root
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in filter(SLUG.fullmatch, names):
            at = known.get(name)
            if at is None:
                try:
                    found = os.stat(f"{name}/{MARKER}", dir_fd=folder, follow_symlinks=False)
                except OSError:
                    continue
                if not stat.S_ISREG(found.st_mode):
                    continue
                at = found.st_mtime
            created[name] = at
    finally:
        os.close(folder)
    return len(names), created


def version_of(files: Iterable[Path]) -> tuple[int, ...]:
    """Return the sizes and times of files, which change when something is written."""
    found = []
    for file in files:
        try:
            status = os.lstat(file)
            found += [status.st_size, status.st_mtime_ns]
        except OSError:
            found += [-1, -1]
    return tuple(found)


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
        return self.log.with_suffix(".yaml")

    @property
    def exists(self) -> bool:
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
        raise UserError("W007.page-read", where="trimaran ui")
    if not SLUG.fullmatch(name):
        raise UserError("W003.not-name-run", where="name", name=name[:60])
    path = free_run_path(root.path, name)
    folder = root.path / FOLDER
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink():
        raise UserError("W003.folder-recipes-link", where=str(folder))
    file, log = folder / f"{path.name}.yaml", folder / f"{path.name}.log"
    file.write_text(recipe, encoding="utf-8")
    refuse_other_machine(resolve(str(file), []).cluster)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "trimaran", "train", str(file), "--run-dir", str(path), "--quiet"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    return StartedRun(path.name, path, process, log)
