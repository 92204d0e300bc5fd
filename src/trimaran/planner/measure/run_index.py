"""The index of measured plans: one file in the user's state folder, with a record for each run that was seen.

A record is read again when a file of its run has changed. The index is a cache: it may be deleted at any time.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.core.regular_files import read_regular_bytes, write_atomically
from trimaran.core.version import VERSION
from trimaran.planner.measure.measured_plan import MeasuredPlan, measured_plans
from trimaran.runs.run_directory import MARKER

FORMAT = 1
MAX_INDEX_BYTES = 256 << 20
MAX_DEPTH = 4  # of runs below a folder
WATCHED_FILES = ("metrics.jsonl", "plan.json", "recipe.yaml", "attempts.jsonl", "events/rank-0.jsonl")

Stamp = tuple[int, ...]
"""Times and sizes of a run's files, which change with them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedRun:
    """What is known of a run: its measured plans as dictionaries, or why it has none."""

    stamp: Stamp
    plans: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""

    @property
    def measured(self) -> list[MeasuredPlan]:
        """The plans; without those that the file does not have in full, because somebody edited it."""
        return [plan for each in self.plans if (plan := _plan_of(each)) is not None]


@dataclass(slots=True)
class RunIndex:
    """The runs by path. `path` is the file, None without a home directory; `changed`: it differs from the file."""

    path: Path | None
    runs: dict[str, IndexedRun] = field(default_factory=dict)
    changed: bool = False

    def refresh(self, runs: Iterable[Path], *, limit: int | None = None) -> int:
        """Read the runs that are new or have changed, at most `limit` of them; return how many."""
        count = 0
        for run in runs:
            key, stamp = str(run), stamp_of(run)
            known = self.runs.get(key)
            if known is not None and known.stamp == stamp:
                continue
            self.runs[key], self.changed = _read(run, stamp), True
            count += 1
            if count == limit:
                break
        return count

    def write(self) -> None:
        """Write the file if anything changed. A folder that cannot be written costs only time, so it is no error."""
        if self.path is None or not self.changed:
            return
        runs = {key: [list(run.stamp), list(run.plans), run.reason] for key, run in self.runs.items()}
        tree = {"format": FORMAT, "version": VERSION, "runs": runs}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(self.path, json.dumps(tree, separators=(",", ":")), mode=0o600)
            self.changed = False


def index_path(environ: Mapping[str, str]) -> Path | None:
    """Return the file of the index: `$XDG_STATE_HOME/trimaran/history.json`, by default below `~/.local/state`."""
    try:
        home = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    except RuntimeError:  # this user has no home directory
        return None
    return home / "trimaran" / "history.json"


def open_index(path: Path | None) -> RunIndex:
    """Return the index in the file; an empty one if there is none, or one that another version wrote."""
    index = RunIndex(path)
    if path is None:
        return index
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        tree = json.loads(read_regular_bytes(path, limit_bytes=MAX_INDEX_BYTES))
        if (tree["format"], tree["version"]) == (FORMAT, VERSION):
            index.runs = {
                key: IndexedRun(stamp=tuple(stamp), plans=tuple(plans), reason=reason)
                for key, (stamp, plans, reason) in tree["runs"].items()
            }
    return index


def find_runs(folder: Path, *, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the runs in `folder`, in the order of their names: itself, or those below it, up to `depth` folders deep.

    Hidden folders and links are not followed. Paths are absolute.
    """
    if os.path.isfile(folder / MARKER):  # False in a folder of another user
        yield folder.absolute()
        return
    if depth == 0:
        return
    try:
        with os.scandir(folder) as entries:
            names = sorted(each.name for each in entries if each.is_dir(follow_symlinks=False))
    except OSError:
        return
    for name in names:
        if not name.startswith("."):
            yield from find_runs(folder / name, depth=depth - 1)


def stamp_of(run: Path) -> Stamp:
    """Return the times and sizes of the run's files that its measurements come from."""
    found: list[int] = []
    for name in WATCHED_FILES:
        try:
            status = os.stat(f"{run}/{name}")
            found += [status.st_mtime_ns, status.st_size]
        except OSError:
            found += [0, 0]
    return tuple(found)


def best_measured(index: RunIndex, is_same: Callable[[Mapping[str, Any]], bool]) -> MeasuredPlan | None:
    """Return the fastest measured plan whose job, as a dictionary, `is_same`; None if there is none.

    Runs that were deleted or changed since they were read do not count.
    """
    found = [
        (each["measured"]["tokens_per_second"], key, each)
        for key, run in index.runs.items()
        for each in run.plans
        if is_same(each.get("job", {}))
    ]
    for _, key, tree in sorted(found, key=lambda each: each[0], reverse=True):
        plan = _plan_of(tree)
        if plan is not None and index.runs[key].stamp == stamp_of(Path(key)):
            return plan
    return None


def _plan_of(tree: Mapping[str, Any]) -> MeasuredPlan | None:
    try:
        return MeasuredPlan.from_dict(tree)
    except (KeyError, TypeError):
        return None


def _read(run: Path, stamp: Stamp) -> IndexedRun:
    # Readers of a run's files import much, and `plan` rarely finds a run that has changed.
    from trimaran.planner.measure.measured_run import UnusableRunError, read_measured_run  # noqa: PLC0415

    try:
        return IndexedRun(stamp=stamp, plans=tuple(each.as_dict() for each in measured_plans(read_measured_run(run))))
    except UnusableRunError as error:
        return IndexedRun(stamp=stamp, reason=str(error))
