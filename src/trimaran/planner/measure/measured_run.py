"""Reads what a run measured: its steady steps, for each plan that it ran with."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from trimaran.core import Plan, Recipe, UserError
from trimaran.core.parse_text import TextError, load_yaml
from trimaran.core.plugins import UNCHECKED
from trimaran.core.regular_files import read_regular_bytes
from trimaran.runs.journal import read_json_lines
from trimaran.runs.read.ledger import LedgerReader
from trimaran.runs.read.steady_steps import MIN_STEADY_STEPS, WARM_UP_STEPS, SteadySteps, steady_steps
from trimaran.runs.read.step_lines import StepLine
from trimaran.runs.run_directory import RunDirectory, holds_run
from trimaran.runs.stored_settings import MAX_FILE_BYTES

MAX_STEPS = 1024  # the latest of each plan
MAX_UNINDEXED_BYTES = 1 << 19  # of a longer run only the end is read line by line
STEADY_RATE = " at a steady "  # in the source of a prediction, after the name of the device


class UnusableRunError(Exception):
    """A run that says nothing about its plan's speed, with the reason for a person."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """One start of the ranks, as rank 0 wrote it."""

    time: float
    world_size: int
    host: str = ""
    version: str = ""
    device: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSteps:
    """The steady steps that a run did with one plan. `cluster` is what it ran on, such as 2x8xH100; '' if unknown."""

    plan: Plan
    steps: SteadySteps
    start: RankStart
    cluster: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run with at least one plan whose speed was measured. `goodput` is that of the whole run."""

    path: Path
    recipe: Recipe
    plans: tuple[PlanSteps, ...]
    goodput: float


def read_measured_run(path: Path) -> MeasuredRun:
    """Return what the run at `path` measured, finished or not; raise UnusableRunError with the reason."""
    run = RunDirectory(path)
    if not holds_run(path):
        raise UnusableRunError("this is not a Trimaran run")
    try:
        try:  # the file is our own, so the lines of its keys, half of the time, are left out
            tree = load_yaml(read_regular_bytes(run.recipe, limit_bytes=MAX_FILE_BYTES))
            recipe = Recipe.model_validate(tree, context=UNCHECKED)
        except (OSError, TextError, ValidationError):
            recipe = run.read_recipe()  # raises what is wrong with it
        plans = [run.read_plan(file) for file in run.earlier_plans()] + [run.read_plan()]
        return _measured(run, recipe, plans)
    except UserError as error:
        raise UnusableRunError(error.what) from None
    except OSError as error:
        raise UnusableRunError(f"its files cannot be read: {error.strerror or error}") from None


def _measured(run: RunDirectory, recipe: Recipe, plans: Sequence[Plan]) -> MeasuredRun:
    events = [each for each in read_json_lines(run.events(0)) if "time" in each]
    # Ranks that change their plan while they run start again, for our purpose.
    starts: list[RankStart] = []
    for event in events:
        kind, data = event.get("kind"), event.get("data", {})
        if kind == "start" and "world_size" in data:
            texts = {name: str(data.get(name, "")) for name in ("host", "version", "device")}
            starts.append(RankStart(time=event["time"], world_size=data["world_size"], **texts))
        elif kind == "change" and data.get("status") == "applied" and starts:
            starts.append(replace(starts[-1], time=event["time"]))
    if not starts:
        raise UnusableRunError("its events do not say that ranks have started")
    used = plans_in_force(run, plans, starts)
    ledger = LedgerReader(run, num_lines=MAX_STEPS, max_unindexed_bytes=MAX_UNINDEXED_BYTES)
    ledger.poll()
    times, by_plan = [start.time for start in starts], {}
    last_start: dict[int, RankStart] = {}
    for step in ledger.new_steps():
        if not isinstance(step, StepLine):
            continue  # a block of a long past
        number = max(0, bisect_right(times, step.time) - 1)
        if (plan := used[number]) is not None:
            by_plan.setdefault(plan, deque(maxlen=MAX_STEPS)).append(step)
            last_start[plan] = starts[number]
    found = []
    for number, steps in by_plan.items():
        if (steady := steady_steps(steps, events)) is not None:
            start, plan = last_start[number], plans[number]
            found.append(PlanSteps(plan=plan, steps=steady, start=start, cluster=_cluster_of(run, recipe, plan, start)))
    if not found:
        most = max((len(steps) for steps in by_plan.values()), default=0)
        raise UnusableRunError(
            f"it has {most} steps with a known plan, and {MIN_STEADY_STEPS} are needed after the {WARM_UP_STEPS} of "
            "each start"
        )
    return MeasuredRun(path=run.path, recipe=recipe, plans=tuple(found), goodput=ledger.compute().goodput)


def plans_in_force(run: RunDirectory, plans: Sequence[Plan], starts: Sequence[RankStart]) -> list[int | None]:
    """Return which of `plans`, in their order, each start of the ranks ran; None where that cannot be told.

    A plan is replaced while no rank runs, or before the answer to a change, and its old file is written then. If the
    times of the files were lost in a copy, a start ran the only plan with its number of ranks, and the last one the
    last plan.
    """
    ends = [file.stat().st_mtime for file in run.earlier_plans()][: len(plans) - 1]
    by_time: list[int | None] = [sum(end <= start.time for end in ends) for start in starts]
    are_own = sorted(ends) == ends and (not ends or ends[-1] <= starts[-1].time)
    if are_own and all(plans[number or 0].mesh.world_size == start.world_size
                       for number, start in zip(by_time, starts, strict=True)):  # fmt: skip
        return by_time
    sizes = [plan.mesh.world_size for plan in plans]
    found = [sizes.index(start.world_size) if sizes.count(start.world_size) == 1 else None for start in starts]
    if sizes[-1] == starts[-1].world_size:
        found[-1] = len(plans) - 1
    return found


def _cluster_of(run: RunDirectory, recipe: Recipe, plan: Plan, start: RankStart) -> str:
    """Return the cluster of a plan as text; an older plan names the device only in the source of its prediction."""
    prediction, ranks = plan.prediction, plan.mesh.world_size
    if prediction and prediction.cluster:
        return prediction.cluster
    device = prediction.source.partition(STEADY_RATE)[0] if prediction and STEADY_RATE in prediction.source else ""
    if not device and start.device == "cpu":
        device = "cpu"
    if not device:
        return "" if recipe.cluster == "auto" or recipe.cluster.endswith((".yaml", ".yml")) else recipe.cluster
    nodes = len(list(run.samples(0).parent.glob("node-*.jsonl"))) or 1
    per_node, rest = divmod(ranks, nodes)
    return f"{nodes}x{per_node}x{device}" if nodes > 1 and not rest else f"{ranks}x{device}"
