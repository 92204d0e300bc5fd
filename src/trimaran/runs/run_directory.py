"""The run directory: the paths of a run's files, and how a new run claims its folder."""

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.core import Bytes, UserError, did_you_mean, show_bytes, templated
from trimaran.runs.reserve import DISK_FULL_ERRORS

if TYPE_CHECKING:
    from trimaran.core import Plan, Recipe

MARKER = "trimaran-run.json"
DESCRIPTORS = "/proc/self/fd/"


class RunPath:
    """The path of a file or folder in every run directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, run: "RunDirectory", owner: type) -> Path:
        return run.path.joinpath(*self._parts)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run. Constructing it touches no file; `create_run` and `open_run` do.

    The processes of a run open its files below a descriptor of the directory (`/proc/self/fd/N`, see `HeldDirectory`),
    so that they write to the same directory if it is moved or replaced.
    """

    path: Path

    recipe = RunPath("recipe.yaml")
    plan = RunPath("plan.json")
    plugins = RunPath("plugins.json")  # those that the recipe names, with distribution and version; if there are any
    metrics = RunPath("metrics.jsonl")
    metrics_index = RunPath("metrics.index.jsonl")  # sums of blocks of steps, a cache; see `runs/read/step_index.py`
    rank_table = RunPath("telemetry", "ranks.json")  # the newest measures of every rank; see `runs/read/rank_table.py`
    evaluations = RunPath("evaluations.jsonl")  # what `trimaran eval` measured; see `run_records.py`
    findings = RunPath("findings.json")  # the doctor's latest
    profiles = RunPath("profiles")  # traces and memory snapshots
    model = RunPath("model")  # the trained weights as Hugging Face safetensors
    checkpoints = RunPath("checkpoints")  # a folder for each complete checkpoint: `step-00000012`
    lease = RunPath("lease")  # lets at most one supervisor run this run
    reserve = RunPath("reserve")  # preallocated, and given up when the disk is full; see `reserve.py`
    agent_log = RunPath("logs", "agent.log")  # of the supervisor and the fork server
    ranks_shown = RunPath("logs", "ranks.txt")  # the stacks and memory of every rank at the last SIGUSR1, as text
    # JSON lines: starts and ends of the ranks as the supervisor saw them, and one line for each state of an incident
    # and of a decision of the autopilot, see `run_records.py`. The rank reports of an incident are in its folder.
    attempts = RunPath("attempts.jsonl")
    incidents = RunPath("incidents.jsonl")
    decisions = RunPath("decisions.jsonl")
    quarantine = RunPath("quarantine.jsonl")  # the samples that are left out: `sample`, `reason`, `step`
    # Requests: stop at the next step that all ranks agree on, another plan (`run_requests.py`), a rank to be killed in
    # the next change of the plan (for drills), another number of ranks, no autopilot.
    stop_request = RunPath("stop")
    change_request = RunPath("change.json")
    kill_request = RunPath("change-drill.json")
    resize_request = RunPath("resize")
    autopilot_off = RunPath("autopilot-off")
    # Of nodes, see `node_records.py`: those that the run goes on without, how fast they compute now, and their links.
    left_out_nodes = RunPath("nodes-left-out.json")
    node_speeds = RunPath("node-speeds.json")
    measured_links = RunPath("links.json")

    @property
    def location(self) -> Path:
        """The path to show to a person and to give to other programs; a held directory is where it is now."""
        return Path(show_paths(str(self.path), self.path))

    def incident(self, name: str) -> Path:
        return self.path / "incidents" / name

    def samples(self, node: int) -> Path:
        """Samples of a node's machine (CPU, memory, GPUs), every few seconds; see `runs/sinks/sampler.py`."""
        return self.path / "telemetry" / f"node-{node}.jsonl"

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

    def read_recipe(self) -> "Recipe":
        """Return the run's recipe; raise UserError if its file is missing or damaged."""
        from trimaran.runs.stored_settings import read_stored_recipe  # noqa: PLC0415  it needs pydantic

        return read_stored_recipe(self.recipe)

    def read_plan(self, file: Path | None = None) -> "Plan":
        """Return the plan in plan.json, or in an earlier `file`; raise UserError if it is missing or damaged."""
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
        raise UserError("D003.run-directory", where=str(path), reason=error.strerror) from None
    return run


def open_run(path: Path) -> RunDirectory:
    """Return the run at `path`. Raises if there is none."""
    if not path.is_dir():
        near = did_you_mean(path.name, [each.name for each in path.parent.glob("*") if holds_run(each)])
        raise UserError("D001.run-directory", where=str(path), near=near)
    if not holds_run(path):
        raise UserError("D002.folder-not-trimaran", where=str(path), marker=MARKER)
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
    return next(path for path in run_paths(root, name) if not path.exists())


def run_paths(root: Path, name: str) -> Iterator[Path]:
    """Yield `root/name`, `root/name-2`, `root/name-3` and so on."""
    yield root / name
    yield from (root / f"{name}-{number}" for number in range(2, 10_000))


def refuse_occupied(path: Path) -> None:
    """Raise unless `path` is free for a new run: missing, or an empty folder."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError("D002.run-directory-file", where=str(path))
    try:
        occupied = path.is_dir() and any(path.iterdir())
    except OSError as error:
        raise UserError("D003.run-directory-cannot-read", where=str(path), reason=error.strerror) from None
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
        raise UserError(
            "D003.run-directory-cannot-written", where=where, fix=fix, reason=error.strerror or error
        ) from error


def refuse_full_disk(path: Path, needed: Bytes) -> None:
    """Raise if the disk for `path` has less than `needed` bytes free."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.is_dir())
    total, _, free = shutil.disk_usage(existing)
    if free < needed and total:  # file systems such as /proc have no size; writing there fails with a better reason
        option = (
            templated("for example with `trimaran checkpoints prune {path} --keep 1`", path=path)
            if holds_run(path)
            else "choose another disk with --run-dir DIR"
        )
        raise UserError(
            "D005.checkpoints-trained-weights",
            where=str(path),
            needed=show_bytes(needed),
            free=show_bytes(free),
            option=option,
        )


def dump_plan(plan: "Plan") -> str:
    """Return the text of `plan.json`: the plan and its predicted cost."""
    return json.dumps(plan_tree(plan), indent=2) + "\n"


def plan_tree(plan: "Plan") -> dict[str, Any]:
    """Return the plan and its prediction for JSON."""
    prediction = plan.prediction.model_dump(mode="json") if plan.prediction else None
    return {"plan": plan.model_dump(mode="json"), "prediction": prediction}


def _occupied(path: Path) -> UserError:
    if holds_run(path):
        return UserError("D004.run-directory-already", where=str(path), path=path)
    return UserError("D002.folder-holds-files", where=str(path))


def _write_new(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
