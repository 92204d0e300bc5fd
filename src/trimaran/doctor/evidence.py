"""What a run has left behind, read once for all rules."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from trimaran.core import Finding, Plan, Recipe, UserError
from trimaran.doctor.memory_evidence import read_snapshots
from trimaran.doctor.profile_evidence import read_traces
from trimaran.hardware import parse_cluster
from trimaran.models import outline_if_told, spec_of
from trimaran.planner import Question
from trimaran.run import Follower, RunDirectory

Line = dict[str, Any]
RECENT = 400  # steps that rules look at
BACKLOG = 8 << 20  # bytes of a file, from its end: a run of weeks is looked at in a moment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # itself and no other: what was measured in it is kept
class Evidence:
    """The files of a run, parsed. Every line is there as it was written; keys that a run has no reason for are missing.

    `steps` are the last `RECENT` lines of the metrics, `events` those of all ranks by time, `samples` those of all
    nodes by time, `traces` what the profiles say of a step, `snapshots` who held memory. `ask` answers with what the
    planner needs to weigh another plan for the run; None where the model's sizes or the cluster are not known here.
    `reference` is of a run of the same on fewer ranks, where a person has one.
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
    ask: Callable[[], Question | None] = lambda: None
    reference: "Evidence | None" = None

    def of_kind(self, kind: str) -> tuple[Line, ...]:
        return tuple(each for each in self.events if each.get("kind") == kind)

    @property
    def last_step(self) -> int:
        return int(self.steps[-1]["step"]) if self.steps else 0


Rule = Callable[[Evidence], Iterable[Finding]]


def read_evidence(
    run: RunDirectory, *, calibrations: Path | None = None, against: RunDirectory | None = None
) -> Evidence:
    """Return what the run's files say now. `calibrations` is where measurements of machines are kept.

    `against` is a run to compare with, whose ranks do the same.
    """
    lines = {name: _lines(run, pattern) for name, pattern in PLACES.items()}
    recipe, plan = run.read_recipe(), run.read_plan()
    return Evidence(
        recipe=recipe,
        plan=plan,
        steps=tuple(each for each in lines.pop("steps") if _is_step(each))[-RECENT:],
        traces=tuple(read_traces(run.profiles)),
        snapshots=tuple(read_snapshots(run.profiles)),
        ask=cache(lambda: question_of(recipe, plan, calibrations=calibrations)),
        reference=_reference(recipe, plan, against),
        **{name: tuple(sorted(found, key=_time)) for name, found in lines.items()},
    )


def _reference(recipe: Recipe, plan: Plan, against: RunDirectory | None) -> Evidence | None:
    """Return the evidence of a run to compare with.

    Raises UserError where its samples are not those of `recipe`, or its ranks not fewer than those of `plan`.
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


def question_of(recipe: Recipe, plan: Plan, *, calibrations: Path | None = None) -> Question | None:
    """Return what plans for the recipe are weighed with, on the cluster that `plan` was made for; None if unknown.

    A CPU is taken to be as fast as it was when the run was planned: now it is busy with the run itself.
    """
    try:
        cluster = parse_cluster(recipe.cluster, calibrations=calibrations)
        spec, outline = spec_of(recipe.model), outline_if_told(recipe.model, recipe.data)
    except UserError:
        return None
    if outline is None or cluster.world_size != plan.mesh.world_size:
        return None
    if cluster.device.kind == "cpu" and plan.prediction:
        cluster = replace(
            cluster, device=replace(cluster.device, peak_flops={"fp32": plan.prediction.device_peak_flops})
        )
    return Question(recipe=recipe, spec=spec, outline=outline, cluster=cluster, most_shown=1)


PLACES = {
    "steps": "metrics.jsonl",
    "events": "events/rank-*.jsonl",
    "incidents": "incidents.jsonl",
    "samples": "telemetry/node-*.jsonl",
    "attempts": "attempts.jsonl",
}


def _lines(run: RunDirectory, pattern: str) -> list[Line]:
    return [line for path in sorted(run.path.glob(pattern)) for line in Follower(path, backlog=BACKLOG).new()]


def _time(line: Line) -> float:
    at = line.get("time", 0.0)
    return float(at) if isinstance(at, int | float) else 0.0


def _is_step(line: Line) -> bool:
    """Whether a line of the metrics is one that rules can count with: files are not to be trusted."""
    phases = line.get("phases")
    numbers = [line.get("step"), line.get("step_seconds"), *(phases.values() if isinstance(phases, dict) else [None])]
    return all(isinstance(each, int | float) for each in numbers)
