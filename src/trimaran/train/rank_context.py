"""The context that the parts of a rank are built from, and the instruments that measure, record and guard its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimaran.core import Plan, Recipe
from trimaran.data.loader import Loader
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.parallel.optimizer.build_optimizer import build_loss_scale
from trimaran.parallel.tensor_shards import CheckpointState
from trimaran.runs import Journal, RunDirectory
from trimaran.runs.read.rank_table import RankTableWriter
from trimaran.runs.read.step_index import StepIndexer
from trimaran.train.agreement import StopRequest
from trimaran.train.checkpointing.training_state import TrainingState
from trimaran.train.features.table import features_of
from trimaran.train.health.compilations import Compilations
from trimaran.train.health.guard import BadSampleCount, Guard, RefusedStep, broadcast_quarantine
from trimaran.train.health.memory_check import CompareReplicas, ReplicaCheck, ShardCheck
from trimaran.train.metrics.meters import ConnectionWatch, build_meters
from trimaran.train.metrics.profiler import Profiler, build_profiler
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.metrics.step_recorder import SlowDetails, StepRecorder, measured_axes
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.steppers.feature import Feature
from trimaran.train.steppers.stepper import Stepper

if TYPE_CHECKING:
    from trimaran.train.features.nonfinite_search import NonfiniteSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """A rank of a run, the plan that it follows, and the features of that plan.

    `change_requested` says after a step whether this rank asks for another plan, see `train/features/live_change`.
    """

    run: RunDirectory
    rank_info: RankInfo
    journal: Journal
    cache: Path
    recipe: Recipe
    plan: Plan
    features: Sequence[Feature]
    link: SupervisorLink = NO_SUPERVISOR
    stop: StopRequest = field(default_factory=StopRequest)
    change_requested: Callable[[int], bool] = lambda step: False


def read_context(
    run: RunDirectory,
    rank_info: RankInfo,
    journal: Journal,
    *,
    cache: Path,
    link: SupervisorLink = NO_SUPERVISOR,
    stop: StopRequest | None = None,
    change_requested: Callable[[int], bool] = lambda step: False,
) -> RankContext:
    """Return the context of a rank that follows the recipe and the plan of the run directory."""
    recipe, plan = run.read_recipe(), run.read_plan()
    return RankContext(
        run=run,
        rank_info=rank_info,
        journal=journal,
        cache=cache,
        recipe=recipe,
        plan=plan,
        features=features_of(plan, recipe),
        link=link,
        stop=StopRequest() if stop is None else stop,  # a request is false until somebody asks
        change_requested=change_requested,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruments:
    """The instruments of a rank. They outlive a change of the plan."""

    clock: StepClock
    guard: Guard
    profiler: Profiler
    compilations: Compilations
    slow_details: SlowDetails
    indexer: StepIndexer | None  # on the rank that writes the metrics
    connections: ConnectionWatch | None  # with a supervisor

    def follow(self, networks: Sequence[Network]) -> None:
        """Record these networks from now on: the plan has changed."""
        self.profiler.follow(networks)
        self.compilations.restart()

    def recorder(self, context: RankContext, networks: Sequence[Network]) -> StepRecorder:
        """Return the recorder of the steps of a plan. Every rank must call it."""
        table = None
        if _writes_lines(context):
            table = RankTableWriter(context.run.rank_table, seconds=context.recipe.telemetry.sample_seconds)
        return StepRecorder(
            plan=context.plan,
            meters=build_meters(context.recipe, context.plan, networks[0], context.rank_info.device, table),
            journal=context.journal,
            profiler=self.profiler,
            compilations=self.compilations,
            axes=measured_axes(context.plan, networks),
            indexer=self.indexer,
            slow_details=self.slow_details,
            connections=self.connections,
        )

    def watch_memory(self, context: RankContext, state: CheckpointState) -> CompareReplicas:
        """Let the guard check that memory changes in updates only, and return the check of replicas.

        With another engine neither is checked: it keeps its state where they do not look.
        """
        if context.plan.engine_traits.keeps_states_elsewhere:
            return lambda step: None
        device = context.rank_info.device
        shards = state.checked_shards if isinstance(state, TrainingState) else state.shards
        self.guard.watch_memory(ShardCheck(shards, device=device, max_fraction=context.recipe.faults.shard_check))
        return ReplicaCheck(shards, device=device).check

    def nonfinite_search(
        self,
        context: RankContext,
        networks: Sequence[Network],
        stepper: Stepper,
        loader_from: Callable[[int], Loader],
        reseed: Callable[[int], None],
        ranks: RankMesh,
    ) -> Callable[[RefusedStep], dict[str, Any]]:
        """Return a function that finds where a NaN or Inf was first produced, outside of the time of a step."""

        @cache
        def opened() -> "NonfiniteSearch":
            from trimaran.train.features.nonfinite_search import NonfiniteSearch  # noqa: PLC0415  few runs need it

            return NonfiniteSearch(networks, stepper, loader_from, reseed, ranks.device, ranks.degrees)

        def search(refusal: RefusedStep) -> dict[str, Any]:
            with context.link.section("search", refusal.step):
                origin = opened().find(refusal)
            self.clock.lap(None)
            return origin

        return search


def build_instruments(context: RankContext, networks: Sequence[Network]) -> Instruments:
    """Return the instruments of a rank. Every rank must call it: the quarantine is broadcast."""
    recipe, run, journal, link = context.recipe, context.run, context.journal, context.link
    clock = StepClock(context.rank_info.device)
    guard = Guard(
        recipe.faults,
        loss_scale=build_loss_scale(context.plan, recipe.train),
        quarantine=broadcast_quarantine(run.quarantine),
        bad_samples=BadSampleCount(recipe.data.samples.max_bad),
    )
    return Instruments(
        clock=clock,
        guard=guard,
        profiler=build_profiler(run, journal, clock, networks, context.rank_info.device, link),
        compilations=Compilations(link, journal),
        slow_details=SlowDetails(),
        indexer=StepIndexer(run.metrics, run.metrics_index) if _writes_lines(context) else None,
        connections=ConnectionWatch(journal) if link.store else None,
    )


def _writes_lines(context: RankContext) -> bool:
    return context.rank_info.rank == 0 and all(each.writes_lines for each in context.features)
