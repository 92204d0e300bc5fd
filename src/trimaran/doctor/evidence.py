"""Reads the files of a run once, for all rules."""

import gzip
import json
import logging
import re
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from trimaran.core import SLOW_DETAILS, Finding, Plan, Recipe, UserError, open_regular_file, read_regular_text
from trimaran.machine import parse_cluster, part_of
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import Question
from trimaran.runs import RunDirectory, last_lines, parse_lines, read_json_lines

log = logging.getLogger(__name__)

MAX_TRACE_BYTES = 128 << 20  # uncompressed; larger traces are not read
SCALAR_READ = "aten::_local_scalar_dense"  # `.item()` and the like
# Calls that make the host wait for the device.
SYNC_CALLS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", SCALAR_READ)
MAX_SNAPSHOTS = 16  # the newest
MAX_SNAPSHOT_BYTES = 16 << 20
SNAPSHOT_NAME = re.compile(r"memory-step-\d+-rank-(\d+)\.json")
PHASES = ("forward", "backward")  # elsewhere the optimizer and the loop read scalars on purpose


def read_traces(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a summary of each of our traces: `file`, `steps`, `waits` by call, `places` and `wait_seconds`."""
    for path in sorted(folder.glob("step-*-rank-*.trace.json.gz")):
        try:
            about = path.stat()
            facts = _facts(path, about.st_mtime_ns, about.st_size)
        except (OSError, ValueError, EOFError, zlib.error, KeyError, TypeError, AttributeError) as error:
            log.warning("cannot read the trace %s: %r", path, error)
            continue
        if facts:
            yield facts


@lru_cache(maxsize=64)
def _facts(path: Path, changed: int, size: int) -> dict[str, Any]:
    """Return the summary of a trace. `changed` and `size` are keys of the cache: an unchanged file is read once."""
    with open_regular_file(path, follow_links=True) as packed, gzip.open(packed) as file:
        raw = file.read(MAX_TRACE_BYTES + 1)
    if len(raw) > MAX_TRACE_BYTES:
        return {}
    tree = json.loads(raw)
    about = tree["trimaran"]
    first, last = about["steps"]
    spans = sorted((begin, end, phase) for _, phase, begin, end in about["phases"] if phase in PHASES)
    base = int(tree.get("baseTimeNanoseconds") or 0)
    waits: Counter[str] = Counter()
    places: Counter[str] = Counter()
    seconds, before, busy_until = 0.0, "", 0.0
    events = sorted((each for each in tree["traceEvents"] if each.get("ph") == "X"), key=lambda each: each["ts"])
    # On a GPU the trace has the CUDA call itself, and reading a scalar of a CPU tensor costs nothing.
    calls = {each["name"] for each in events if each["name"] in SYNC_CALLS}
    calls = calls - {SCALAR_READ} or calls
    for event in events:
        if event["name"] in calls and (phase := _phase(spans, base + event["ts"] * 1e3)):
            waits[event["name"]] += 1
            places[f"{phase}, after {before}"] += 1
            seconds += event.get("dur", 0.0) / 1e6
        elif event.get("cat") == "cpu_op" and event["ts"] >= busy_until and event["name"] != "aten::item":
            before, busy_until = event["name"], event["ts"] + event.get("dur", 0.0)
    return {
        "file": path.name,
        "steps": last - first + 1,
        "waits": dict(waits),
        "places": dict(places.most_common(5)),
        "wait_seconds": seconds,
    }


def _phase(spans: list[tuple[int, int, str]], moment: float) -> str:
    index = bisect_right(spans, (moment, float("inf"), "")) - 1
    return spans[index][2] if index >= 0 and spans[index][1] >= moment else ""


def read_snapshots(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the newest snapshots by time, each with its `rank`. Files that are not our snapshots are skipped."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("memory-step-*-rank-*.json"))[-MAX_SNAPSHOTS:]:
        name = SNAPSHOT_NAME.fullmatch(path.name)
        try:
            tree = json.loads(read_regular_text(path)) if path.stat().st_size <= MAX_SNAPSHOT_BYTES else None
        except (OSError, ValueError):
            continue
        if name and isinstance(tree, dict) and isinstance(tree.get("time"), int | float):
            found.append(tree | {"rank": int(name[1]), "file": path.name})
    yield from sorted(found, key=lambda each: each["time"])


Line = dict[str, Any]
REPEATED_DETAILS = tuple(name for name in SLOW_DETAILS if name not in ("ranks", "rows"))
MAX_STEPS = 400  # the most recent ones, which the rules see
MAX_BYTES = 2 << 20  # from the ends of the files of one kind, so that a run of weeks is read in a moment
MIN_FILE_BYTES = 1 << 17  # of each file, such as the samples of one of many nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # compared by identity: `step_breakdown` caches by it
class Evidence:
    """The parsed files of a run. Lines are as they were written; optional keys may be missing."""

    recipe: Recipe
    plan: Plan
    steps: tuple[Line, ...] = ()  # the last `MAX_STEPS` lines of the metrics
    events: tuple[Line, ...] = ()  # of all ranks by time
    incidents: tuple[Line, ...] = ()
    samples: tuple[Line, ...] = ()  # of all nodes by time
    attempts: tuple[Line, ...] = field(default=())
    traces: tuple[Line, ...] = ()  # summaries of profiles
    snapshots: tuple[Line, ...] = ()  # summaries of memory snapshots
    # to predict another plan; None if the model's sizes or the cluster are unknown
    planner_inputs: Callable[[], Question | None] = lambda: None
    reference: "Evidence | None" = None  # of a run with the same model on fewer ranks, if the user named one

    def events_of_kind(self, kind: str) -> tuple[Line, ...]:
        return tuple(each for each in self.events if each.get("kind") == kind)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


Rule = Callable[[Evidence], Iterable[Finding]]


def read_evidence(
    run: RunDirectory, *, calibrations: Path | None = None, against: RunDirectory | None = None
) -> Evidence:
    """Return the evidence in the run's files; `against` is a run of the same recipe to compare with.

    Raises UserError unless that run has the same model and fewer ranks.
    """
    lines: dict[str, list[Line]] = {}
    for name, pattern in FILE_PATTERNS.items():
        paths = sorted(run.path.glob(pattern))
        backlog = max(MIN_FILE_BYTES, MAX_BYTES // max(1, len(paths)))
        lines[name] = [line for path in paths for line in read_json_lines(path, backlog=backlog)]
    steps = [each for each in parse_lines(last_lines(run.metrics, MAX_STEPS)) if _is_step(each)]
    # Each step gets the latest slow details, except statistics: rules count how often something is so.
    latest: Line = {}
    detailed: list[Line] = []
    for step in steps:
        latest |= {name: step[name] for name in REPEATED_DETAILS if name in step}
        detailed.append(latest | step)
    recipe, plan, reference = run.read_recipe(), run.read_plan(), None
    if against is not None:
        reference = read_evidence(against)
        if (reference.recipe.model, reference.recipe.data.seq_len) != (recipe.model, recipe.data.seq_len):
            raise UserError("A019.two-runs-train", where=str(against.path))
        if reference.plan.mesh.world_size >= plan.mesh.world_size:
            ranks = f"{reference.plan.mesh.world_size} ranks to {plan.mesh.world_size}"
            raise UserError("A019.run-compare", where=str(against.path), ranks=ranks)
    return Evidence(
        recipe=recipe,
        plan=plan,
        steps=tuple(detailed),
        traces=tuple(read_traces(run.profiles)),
        snapshots=tuple(read_snapshots(run.profiles)),
        planner_inputs=cache(lambda: read_planner_inputs(recipe, plan, calibrations=calibrations)),
        reference=reference,
        **{name: tuple(sorted(found, key=_time)) for name, found in lines.items()},
    )


def read_planner_inputs(recipe: Recipe, plan: Plan, *, calibrations: Path | None = None) -> Question | None:
    """Return the planner's question; None if unknown. A CPU's speed is that at planning time: now the run uses it."""
    try:
        cluster = part_of(parse_cluster(recipe.cluster, calibrations=calibrations), plan.mesh.world_size)
        spec, outline = spec_of(recipe.model), outline_if_known(recipe.model, recipe.data)
    except UserError:
        return None
    if outline is None or cluster.world_size != plan.mesh.world_size:
        return None
    if not cluster.device.traits.has_data_sheet and plan.prediction:
        cluster = replace(
            cluster, device=replace(cluster.device, peak_flops={"fp32": plan.prediction.device_peak_flops})
        )
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, max_plans=1)


FILE_PATTERNS = {
    "events": "events/rank-*.jsonl",
    "incidents": "incidents.jsonl",
    "samples": "telemetry/node-*.jsonl",
    "attempts": "attempts.jsonl",
}


def _time(line: Line) -> float:
    at = line.get("time", 0.0)
    return float(at) if isinstance(at, int | float) else 0.0


def _is_step(line: Line) -> bool:
    """Whether a line of the metrics has the numbers that rules rely on; a file may be damaged."""
    phases = line.get("phases")
    numbers = [line.get("step"), line.get("step_seconds"), *(phases.values() if isinstance(phases, dict) else [None])]
    return all(isinstance(each, int | float) for each in numbers)
