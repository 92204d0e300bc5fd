"""A measured plan: what a run reached with it, and what was predicted. One record of the index."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Self

from trimaran.core import Plan, Prediction, Recipe, UserError
from trimaran.core.plan import show_rows
from trimaran.models import Outline, outline_if_known

if TYPE_CHECKING:  # who reads records needs no reader of runs
    from trimaran.planner.measure.measured_run import MeasuredRun, PlanSteps

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
    """What must be equal for two measurements to be of the same work on the same machines.

    model: a digest of the network's shape. states: the format of the optimizer's states.
    host: of a CPU, whose speed no name tells; '' for GPUs.
    """

    model: str
    seq_len: int
    global_batch: int
    states: str
    cluster: str
    host: str = ""


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
        fields: dict[str, Any] = dict(tree)
        fields["run"], fields["job"] = RunFacts(**tree["run"]), PlannedJob(**tree["job"])
        fields["measured"] = SpeedFigures(**tree["measured"])
        fields["predicted"] = SpeedFigures(**tree["predicted"]) if tree["predicted"] else None
        return cls(**fields)


def measured_plans(run: "MeasuredRun") -> list[MeasuredPlan]:
    """Return a record for each plan that the run measured."""
    try:
        outline = outline_if_known(run.recipe.model, run.recipe.data)
    except UserError:  # its files are on another machine
        outline = None
    return [_record(run, each, outline) for each in run.plans]


def job_of_plan(recipe: Recipe, outline: Outline | None, cluster: str, host: str) -> PlannedJob:
    """Return what identifies the work of a recipe on a cluster."""
    return PlannedJob(
        model=model_digest(recipe, outline),
        seq_len=recipe.data.seq_len,
        global_batch=recipe.train.global_batch,
        states=recipe.train.optimizer.states,
        cluster=cluster,
        host=host if cluster.endswith("xcpu") else "",
    )


def model_digest(recipe: Recipe, outline: Outline | None) -> str:
    """Return a digest of the network's shape, whatever it is called; of the recipe's model if that is not known."""
    shape = recipe.model.model_dump_json() if outline is None else repr(replace(outline, name=""))
    return sha256(shape.encode()).hexdigest()[:16]


def _record(run: "MeasuredRun", found: "PlanSteps", outline: Outline | None) -> MeasuredPlan:
    steps, recipe, prediction = found.steps, run.recipe, found.plan.prediction
    path = recipe.model.path
    own_name = recipe.model.preset or (path.rstrip("/").rpartition("/")[2] if path else recipe.model.family)
    return MeasuredPlan(
        run=RunFacts(
            path=str(run.path.absolute()),
            name=recipe.name,
            host=found.start.host,
            version=found.start.version,
            time=steps.last_time,
            num_steps=steps.num_steps,
            goodput=run.goodput,
        ),
        model=outline.name if outline and outline.name else own_name,
        parameters=outline.num_parameters if outline else 0,
        job=job_of_plan(recipe, outline, found.cluster, found.start.host),
        pins=pins_of(found.plan),
        layout=layout_of(found.plan),
        measured=SpeedFigures(
            step_seconds=steps.step_seconds,
            tokens_per_second=steps.tokens_per_second,
            mfu=steps.mfu,
            peak_bytes=steps.peak_bytes,
        ),
        predicted=_predicted(prediction) if prediction else None,
    )


def _predicted(prediction: Prediction) -> SpeedFigures:
    return SpeedFigures(
        step_seconds=prediction.step_seconds,
        tokens_per_second=prediction.tokens_per_second,
        mfu=prediction.mfu,
        peak_bytes=prediction.peak_bytes,
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
