"""Measured plans, and their index: one file in the user's state folder, with a record for each run that was seen.

A record is read again when a file of its run has changed. The index is a cache: it may be deleted at any time.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from trimaran.core import VERSION, Plan, Recipe, UserError, read_regular_bytes, show_rows, write_atomically
from trimaran.models import Outline, outline_if_known
from trimaran.runs import MARKER

if TYPE_CHECKING:  # who reads records needs no reader of runs
    from trimaran.planner.measure.measured_run import MeasuredRun

SEARCHED_COMM = ("overlap", "regather")  # what a search chooses of `plan.comm`


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedFigures:
    """Seconds of a step, tokens per second of all ranks, MFU (0 if not known) and peak memory of a rank."""

    step_seconds: float
    tokens_per_second: float
    mfu: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """What must be equal for two measurements to be of the same work on the same machines."""

    model: str  # a digest of the network's shape
    seq_len: int
    global_batch: int
    states: str  # the format of the optimizer's states
    cluster: str
    host: str = ""  # of a CPU, whose speed no name tells; '' for GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run of a measurement. `time` is that of its last steady step, of which there are `num_steps`."""

    path: str
    name: str
    host: str
    version: str
    time: float
    num_steps: int
    goodput: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """A plan that a run measured. `pins` are its fields for `--set plan=`, `layout` is the plan as short text."""

    run: RunFacts
    model: str
    parameters: int
    job: PlannedJob
    pins: Mapping[str, Any]
    layout: str
    measured: SpeedFigures
    predicted: SpeedFigures | None

    @property
    def plan(self) -> Plan:
        return Plan.model_validate(dict(self.pins))

    @property
    def error(self) -> float | None:
        """How much longer the step was predicted to take than it took, relative; None without a prediction."""
        return self.predicted.step_seconds / self.measured.step_seconds - 1 if self.predicted else None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, tree: Mapping[str, Any]) -> Self:
        """Return the record that `as_dict` wrote; raise TypeError or KeyError if it is another one."""
        parts: dict[str, Any] = {"run": RunFacts(**tree["run"]), "job": PlannedJob(**tree["job"])}
        parts["measured"] = SpeedFigures(**tree["measured"])
        parts["predicted"] = SpeedFigures(**tree["predicted"]) if tree["predicted"] else None
        return cls(**{**tree, **parts})


def measured_plans(run: "MeasuredRun") -> list[MeasuredPlan]:
    """Return a record for each plan that the run measured."""
    recipe, path = run.recipe, run.recipe.model.path
    try:
        outline = outline_if_known(recipe.model, recipe.data)
    except UserError:  # its files are on another machine
        outline = None
    own_name = recipe.model.preset or (path.rstrip("/").rpartition("/")[2] if path else recipe.model.family)
    return [
        MeasuredPlan(
            run=RunFacts(
                path=str(run.path.absolute()),
                name=recipe.name,
                host=found.start.host,
                version=found.start.version,
                time=found.steps.last_time,
                num_steps=found.steps.num_steps,
                goodput=run.goodput,
            ),
            model=outline.name if outline and outline.name else own_name,
            parameters=outline.num_parameters if outline else 0,
            job=job_of_plan(recipe, outline, found.cluster, found.start.host),
            pins=pins_of(found.plan),
            layout=layout_of(found.plan),
            measured=_figures(found.steps),
            predicted=_figures(found.plan.prediction) if found.plan.prediction else None,
        )
        for found in run.plans
    ]


def _figures(source: object) -> SpeedFigures:
    """Return the figures of measured steps or of a prediction, which have them by the same names."""
    return SpeedFigures(**{each.name: getattr(source, each.name) for each in fields(SpeedFigures)})


def job_of_plan(recipe: Recipe, outline: Outline | None, cluster: str, host: str) -> PlannedJob:
    """Return what identifies the work of a recipe on a cluster."""
    shape = recipe.model.model_dump_json() if outline is None else repr(replace(outline, name=""))
    return PlannedJob(
        model=sha256(shape.encode()).hexdigest()[:16],
        seq_len=recipe.data.seq_len,
        global_batch=recipe.train.global_batch,
        states=recipe.train.optimizer.states,
        cluster=cluster,
        host=host if cluster.endswith("xcpu") else "",
    )


def pins_of(plan: Plan) -> dict[str, Any]:
    """Return the fields that pin the plan in a recipe: all that a search chooses, and what is not as by default."""
    every = plan.model_dump(mode="json")
    changed = plan.model_dump(mode="json", exclude_defaults=True)
    pins = {name: value for name, value in every.items() if name == "mesh" or not isinstance(value, dict)}
    searched = {name: every["comm"][name] for name in SEARCHED_COMM}
    return pins | changed | {"mesh": every["mesh"], "comm": searched | changed.get("comm", {})}


def layout_of(plan: Plan) -> str:
    """Return a plan as short text: its mesh, and what differs from the simplest plan."""
    recompute = plan.recompute if isinstance(plan.recompute, str) else f"every {plan.recompute}"
    named = (("shard", plan.sharding), ("recompute", recompute), ("offload", plan.offload))
    parts = [str(plan.mesh), *(f"{name} {value}" for name, value in named if value != "none"), plan.precision]
    rows = f"({show_rows(plan.rows_by_rank)})" if plan.rows_by_rank else plan.micro_batch
    return ", ".join([*parts, f"batch {rows} x {plan.grad_accum}"])


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
            # Readers of a run's files import much, and `plan` rarely finds a run that has changed.
            from trimaran.planner.measure.measured_run import UnusableRunError, read_measured_run  # noqa: PLC0415

            try:
                plans = tuple(each.as_dict() for each in measured_plans(read_measured_run(run)))
                self.runs[key] = IndexedRun(stamp=stamp, plans=plans)
            except UnusableRunError as error:
                self.runs[key] = IndexedRun(stamp=stamp, reason=str(error))
            self.changed = True
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
    """Yield the absolute paths of runs in `folder`, by name, up to `depth` deep; not in hidden folders or links."""
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
    """Return the fastest measured plan whose job `is_same`, of runs that have not changed since; None without one."""
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
