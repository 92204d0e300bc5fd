"""Reads the files of a run once, for all rules."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from trimaran.core import SLOW_DETAILS, Finding, Plan, Recipe, UserError
from trimaran.doctor.profile_evidence import read_snapshots, read_traces
from trimaran.machine import parse_cluster
from trimaran.machine.parse_cluster import part_of
from trimaran.models import outline_if_known, spec_of
from trimaran.planner import Question
from trimaran.runs import JsonlFollower, RunDirectory
from trimaran.runs.journal import parse_lines
from trimaran.runs.line_files import last_lines

Line = dict[str, Any]
REPEATED_DETAILS = tuple(name for name in SLOW_DETAILS if name not in ("ranks", "rows"))
MAX_STEPS = 400  # the most recent ones, which the rules see
MAX_BYTES = 2 << 20  # from the ends of the files of one kind, so that a run of weeks is read in a moment
MIN_FILE_BYTES = 1 << 17  # of each file, such as the samples of one of many nodes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # compared by identity: `step_breakdown` caches by it
class Evidence:
    """The parsed files of a run. Lines are as they were written; optional keys may be missing.

    `steps` are the last `MAX_STEPS` lines of the metrics, `events` those of all ranks by time, `samples` those of all
    nodes by time, `traces` summaries of profiles, `snapshots` summaries of memory snapshots. `planner_inputs` returns
    what the planner needs to predict another plan for the run; None if the model's sizes or the cluster are unknown.
    `reference` is the evidence of a run with the same model on fewer ranks, if the user named one.
    """

    recipe: Recipe
    plan: Plan
    steps: tuple[Line, ...] = ()
    events: tuple[Line, ...] = ()
    incidents: tuple[Line, ...] = ()
    samples: tuple[Line, ...] = ()
    attempts: tuple[Line, ...] = field(default=())
    traces: tuple[Line, ...] = ()
    snapshots: tuple[Line, ...] = ()
    planner_inputs: Callable[[], Question | None] = lambda: None
    reference: "Evidence | None" = None

    def events_of_kind(self, kind: str) -> tuple[Line, ...]:
        return tuple(each for each in self.events if each.get("kind") == kind)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


Rule = Callable[[Evidence], Iterable[Finding]]


def read_evidence(
    run: RunDirectory, *, calibrations: Path | None = None, against: RunDirectory | None = None
) -> Evidence:
    """Return the evidence in the run's files. `calibrations` is the folder of machine calibrations.

    `against` is a run of the same recipe to compare with.
    """
    lines: dict[str, list[Line]] = {}
    for name, pattern in FILE_PATTERNS.items():
        paths = sorted(run.path.glob(pattern))
        backlog = max(MIN_FILE_BYTES, MAX_BYTES // max(1, len(paths)))
        lines[name] = [line for path in paths for line in JsonlFollower(path, backlog=backlog).new()]
    steps = [each for each in parse_lines(last_lines(run.metrics, MAX_STEPS)) if _is_step(each)]
    recipe, plan = run.read_recipe(), run.read_plan()
    return Evidence(
        recipe=recipe,
        plan=plan,
        steps=tuple(_with_latest_details(steps)),
        traces=tuple(read_traces(run.profiles)),
        snapshots=tuple(read_snapshots(run.profiles)),
        planner_inputs=cache(lambda: read_planner_inputs(recipe, plan, calibrations=calibrations)),
        reference=_reference(recipe, plan, against),
        **{name: tuple(sorted(found, key=_time)) for name, found in lines.items()},
    )


def _reference(recipe: Recipe, plan: Plan, against: RunDirectory | None) -> Evidence | None:
    """Return the evidence of the run to compare with.

    Raises UserError if its model or sequence length differs from `recipe`, or if it does not have fewer ranks.
    """
    if against is None:
        return None
    found = read_evidence(against)
    if (found.recipe.model, found.recipe.data.seq_len) != (recipe.model, recipe.data.seq_len):
        raise UserError("A019", "the two runs train different models, or on sequences of different lengths",
                        where=str(against.path), fix="compare with a run of the same recipe")  # fmt: skip
    if found.plan.mesh.world_size >= plan.mesh.world_size:
        ranks = f"{found.plan.mesh.world_size} ranks to {plan.mesh.world_size}"
        raise UserError("A019", f"the run to compare with does not have fewer ranks: {ranks}",
                        where=str(against.path), fix="compare with a run of the same recipe on one rank")  # fmt: skip
    return found


def read_planner_inputs(recipe: Recipe, plan: Plan, *, calibrations: Path | None = None) -> Question | None:
    """Return the planner's inputs for the recipe, on the cluster that `plan` was made for; None if unknown.

    The speed of a CPU is the one at planning time: now it is busy with the run itself.
    """
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


def _with_latest_details(steps: Iterable[Line]) -> Iterator[Line]:
    """Yield the steps; those whose lines leave out slow details have the latest ones.

    `ranks` and `rows` are not repeated: they are statistics, and rules count how often something is so.
    """
    latest: Line = {}
    for step in steps:
        latest |= {name: step[name] for name in REPEATED_DETAILS if name in step}
        yield latest | step


def _time(line: Line) -> float:
    at = line.get("time", 0.0)
    return float(at) if isinstance(at, int | float) else 0.0


def _is_step(line: Line) -> bool:
    """Whether a line of the metrics has the numbers that rules rely on; a file may be damaged."""
    phases = line.get("phases")
    numbers = [line.get("step"), line.get("step_seconds"), *(phases.values() if isinstance(phases, dict) else [None])]
    return all(isinstance(each, int | float) for each in numbers)
