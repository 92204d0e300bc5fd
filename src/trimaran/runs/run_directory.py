"""The run directory: the paths of a run's files, and how a new run claims its folder."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.core import Bytes, UserError, did_you_mean, show_bytes
from trimaran.runs.reserve import DISK_FULL_ERRORS

if TYPE_CHECKING:
    from trimaran.core import Plan, Recipe

MARKER = "trimaran-run.json"
DESCRIPTORS = "/proc/self/fd/"


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. Constructing it touches no file; `create_run` and `open_run` do.

    The processes of a run open its files below a descriptor of the directory (`/proc/self/fd/N`, see `HeldDirectory`),
    so that they write to the same directory if it is moved or replaced.
    """

    path: Path

    @property
    def location(self) -> Path:
        """The path to show to a person and to give to other programs; a held directory is where it is now."""
        return Path(show_paths(str(self.path), self.path))

    @property
    def reserve(self) -> Path:
        """A preallocated file that is given up when the disk is full; see `reserve.py`."""
        return self.path / "reserve"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def metrics_index(self) -> Path:
        """Sums of the metrics by blocks of steps, a cache for readers; see `runs/read/step_index.py`."""
        return self.path / "metrics.index.jsonl"

    @property
    def stop_request(self) -> Path:
        """A file that asks the ranks to stop at the next step that all agree on."""
        return self.path / "stop"

    @property
    def change_request(self) -> Path:
        """A file that asks the ranks to go on with another plan; see `run_requests.py`."""
        return self.path / "change.json"

    @property
    def kill_request(self) -> Path:
        """A file that has a rank killed in the next change of the plan, for drills; see `run_requests.py`."""
        return self.path / "change-drill.json"

    @property
    def model(self) -> Path:
        """The trained weights as Hugging Face safetensors."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """One folder for each complete checkpoint: `step-00000012`."""
        return self.path / "checkpoints"

    @property
    def incidents(self) -> Path:
        """The incidents, one JSON line for each state of one; its rank reports are in its folder, see `incident`."""
        return self.path / "incidents.jsonl"

    def incident(self, name: str) -> Path:
        return self.path / "incidents" / name

    @property
    def plugins(self) -> Path:
        """The plug-ins that the recipe names, with distribution and version; there is none without plug-ins."""
        return self.path / "plugins.json"

    @property
    def attempts(self) -> Path:
        """The attempts: starts and ends of the ranks, as the supervisor saw them; see `run_records.py`."""
        return self.path / "attempts.jsonl"

    @property
    def resize_request(self) -> Path:
        """A file that asks for another number of ranks, which it contains."""
        return self.path / "resize"

    @property
    def left_out_nodes(self) -> Path:
        """The host names of nodes that the run goes on without; see `node_records.py`."""
        return self.path / "nodes-left-out.json"

    @property
    def node_speeds(self) -> Path:
        """How fast left-out nodes compute now; see `node_records.py`."""
        return self.path / "node-speeds.json"

    @property
    def measured_links(self) -> Path:
        """The measured links between nodes, and the order that follows; see `node_records.py`."""
        return self.path / "links.json"

    @property
    def decisions(self) -> Path:
        """The decisions of the autopilot, one JSON line for each state of one; see `run_records.py`."""
        return self.path / "decisions.jsonl"

    @property
    def autopilot_off(self) -> Path:
        """A file that stops the autopilot of the run."""
        return self.path / "autopilot-off"

    @property
    def quarantine(self) -> Path:
        """The samples that are left out: JSON lines with `sample`, `reason`, `step`."""
        return self.path / "quarantine.jsonl"

    @property
    def lease(self) -> Path:
        """The folder of the lease, which lets at most one supervisor run this run."""
        return self.path / "lease"

    def samples(self, node: int) -> Path:
        """Samples of a node's machine (CPU, memory, GPUs), every few seconds; see `runs/sinks/sampler.py`."""
        return self.path / "telemetry" / f"node-{node}.jsonl"

    @property
    def rank_table(self) -> Path:
        """The newest measures of every rank, replaced every few seconds; see `runs/read/rank_table.py`."""
        return self.path / "telemetry" / "ranks.json"

    @property
    def profiles(self) -> Path:
        """Traces and memory snapshots."""
        return self.path / "profiles"

    @property
    def evaluations(self) -> Path:
        """What `trimaran eval` measured of this run's checkpoints; see `run_records.py`."""
        return self.path / "evaluations.jsonl"

    @property
    def findings(self) -> Path:
        """The doctor's latest findings about the run."""
        return self.path / "findings.json"

    def events(self, rank: int) -> Path:
        return self.path / "events" / f"rank-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank}.log"

    def stacks(self, rank: int) -> Path:
        """The file that a rank writes its stacks to on SIGUSR2, even when it hangs."""
        return self.path / "logs" / f"rank-{rank}.stacks"

    def report_request(self, rank: int) -> Path:
        """The file that tells a rank's heartbeat thread the folder for its report; see `HeartbeatBoard`."""
        return self.path / "incidents" / f"question-{rank}.json"

    @property
    def ranks_shown(self) -> Path:
        """The stacks and memory of every rank at the last SIGUSR1, as text."""
        return self.path / "logs" / "ranks.txt"

    @property
    def agent_log(self) -> Path:
        """The log of the supervisor and the fork server."""
        return self.path / "logs" / "agent.log"

    def read_recipe(self) -> "Recipe":
        """Return the run's recipe; raise UserError if its file is missing or damaged."""
        from trimaran.runs.stored_settings import read_stored_recipe  # noqa: PLC0415  it needs pydantic

        return read_stored_recipe(self.recipe)

    def read_plan(self, file: Path | None = None) -> "Plan":
        """Return the run's plan with its prediction; raise UserError if its file is missing or damaged.

        `file` is that of an earlier plan, see `earlier_plans`.
        """
        from trimaran.runs.stored_settings import read_stored_plan  # noqa: PLC0415  it needs pydantic

        return read_stored_plan(file or self.plan)

    def earlier_plans(self) -> list[Path]:
        """Return the files of the plans that were replaced, the first plan first: `plan-0.json` and so on."""
        files = (self.plan.with_stem(f"{self.plan.stem}-{number}") for number in count())
        return list(takewhile(Path.is_file, files))


def create_run(path: Path, recipe: "Recipe", plan: "Plan") -> RunDirectory:
    """Claim `path` for a new run and write its recipe and plan. If that fails, nothing is left behind.

    The folder must not exist or be empty: a new run never overwrites another run or other files. A new folder is only
    accessible to its owner; an existing one keeps its mode.
    """
    from trimaran.core import dump_recipe, plugin_records  # noqa: PLC0415  they need pydantic

    refuse_occupied(path)
    run = RunDirectory(path)
    created = [parent for parent in (path, *path.parents) if not parent.exists()]
    written: list[Path] = []
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_new(path / MARKER, json.dumps({"format": 1, "created": time.time(), "pid": os.getpid()}) + "\n")
        written.append(path / MARKER)
        for folder in ("events", "logs"):
            (path / folder).mkdir()
            written.append(path / folder)
        plugins = plugin_records(recipe)
        texts = {run.plugins: json.dumps(plugins, indent=2) + "\n"} if plugins else {}
        for file, text in (texts | {run.recipe: dump_recipe(recipe), run.plan: dump_plan(plan)}).items():
            written.append(file)
            _write_new(file, text)
    except FileExistsError:
        raise _occupied(path) from None  # another launch claimed the folder since `refuse_occupied`
    except OSError as error:
        for each in reversed(written):
            each.rmdir() if each.is_dir() else each.unlink(missing_ok=True)
        for folder in created:
            if folder.is_dir():
                folder.rmdir()
        raise UserError("D003", f"the run directory cannot be written: {error.strerror}", where=str(path),
                        fix="choose a folder you may write to, with free space: --run-dir DIR") from None  # fmt: skip
    return run


def open_run(path: Path) -> RunDirectory:
    """Return the run at `path`. Raises if there is none."""
    if not path.is_dir():
        near = did_you_mean(path.name, [each.name for each in path.parent.glob("*") if holds_run(each)])
        raise UserError("D001", f"this run directory does not exist{near}", where=str(path), fix="look under runs/")
    if not holds_run(path):
        raise UserError("D002", "this folder is not a Trimaran run", where=str(path),
                        fix=f"name a folder that `trimaran train` made (it holds {MARKER})")  # fmt: skip
    return RunDirectory(path)


def holds_run(path: Path) -> bool:
    return (path / MARKER).is_file()


def newest_term(run: RunDirectory) -> int:
    """Return the highest term that was claimed; 0 if there is none. The holder of a lower one must not write any more.

    This lists the folder: on network file systems that asks the server, while a lookup of one name may be cached.
    """
    names = os.listdir(run.lease) if run.lease.is_dir() else []
    terms = [name.removeprefix("term-").removesuffix(".json") for name in names if name.startswith("term-")]
    return max((int(term) for term in terms if term.isdigit()), default=0)


def show_paths(text: str, path: Path, *, in_json: bool = False) -> str:
    """Return `text` with the path of the directory in place of its descriptor, if `path` is below `/proc/self/fd/N`.

    `in_json`: `text` is JSON, so that quotes and backslashes in the directory's path are escaped.
    """
    if not str(path).startswith(DESCRIPTORS):
        return text
    descriptor = DESCRIPTORS + path.parts[4]

    def shown(_: re.Match[str]) -> str:
        return json.dumps(os.readlink(descriptor))[1:-1] if in_json else os.readlink(descriptor)

    return re.sub(rf"{descriptor}(?!\d)", shown, text)


def free_run_path(root: Path, name: str) -> Path:
    """Return `root/name`, or `root/name-2`, `root/name-3` and so on if that exists."""
    candidates = chain([name], (f"{name}-{number}" for number in range(2, 10_000)))
    return next(path for each in candidates if not (path := root / each).exists())


def refuse_occupied(path: Path) -> None:
    """Raise unless `path` is free for a new run: missing, or an empty folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError("D002", "the run directory is a file or a link", where=str(path),
                        fix="name a folder that does not exist yet: --run-dir DIR")  # fmt: skip
    try:
        occupied = path.is_dir() and any(path.iterdir())
    except OSError as error:
        raise UserError("D003", f"the run directory cannot be read: {error.strerror}", where=str(path),
                        fix="choose another folder: --run-dir DIR") from None  # fmt: skip
    if occupied:
        raise _occupied(path)


@contextmanager
def writing(run: RunDirectory) -> Iterator[None]:
    """Turn an OSError of a write to an existing run directory into a UserError."""
    try:
        yield
    except OSError as error:
        # Do not suggest another folder: the run is in this one.
        fix = "make it writable: check its permissions and how its disk is mounted"
        if error.errno in DISK_FULL_ERRORS:
            fix = "free disk space: `trimaran checkpoints prune RUN --keep 1`"
        where = show_paths(str(error.filename or run.path), run.path)
        raise UserError("D003", f"the run directory cannot be written: {error.strerror or error}", where=where,
                        fix=fix) from error  # fmt: skip


def refuse_full_disk(path: Path, needed: Bytes) -> None:
    """Raise if the disk for `path` has less than `needed` bytes free."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    total, _, free = shutil.disk_usage(existing)
    if free < needed and total:  # file systems such as /proc have no size; writing there fails with a better reason
        what = f"checkpoints and trained weights need {show_bytes(needed)}, the disk has {show_bytes(free)} free"
        option = (
            f"for example with `trimaran checkpoints prune {path} --keep 1`"
            if holds_run(path)
            else "choose another disk with --run-dir DIR"
        )
        raise UserError("D005", what, where=str(path), fix=f"free disk space, {option}, "
                        "or keep fewer checkpoints: --set checkpoint.keep=1")  # fmt: skip


def dump_plan(plan: "Plan") -> str:
    """Return the text of `plan.json`: the plan and its predicted cost."""
    tree: dict[str, Any] = {"plan": plan.model_dump(mode="json")}
    tree["prediction"] = plan.prediction.model_dump(mode="json") if plan.prediction else None
    return json.dumps(tree, indent=2) + "\n"


def _occupied(path: Path) -> UserError:
    if holds_run(path):
        fix = f"resume it: `trimaran resume {path}`, or choose another folder: --run-dir DIR"
        return UserError("D004", "this run directory already holds a run", where=str(path), fix=fix)
    return UserError("D002", "this folder holds files that are not a Trimaran run", where=str(path),
                     fix="name an empty or a new folder: --run-dir DIR")  # fmt: skip


def _write_new(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
