"""The context that the parts of a rank are built from, and the instruments that measure, record and guard its steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trimaran.core import DEVICE_TRAITS, Plan, Recipe
from trimaran.data import Loader
from trimaran.nets import Network
from trimaran.parallel import CheckpointState, RankMesh, build_loss_scale
from trimaran.runs import Journal, RankTableWriter, RunDirectory, StepIndexer
from trimaran.train.agreement import StopRequest
from trimaran.train.checkpointing.training_state import TrainingState
from trimaran.train.features.table import features_of
from trimaran.train.health.compilations import Compilations
from trimaran.train.health.guard import BadSampleCount, Guard, RefusedStep, broadcast_quarantine
from trimaran.train.health.memory_check import CompareReplicas, ReplicaCheck, ShardCheck
from trimaran.train.metrics.meters import ConnectionWatch, MemoryMeter, Meters, RankStats, lr_factors
from trimaran.train.metrics.profiler import Profiler
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
    """A rank, its plan and its features. `change_requested` says after a step if another plan is asked for."""

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


class Instruments:
    """The instruments of a rank. They outlive a change of the plan."""

    def __init__(self, context: RankContext, networks: Sequence[Network]) -> None:
        """Every rank must make them: the quarantine is broadcast."""
        recipe, run, journal, link = context.recipe, context.run, context.journal, context.link
        self.clock = StepClock(context.rank_info.device)
        self.guard = Guard(
            recipe.faults,
            loss_scale=build_loss_scale(context.plan, recipe.train),
            quarantine=broadcast_quarantine(run.quarantine),
            bad_samples=BadSampleCount(recipe.data.samples.max_bad),
        )
        device = context.rank_info.device
        self.profiler = profiler = Profiler(run, recipe.telemetry, journal, self.clock, networks, device, link)
        if DEVICE_TRAITS[device.type].has_own_memory:
            from trimaran.train.metrics.memory_snapshot import snapshot_on_oom  # noqa: PLC0415  a CPU has no such hook

            snapshot_on_oom(profiler.snapshotter, run, rank=journal.rank, step=lambda: profiler.step)
        self.compilations, self._slow_details = Compilations(link, journal), SlowDetails()
        self._indexer = StepIndexer(run.metrics, run.metrics_index) if _writes_lines(context) else None
        self._connections = ConnectionWatch(journal) if link.store else None

    def follow(self, networks: Sequence[Network]) -> None:
        """Record these networks from now on: the plan has changed."""
        self.profiler.follow(networks)
        self.compilations.restart()

    def recorder(self, context: RankContext, networks: Sequence[Network]) -> StepRecorder:
        """Return the recorder of the steps of a plan. Every rank must call it."""
        seconds, plan = context.recipe.telemetry.sample_seconds, context.plan
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return StepRecorder(
            plan=plan,
            meters=Meters(
                plan=plan,
                memory=MemoryMeter(context.rank_info.device),
                rank_stats=RankStats(rank=rank, num_ranks=num_ranks, pp=plan.mesh.pp) if num_ranks > 1 else None,
                rank_table=RankTableWriter(context.run.rank_table, seconds=seconds) if _writes_lines(context) else None,
                lr_factors=lr_factors(context.recipe, networks[0].towers),
            ),
            journal=context.journal,
            profiler=self.profiler,
            compilations=self.compilations,
            axes=measured_axes(plan, networks),
            indexer=self._indexer,
            slow_details=self._slow_details,
            connections=self._connections,
        )

    def watch_memory(self, context: RankContext, state: CheckpointState) -> CompareReplicas:
        """Let the guard check that only updates change memory, and return the check of replicas.

        With another engine neither is checked: it keeps its state where they do not look.
        """
        if context.plan.engine_traits.keeps_states_elsewhere:
            return lambda step: None
        device = context.rank_info.device
        shards = state.checked_shards if isinstance(state, TrainingState) else state.shards
        max_fraction = context.recipe.faults.shard_check
        self.guard.shard_check = ShardCheck(shards, device=device, max_fraction=max_fraction)
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


def _writes_lines(context: RankContext) -> bool:
    return context.rank_info.rank == 0 and all(each.writes_lines for each in context.features)
