"""Rehearses ranks of a plan: each is measured in a process of its own and compared with its prediction. No torch."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trimaran.core import Plan, Recipe, UserError
from trimaran.cost import Job
from trimaran.cost.peak_memory import rank_memory_of
from trimaran.cost.simulate.step_costs import stage_compute_of, step_costs_of, with_other_compute
from trimaran.cost.simulate.step_simulation import simulate_step
from trimaran.cost.step_time import rank_compute_of
from trimaran.machine import Cluster
from trimaran.models import Spec, decoder_of, model_folder, outline_for
from trimaran.models.stages import stage_ranges, stages_of_rank
from trimaran.planner.measure.rank_task import MeasuredRank, RankAnswer, RankTask, run_rank

# Everything that a rank needs is what its layers need, in proportion, and what does not depend on their number. Two
# sizes give both. The peak is the largest of several moments of a step; the extrapolation holds if it is the same
# moment for both sizes and for the whole model.


def refuse_fewer_layers(recipe: Recipe, spec: Spec | None, plan: Plan, layers: int) -> None:
    """Raise unless the model can be rehearsed with so many layers in a stage, and with twice as many."""
    where, fix = "--layers", "rehearse the whole rank: leave out --layers"
    decoder = None if recipe.model.kind.is_hf else decoder_of(spec)
    if decoder is None:
        raise UserError("P091.decoder-can-rehearsed", where=where, fix=fix)
    if decoder.prediction_layers:
        raise UserError("P091.decoder-with-multi", where=where, fix=fix)
    most = decoder.layers // plan.num_stages // 2
    if layers > most:
        least = f"name at most {most}, or leave out --layers" if most else fix
        raise UserError(
            "P091.layers-stage",
            where=where,
            fix=least,
            layers=layers,
            second=2 * layers,
            all_layers=decoder.layers / plan.num_stages,
        )
    every = plan.recompute if isinstance(plan.recompute, int) else 1
    if layers % every:
        raise UserError("P091.every-layer-recomputed", where=where, every=every, layers=layers)


def with_layers(recipe: Recipe, plan: Plan, layers: int, folder: Path) -> tuple[Recipe, Plan]:
    """Return the recipe and the plan with `layers` layers in every stage.

    Weights on disk have all layers, so a model with a path gets random ones: a copy of its config.json in `folder`.
    """
    model, data = recipe.model, recipe.data
    if model.path is not None:
        source = model_folder(model.path)
        shutil.copyfile(source / "config.json", folder / "config.json")
        data = data.model_copy(update={"tokenizer": data.tokenizer or str(source)})
        model = model.model_copy(update={"path": str(folder)})
    shape = model.shape | {"layers": layers * plan.num_stages}
    recipe = recipe.model_copy(update={"model": model.model_copy(update={"shape": shape}), "data": data})
    if plan.mesh.pp > 1:
        stages = plan.pipeline.model_copy(update={"stages": (layers,) * plan.num_stages})
        plan = plan.model_copy(update={"pipeline": stages})
    return recipe, plan


def extrapolated(
    small: MeasuredRank, large: MeasuredRank, layers: int, stage_layers: Mapping[int, int]
) -> MeasuredRank:
    """Extrapolate from `layers` and twice as many layers in each stage to the `stage_layers` of the whole model."""
    whole = sum(stage_layers.values()) / len(stage_layers)

    def line(first: float, second: float, wanted: float = whole) -> float:
        return first + (second - first) * (wanted - layers) / layers

    return MeasuredRank(
        peak_bytes=int(line(small.peak_bytes, large.peak_bytes)),
        steady_peak_bytes=int(line(small.steady_peak_bytes, large.steady_peak_bytes)),
        reserved_bytes=int(line(small.reserved_bytes, large.reserved_bytes)),
        step_seconds=line(small.step_seconds, large.step_seconds),
        all_seconds=[],
        phases={name: line(small.phases[name], large.phases[name]) for name in small.phases},
        stages={
            stage: {kind: line(seconds, large.stages[stage][kind], stage_layers[stage])
                    for kind, seconds in kinds.items()}
            for stage, kinds in small.stages.items()
        },
        passes=small.passes,
        losses=large.losses,
        num_refused=small.num_refused + large.num_refused,
        build_seconds=small.build_seconds + large.build_seconds,
    )  # fmt: skip


Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalRequest:
    """A plan of `cluster` to rehearse on the device `here`, given as a cluster."""

    recipe: Recipe
    spec: Spec | None
    job: Job
    plan: Plan
    cluster: Cluster
    here: Cluster
    ranks: tuple[int, ...]
    steps: int
    layers: int = 0  # of each pipeline stage, measured with so many and twice as many; 0: all
    limit_seconds: float = 3600.0

    @property
    def is_on_cpu(self) -> bool:
        return self.here.device.traits.shares_cores

    @property
    def device_cluster(self) -> Cluster:
        """The cluster, if its devices were like the one at hand: what the measurements are compared with."""
        if self.here.device.name == self.cluster.device.name:
            return self.cluster
        return replace(self.cluster, device=self.here.device, links=())

    def pp_rank_of(self, rank: int) -> int:
        """Return the pipeline rank of a rank. Pipeline ranks are the outermost axis of the mesh."""
        return rank // (self.plan.mesh.world_size // self.plan.mesh.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """What the cost model says about one rank alone, on the device at hand: `time` has no communication."""

    memory: dict[str, int]
    reserved_bytes: int
    time: dict[str, float]

    @property
    def peak_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def seconds(self) -> float:
        return sum(self.time.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallRank:
    """A rank of the model with fewer layers: as it was measured, and as it is predicted."""

    layers: int
    answer: RankAnswer
    predicted: RankCost


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedRank:
    """A rank: its place in the pipeline, how it ended, what was measured, and what was predicted."""

    rank: int
    pp_rank: int
    stages: tuple[int, ...]
    answer: RankAnswer
    measured: MeasuredRank | None  # None if the rank failed
    predicted: RankCost
    smaller: tuple[SmallRank, ...] = ()  # with fewer layers, from which `measured` is extrapolated

    @property
    def peak_error(self) -> float | None:
        """How far the predicted peak is above the measured one, as a fraction of the measured one."""
        return None if self.measured is None else self.predicted.peak_bytes / self.measured.peak_bytes - 1

    @property
    def compute_error(self) -> float | None:
        return None if self.measured is None else self.predicted.seconds / self.measured.step_seconds - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ComposedStep:
    """The step of the whole plan: simulated with the cost model's compute, and with the measured one."""

    predicted_seconds: float
    measured_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """All ranks, and the step that they make; `no_step` is why there is none."""

    request: RehearsalRequest
    ranks: tuple[RehearsedRank, ...]
    step: ComposedStep | None
    no_step: str = ""


def rehearse_plan(
    request: RehearsalRequest, environment: Mapping[str, str], cache: Path, report: Report = lambda what, fraction: None
) -> Rehearsal:
    """Run the requested ranks one after another on the device at hand. `report` gets the progress."""
    reports = []
    for number, rank in enumerate(request.ranks):
        report(f"rehearsing rank {rank} of {request.plan.mesh.world_size:,}", number / len(request.ranks))
        reports.append(_rehearse_rank(request, rank, environment, cache))
    step, why = compose_step(request, reports)
    return Rehearsal(request=request, ranks=tuple(reports), step=step, no_step=why)


def _rehearse_rank(request: RehearsalRequest, rank: int, environment: Mapping[str, str], cache: Path) -> RehearsedRank:
    plan, pp_rank = request.plan, request.pp_rank_of(rank)
    stages = stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, pp_rank, plan.num_stages)
    predicted = predicted_rank(request.job, request.device_cluster, plan, pp_rank)

    def run(recipe: Recipe, its_plan: Plan) -> RankAnswer:
        task = RankTask(recipe=recipe, plan=its_plan, rank=rank, steps=request.steps, cache=cache,
                        on_cpu=request.is_on_cpu)  # fmt: skip
        return run_rank(task, environment, limit_seconds=request.limit_seconds)

    if not request.layers:
        answer = run(request.recipe, plan)
        return RehearsedRank(rank=rank, pp_rank=pp_rank, stages=stages, answer=answer, measured=answer.measured,
                          predicted=predicted)  # fmt: skip
    smaller = []
    for layers in (request.layers, 2 * request.layers):
        with tempfile.TemporaryDirectory(prefix="trimaran-rehearse-") as folder:
            recipe, small_plan = with_layers(request.recipe, plan, layers, Path(folder))
            job = replace(request.job, outline=outline_for(recipe.model, recipe.data))
            cost = predicted_rank(job, request.device_cluster, small_plan, pp_rank)
            smaller.append(SmallRank(layers=layers, answer=run(recipe, small_plan), predicted=cost))
    measured = None
    small, large = (each.answer.measured for each in smaller)
    if small is not None and large is not None:
        assert request.spec is not None, "only a decoder of ours is rehearsed with fewer layers"
        ranges = stage_ranges(request.spec, plan, seq_len=request.recipe.data.seq_len)
        measured = extrapolated(small, large, request.layers, {stage: len(ranges[stage]) for stage in stages})
    return RehearsedRank(rank=rank, pp_rank=pp_rank, stages=stages, answer=smaller[-1].answer, measured=measured,
                      predicted=predicted, smaller=tuple(smaller))  # fmt: skip


def predicted_rank(job: Job, cluster: Cluster, plan: Plan, pp_rank: int) -> RankCost:
    """Return what the cost model says about one rank."""
    memory, reserved = rank_memory_of(job, cluster, plan, pp_rank)
    time = rank_compute_of(job, cluster, plan, pp_rank)
    return RankCost(memory={**memory}, reserved_bytes=reserved, time={**time})


def compose_step(request: RehearsalRequest, reports: list[RehearsedRank]) -> tuple[ComposedStep | None, str]:
    """Return the step of the plan with the simulator's communication and the measured compute; or why there is none.

    Compute on the cluster's own devices is the prediction for them, times measured by predicted on the device at hand.
    Pipeline ranks that were not rehearsed take the factor of the nearest one that was.
    """
    measured = [each for each in reports if each.measured is not None]
    if not measured:
        return None, "no rank was measured"
    if request.is_on_cpu != request.cluster.device.traits.shares_cores:
        return None, f"a CPU says nothing about the time of {request.cluster.device.name}"
    job, cluster, plan = request.job, request.cluster, request.plan
    costs = step_costs_of(job, cluster, plan)
    theirs, here = (stage_compute_of(job, each, plan) for each in (cluster, request.device_cluster))
    changes, updates = [], []
    for stage, rank in enumerate(costs.order.rank_of_stage):
        nearest = min(measured, key=lambda each, rank=rank: abs(each.pp_rank - rank))
        factors = _factors(nearest, stage, here)
        changes.append(tuple(seconds * (factor - 1) for seconds, factor in zip(theirs[stage], factors, strict=True)))
    for each in measured:
        assert each.measured is not None
        phases, time = each.measured.phases, each.predicted.time
        update = time["optimizer"] + time.get("other", 0.0)
        updates.append((phases["optimizer"] + phases["other"]) / update if update else 1.0)
    slowest = max(updates)
    changed = with_other_compute(costs, changes, update=costs.update * (slowest - 1))
    predicted, composed = simulate_step(costs).seconds, simulate_step(changed).seconds
    return ComposedStep(predicted_seconds=predicted, measured_seconds=composed), ""


def _factors(report: RehearsedRank, stage: int, predicted: tuple[tuple[float, float], ...]) -> tuple[float, float]:
    """Return measured by predicted, of the forward and the backward of a stage: its own, or of the rank's first."""
    assert report.measured is not None
    if not report.measured.stages:
        phases, time = report.measured.phases, report.predicted.time
        return phases["forward"] / time["forward"], phases["backward"] / time["backward"]
    own = stage if stage in report.measured.stages else min(report.measured.stages)
    kinds = report.measured.stages[own]
    backward = kinds.get("backward", 0.0) + kinds.get("input_grad", 0.0) + kinds.get("weight_grad", 0.0)
    return kinds["forward"] / predicted[own][0], backward / predicted[own][1]
