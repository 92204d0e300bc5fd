"""Builds the parts of a worker from the recipe and the plan: networks, data, stepper, trainer."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trimaran.checkpoint.tensor_shards import CheckpointState
from trimaran.core import Plan, Recipe, TrainSection
from trimaran.data.feed import share_of
from trimaran.data.loader import Loader
from trimaran.data.row_ledger import RowLedger
from trimaran.models import Spec, model_folder, module_names, refuse_unmatched, spec_of, weight_files
from trimaran.models.adapter_rules import refuse_adapter
from trimaran.models.plugin_family import is_plugin_family
from trimaran.models.stages import stage_ranges, stages_of_rank
from trimaran.nets import Network, initialise, network_of
from trimaran.nets.adapters.attach import attach_adapter, linears_to_pack
from trimaran.nets.adapters.initialise_adapter import initialise_adapter
from trimaran.nets.adapters.nf4_linear import pack_frozen_weights
from trimaran.nets.adapters.peft_format import refuse_inexpressible
from trimaran.nets.adapters.peft_read import load_peft_adapter
from trimaran.nets.hf_weights import absent_layers
from trimaran.nets.local_shards import is_on_meta, to_empty
from trimaran.nets.shard_types import is_fsdp_module
from trimaran.optim import build_optimizer
from trimaran.optim.loss_scale import LossScale, build_loss_scale
from trimaran.optim.split_weights import split_weights
from trimaran.parallel import RankMesh, apply_plan, build_mesh, override_precision
from trimaran.parallel.apply import steps_of
from trimaran.parallel.axes.stage_map import StageMap, map_stages, trained_parameters
from trimaran.parallel.comm.compression import compressor_of
from trimaran.parallel.comm.outer_step import build_outer_step
from trimaran.parallel.frozen_weights import store_frozen_weights
from trimaran.parallel.tower_plan import freeze_towers
from trimaran.run import Journal, RunDirectory
from trimaran.run.disk_folder import check_disk_folder
from trimaran.run.gloo_listeners import closed_listeners
from trimaran.telemetry.rank_table import RankTableWriter
from trimaran.telemetry.step_index import StepIndexer
from trimaran.train.agreement import RunRequests, StopRequest
from trimaran.train.build_family import open_family_network
from trimaran.train.build_hf import open_hf_network, open_hf_stages
from trimaran.train.checkpointing.base_hashing import AdapterBase, BaseHashing
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.checkpointing.training_state import TrainingState
from trimaran.train.evaluate import HoldoutEvaluator
from trimaran.train.health.bad_sample_limit import BadSampleCount
from trimaran.train.health.compilations import Compilations
from trimaran.train.health.connection_watch import ConnectionWatch
from trimaran.train.health.guard import Guard, RefusedStep, broadcast_quarantine
from trimaran.train.health.nonfinite_search import NonfiniteSearch
from trimaran.train.health.replica_check import ReplicaCheck
from trimaran.train.health.shard_check import ShardCheck
from trimaran.train.health.step_check import StepCheck
from trimaran.train.health.unused_parameters import watch_unused_parameters
from trimaran.train.inputs.rank_loader import build_loader
from trimaran.train.inputs.training_data import TrainingData, load_training_data
from trimaran.train.loss.objective import Objective
from trimaran.train.metrics.lap_waits import measured_axes
from trimaran.train.metrics.meters import build_meters
from trimaran.train.metrics.parameter_groups import build_group_meter
from trimaran.train.metrics.profiler import build_profiler
from trimaran.train.metrics.step_clock import StartupTimer, StepClock
from trimaran.train.metrics.step_recorder import StepRecorder
from trimaran.train.process.allocator_settings import set_expandable_segments
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.process.torch_modes import set_torch_modes
from trimaran.train.steppers.stepper import PlainStepper, Stepper, TorchStepper
from trimaran.train.steppers.update import Updater
from trimaran.train.trainer import Trainer

if TYPE_CHECKING:
    from trimaran.train.elastic.replica import Replica

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What the parts of a rank are built from. Another plan of the same run has the same rest.

    `change_requested` says after a step whether this rank asks for another plan, see `train/change`.
    """

    run: RunDirectory
    rank_info: RankInfo
    journal: Journal
    cache: Path
    recipe: Recipe
    plan: Plan
    link: SupervisorLink = NO_SUPERVISOR
    stop: StopRequest = field(default_factory=StopRequest)
    change_requested: Callable[[int], bool] = lambda step: False
    ledger: RowLedger | None = None  # of an elastic replica


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a worker: its networks, its data, and the trainer that connects them."""

    context: RankContext
    networks: tuple[Network, ...]
    ranks: RankMesh
    stages: StageMap
    training_data: TrainingData
    trainer: Trainer
    seconds: dict[str, float]  # build time by phase
    base: AdapterBase | None = None


def build_worker_parts(
    run: RunDirectory,
    rank_info: RankInfo,
    journal: Journal,
    *,
    cache: Path,
    link: SupervisorLink = NO_SUPERVISOR,
    stop: StopRequest | None = None,
    change_requested: Callable[[int], bool] = lambda step: False,
    replica: "Replica | None" = None,
) -> WorkerParts:
    """Return the parts of one rank of `run`. The process group must be initialised.

    `replica`: that of this rank, if replicas are elastic. `rank_info` counts in it then.
    """
    recipe, plan, timer = run.read_recipe(), run.read_plan(), StartupTimer()
    ledger = None
    if replica is not None:
        global_batch, recipe, plan = plan.global_batch, replica.recipe(recipe), replica.plan(plan)
        ledger = RowLedger(share_of(plan, 0), global_batch=global_batch)
    context = RankContext(
        run=run,
        rank_info=rank_info,
        journal=journal,
        cache=cache,
        recipe=recipe,
        plan=plan,
        link=link,
        stop=StopRequest() if stop is None else stop,
        change_requested=change_requested,
        ledger=ledger,
    )
    set_torch_modes(recipe)
    set_expandable_segments(recipe.faults.expandable_segments, rank_info.device)
    with closed_listeners():
        ranks = build_mesh(plan.mesh, device_type=rank_info.device.type)
    hashing = BaseHashing(recipe, link, cache) if recipe.model.adapter else None
    with link.section("load") as report_progress:
        networks = build_networks(recipe, plan, rank_info, ranks, report_progress)
    base = AdapterBase(hashing, partial(reload_base, networks, recipe, plan, rank_info)) if hashing else None
    refuse_unsavable(recipe, networks)
    timer.lap("network")
    training_data = load_data(context, ranks, networks)
    if replica is not None and ledger is not None:
        from trimaran.train.elastic.dealt_loader import dealt_data  # noqa: PLC0415  only elastic runs use it

        ledger.share = share_of(plan, ranks.data_rank)
        training_data = dealt_data(training_data, ledger, replica.number)
    timer.lap("data")
    trainer = build_trainer(context, ranks, networks, training_data, base)
    timer.lap("optimizer")
    return WorkerParts(
        context=context,
        networks=networks,
        ranks=ranks,
        stages=map_stages(plan, ranks),
        training_data=training_data,
        trainer=trainer,
        seconds=timer.seconds,
        base=base,
    )


def load_data(context: RankContext, ranks: RankMesh, networks: tuple[Network, ...]) -> TrainingData:
    """Return the data of this rank, prepared first if necessary."""
    recipe, plan, rank_info, cache = context.recipe, context.plan, context.rank_info, context.cache
    with context.link.section("prepare") as report_progress:
        load = partial(load_training_data, recipe, networks[0], cache=cache, report_progress=report_progress)
        if recipe.data.samples.cache_features:
            from trimaran.train.inputs.vision_features import build_feature_cache  # noqa: PLC0415  it imports Pillow

            features = partial(build_feature_cache, recipe, plan, rank_info, report_progress=report_progress)
            load = partial(load, cache_features=features)
        training_data = load(share_of(plan, ranks.data_rank))
        if plan.micro_batches == "measured" and plan.mesh.dp > 1:
            from trimaran.train.measure_rows import RankParts, with_measured_rows  # noqa: PLC0415  few plans measure

            measured = RankParts(network=networks[0], ranks=ranks, load=load, report_progress=report_progress)
            plan = with_measured_rows(plan, measured, context.journal)
            training_data = load(share_of(plan, ranks.data_rank))
        if plan.engine == "async":
            from trimaran.train.async_sgd.async_parts import share_batches  # noqa: PLC0415  only this engine uses it

            training_data = share_batches(training_data, recipe, networks[0], share_of(plan, 0), cache=cache)
    return training_data


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The parts that compute, check and save the steps of one plan."""

    networks: tuple[Network, ...]
    ranks: RankMesh
    training_data: TrainingData
    stepper: Stepper
    guard: Guard
    clock: StepClock
    checkpointer: Checkpointer
    replica_check: ReplicaCheck | None


def build_trainer(
    context: RankContext,
    ranks: RankMesh,
    networks: tuple[Network, ...],
    training_data: TrainingData,
    base: AdapterBase | None = None,
    before: Trainer | None = None,
) -> Trainer:
    """Return the trainer with its stepper, evaluator, checkpointer, recorder and checks.

    `before` is the trainer of another plan, which this one replaces: what does not depend on the plan stays.
    """
    recipe, plan, rank_info, link = context.recipe, context.plan, context.rank_info, context.link
    clock = before.clock if before else StepClock(rank_info.device)
    guard = before.check.guard if before else build_guard(recipe, plan, context.run)
    every = recipe.telemetry.details_every
    stepper = build_stepper(
        networks, recipe.train, plan, ranks, clock, guard, training_data.objective, groups_every=every,
        ledger=context.ledger,
    )  # fmt: skip
    state = stepper.state(recipe.train, without_base=base is not None)
    stepper.set_training(True)  # transformers loads models in eval mode
    checkpointer = Checkpointer(context.run, rank_info, context.journal, link, state, data=training_data.digest,
                                base=base, settings=(recipe, plan))  # fmt: skip
    parts = StepParts(
        networks=networks,
        ranks=ranks,
        training_data=training_data,
        stepper=stepper,
        guard=guard,
        clock=clock,
        checkpointer=checkpointer,
        replica_check=build_memory_checks(guard, state, recipe, rank_info.device) if plan.engine == "torch" else None,
    )
    trainer = connect_trainer(context, parts, before)
    if plan.engine != "async":
        return trainer
    from trimaran.train.async_sgd.async_parts import without_steps  # noqa: PLC0415  only this engine uses it

    return without_steps(trainer, lambda: training_data.training(guard.quarantine.ids))


def connect_trainer(context: RankContext, parts: StepParts, before: Trainer | None = None) -> Trainer:
    """Return the trainer of these parts, with an evaluator, a recorder and a check; see `build_trainer`."""
    recipe, plan, rank_info, link = context.recipe, context.plan, context.rank_info, context.link
    guard, ranks, training_data, journal = parts.guard, parts.ranks, parts.training_data, context.journal
    loader_from = partial(build_loader, recipe, rank_info, lambda: training_data.training(guard.quarantine.ids))
    reseed = partial(ranks.reseed, recipe.train.seed)
    evaluator = HoldoutEvaluator(recipe=recipe, feed=training_data.holdout, stepper=parts.stepper,
                                 objective=training_data.objective, journal=journal, device=rank_info.device,
                                 counts_samples=ranks.counts_samples, stop=context.stop, link=link)  # fmt: skip
    search = _build_nonfinite_search(parts.networks, parts.stepper, loader_from, reseed, ranks, parts.clock, link)
    return Trainer(
        recipe=recipe,
        device=rank_info.device,
        loader_from=loader_from,
        stepper=parts.stepper,
        evaluator=evaluator,
        checkpointer=parts.checkpointer,
        recorder=_build_recorder(context, parts, before.recorder if before else None),
        check=StepCheck(plan=plan, guard=guard, journal=journal, replica_check=parts.replica_check, search=search),
        clock=parts.clock,
        link=link,
        reseed=reseed,
        requests=RunRequests(stop=context.stop, change=context.change_requested),
    )


def _build_recorder(context: RankContext, parts: StepParts, before: StepRecorder | None) -> StepRecorder:
    """Return the recorder of a plan. What does not depend on the plan stays that of the recorder `before`."""
    recipe, plan, rank_info, journal = context.recipe, context.plan, context.rank_info, context.journal
    writes = rank_info.rank == 0 and not context.ledger
    table = RankTableWriter(context.run.rank_table, seconds=recipe.telemetry.sample_seconds) if writes else None
    meters = build_meters(recipe, plan, parts.networks[0], rank_info.device, table)
    axes = measured_axes(plan, parts.networks)
    if before is not None:
        before.profiler.follow(parts.networks)
        before.compilations.restart()
        return replace(before, plan=plan, meters=meters, axes=axes)
    run, link = context.run, context.link
    return StepRecorder(
        plan=plan,
        meters=meters,
        journal=journal,
        profiler=build_profiler(run, journal, parts.clock, parts.networks, rank_info.device, link),
        compilations=Compilations(link, journal),
        axes=axes,
        indexer=StepIndexer(run.metrics, run.metrics_index) if writes else None,
        connections=ConnectionWatch(journal) if link.store else None,
    )


def refuse_unsavable(recipe: Recipe, networks: tuple[Network, ...]) -> None:
    """Raise now, not after training, if the trained model cannot be saved."""
    if recipe.train.save and recipe.model.adapter is None:
        networks[0].disk_config()


def build_networks(
    recipe: Recipe,
    plan: Plan,
    rank_info: RankInfo,
    ranks: RankMesh,
    report_progress: Callable[[], None] = lambda: None,
) -> tuple[Network, ...]:
    """Return this rank's stages of the recipe's network, sharded by the plan. Without a pipeline there is one stage.

    Every plan starts from the same weights. A network is built on the meta device, sharded, and then initialised shard
    by shard, so that no rank ever holds more than its shard. `report_progress` is called after each tensor read.
    """
    if plan.offloads_to_disk and not ranks.without_device:
        check_disk_folder(plan.disk.path, any_filesystem=plan.disk.any_filesystem)
    stages = shard_networks(recipe, plan, ranks, report_progress)
    for _, fill in stages:
        fill(_init_device(plan, rank_info))
    return tuple(network for network, _ in stages)


def build_empty_networks(recipe: Recipe, plan: Plan, rank_info: RankInfo, ranks: RankMesh) -> tuple[Network, ...]:
    """Return the same as `build_networks`, with memory for the weights but without their values.

    A frozen base in 4 bits gets its values: they are packed by shard, so another plan has other bytes.
    """
    device, adapter = _init_device(plan, rank_info), recipe.model.adapter
    networks = []
    for network, fill in shard_networks(recipe, plan, ranks):
        if adapter is not None and adapter.base == "4bit":
            fill(device)
        elif recipe.model.family == "hf":
            from trimaran.nets.hf_build import materialise  # noqa: PLC0415  transformers takes seconds to import

            materialise(network.module, device)
        else:
            to_empty(network.module, device)
        networks.append(network)
    return tuple(networks)


def shard_networks(
    recipe: Recipe, plan: Plan, ranks: RankMesh, report_progress: Callable[[], None] = lambda: None
) -> list[tuple[Network, Callable[[torch.device], None]]]:
    """Return this rank's stages, sharded and on the meta device, and for each a function that gives it its weights.

    That function takes the device of the weights. On the meta device it only checks that weights on disk fit.
    """
    if recipe.model.family == "hf":
        networks, whole, read_weights = open_hf_stages(recipe, plan, ranks, report_progress)

        def fill_hf(network: Network, device: torch.device) -> None:
            read_weights(network.module, device)
            fill_adapter(network, recipe, whole)

        for network in networks:
            _shard_network(network, whole, recipe, plan, ranks)
        return [(network, partial(fill_hf, network)) for network in networks]
    if is_plugin_family(recipe.model.family):
        network = open_family_network(recipe)
        _shard_network(network, None, recipe, plan, ranks)

        def fill_family(device: torch.device) -> None:
            to_empty(network.module, device)
            fill_base(network, recipe, None, report_progress)

        return [(network, fill_family)]
    spec = spec_of(recipe.model)
    assert spec is not None, "only a foreign Hugging Face architecture has no spec"
    refuse_unmatched(recipe.train.precision, module_names(spec))
    ranges = stage_ranges(spec, plan, seq_len=recipe.data.seq_len)
    with torch.device("meta"):
        whole = network_of(spec) if recipe.model.adapter else None
        here = stages_of_rank(plan.pipeline.schedule, plan.mesh.pp, ranks.rank("pp"), len(ranges))
        networks = tuple(network_of(spec, ranges[stage]) for stage in here)

    def fill(network: Network, device: torch.device) -> None:
        to_empty(network.module, device)
        fill_base(network, recipe, spec, report_progress)
        fill_adapter(network, recipe, whole)

    for network in networks:
        _shard_network(network, whole, recipe, plan, ranks)
    return [(network, partial(fill, network)) for network in networks]


def fill_base(network: Network, recipe: Recipe, spec: Spec | None, report_progress: Callable[[], None]) -> None:
    """Give a stage of our own network its weights: those on disk, or random ones. An adapter is not filled."""
    if recipe.model.path and weight_files(folder := model_folder(recipe.model.path)):
        if (absent := absent_layers(network.module, folder)) and not is_on_meta(network.module):
            log.warning("%s has no weights of %s, which start from random ones", folder, ", ".join(absent))
            initialise(network.module, seed=recipe.train.seed, spec=spec, within=absent)
        network.load(folder, report_progress)
    elif not is_on_meta(network.module):
        initialise(network.module, seed=recipe.train.seed, spec=spec)


def _shard_network(network: Network, whole: Network | None, recipe: Recipe, plan: Plan, ranks: RankMesh) -> None:
    """Freeze what is not trained, attach the adapter, set precisions and apply the plan, all in place.

    The adapter of a pipeline stage needs the `whole` network, without weights.
    """
    adapter = recipe.model.adapter
    refuse_adapter(recipe.model, plan)
    freeze_towers(network, recipe.model.freeze)
    if adapter is not None:
        refuse_inexpressible(whole or network, adapter)
        attach_adapter(network, adapter, whole)
    override_precision(network, recipe.train.precision, ranks.device)
    if adapter is not None:
        store_frozen_weights(network, plan)
        if adapter.base == "4bit":
            pack_frozen_weights(linears_to_pack(network, adapter))
    apply_plan(network, plan, ranks)


def fill_adapter(network: Network, recipe: Recipe, whole: Network | None = None) -> None:
    """Give the adapter its first values, if there is one. The base weights must be loaded."""
    if (adapter := recipe.model.adapter) is not None:
        if not is_on_meta(network.module):
            initialise_adapter(network.module, seed=recipe.train.seed)
        if adapter.path:
            load_peft_adapter(network, Path(adapter.path), adapter, whole)


def reload_base(networks: tuple[Network, ...], recipe: Recipe, plan: Plan, rank_info: RankInfo) -> None:
    """Read the base of an adapter again, in place: a weight in memory may be wrong, and checkpoints have none of it."""
    for module in (each for network in networks for each in network.module.modules()):
        if is_fsdp_module(module):
            module.reshard()
    if recipe.model.family == "hf":
        again, fill = open_hf_network(recipe.model, recipe.train.seed)
        if not all(each.is_meta for each in again.module.parameters()):
            raise RuntimeError("a frozen weight in memory is wrong, and this model cannot be read again in place")
        for network in networks:
            fill(network.module, _init_device(plan, rank_info))
        return
    spec = spec_of(recipe.model)
    assert spec is not None, "only a foreign Hugging Face architecture has no spec"
    for network in networks:
        fill_base(network, recipe, spec, lambda: None)


def build_memory_checks(guard: Guard, state: CheckpointState, recipe: Recipe, device: torch.device) -> ReplicaCheck:
    """Return the check of replicas, and give the guard the check of memory that changes between updates."""
    shards = state.checked_shards if isinstance(state, TrainingState) else state.shards
    guard.shard_check = ShardCheck(shards, device=device, max_fraction=recipe.faults.shard_check)
    return ReplicaCheck(shards, device=device)


def _init_device(plan: Plan, rank_info: RankInfo) -> torch.device:
    """Return the device of the initial weights: the CPU if they are offloaded or if DeepSpeed takes them unsharded."""
    if rank_info.device.type == "meta":
        return rank_info.device
    on_host = plan.engine == "deepspeed" or plan.offload == "parameters"
    return torch.device("cpu") if on_host else rank_info.device


def _build_nonfinite_search(
    networks: tuple[Network, ...],
    stepper: Stepper,
    loader_from: Callable[[int], Loader],
    reseed: Callable[[int], None],
    ranks: RankMesh,
    clock: StepClock,
    link: SupervisorLink,
) -> Callable[[RefusedStep], dict[str, Any]]:
    """Return a function that finds where a NaN or Inf was first produced; its time is not counted as part of a step."""
    nonfinite_search = NonfiniteSearch(networks, stepper, loader_from, reseed, ranks.device, ranks.degrees)

    def search(refusal: RefusedStep) -> dict[str, Any]:
        with link.section("search", refusal.step):
            origin = nonfinite_search.find(refusal)
        clock.discard_lap()
        return origin

    return search


def build_guard(recipe: Recipe, plan: Plan, run: RunDirectory) -> Guard:
    """Return the guard against bad steps and bad samples. Every rank must call it: the quarantine is broadcast."""
    return Guard(
        recipe.faults,
        loss_scale=build_torch_loss_scale(plan, recipe.train),
        quarantine=broadcast_quarantine(run.quarantine),
        bad_samples=BadSampleCount(recipe.data.samples.max_bad),
    )


def build_torch_loss_scale(plan: Plan, train: TrainSection) -> LossScale | None:
    """Return the loss scale of the torch engine; None with DeepSpeed, which has its own."""
    return build_loss_scale(plan, train) if plan.engine == "torch" else None


def build_stepper(
    networks: tuple[Network, ...],
    train: TrainSection,
    plan: Plan,
    ranks: RankMesh,
    clock: StepClock,
    guard: Guard | None = None,
    objective: Objective | None = None,
    *,
    groups_every: int = 0,
    ledger: RowLedger | None = None,
) -> Stepper:
    """Return the stepper that the plan asks for, with its optimizer.

    Every `groups_every`-th step measures gradients and updates by groups of modules; 0 measures none. `ledger` is that
    of an elastic replica, which synchronises with others outside of its steps.
    """
    network, guard = networks[0], guard or Guard(loss_scale=build_torch_loss_scale(plan, train))
    if plan.engine == "deepspeed":
        from trimaran.train.steppers.deepspeed_stepper import build_deepspeed_stepper  # noqa: PLC0415

        stepper = build_deepspeed_stepper(network, train, plan, ranks, clock, guard)
        stepper.objective = objective or stepper.objective
        return stepper
    if plan.engine == "async":
        from trimaran.train.async_sgd.async_stepper import build_async_stepper  # noqa: PLC0415  only this engine uses it

        return build_async_stepper(network, train, plan, ranks, clock, guard, objective)
    low_halves = split_weights(networks, plan)
    optimizer = build_optimizer([each.module for each in networks], train, plan, network.towers, low_halves)
    trained = trained_parameters(networks, plan)
    updater = Updater(
        optimizer,
        ranks,
        clock,
        trained=trained,
        clip_norm=train.clip_norm,
        guard=guard,
        meter=build_group_meter(networks, plan, ranks, trained, every=groups_every),
    )
    if ledger is not None:
        from trimaran.train.elastic.elastic_outer import build_elastic_outer  # noqa: PLC0415  only elastic runs use it

        updater.outer_state = build_elastic_outer(plan, networks)
        updater.more_counters["rows"] = ledger
    else:
        updater.outer_step = build_outer_step(plan, ranks, networks, last_step=train.steps)
    updater.compressor = compressor_of(network.module)
    if updater.compressor is not None:
        updater.compressor.state.seed = train.seed
    updater.unused = watch_unused_parameters(optimizer, networks)
    return connect_stepper(networks, plan, ranks, updater, clock, objective)


def import_for(plan: Plan) -> None:
    """Import what a rank of `plan` imports when it applies the plan."""
    for _ in steps_of(plan):
        pass
    if plan.mesh.pp > 1:
        import_module("trimaran.train.steppers.pipeline_stepper")
    if plan.engine == "async":
        import_module("trimaran.train.async_sgd.async_parts")
    if plan.is_elastic:
        import_module("trimaran.train.elastic.elastic_loop")


def connect_stepper(
    networks: tuple[Network, ...],
    plan: Plan,
    ranks: RankMesh,
    updater: Updater,
    clock: StepClock,
    objective: Objective | None = None,
) -> TorchStepper:
    """Return the stepper of the torch engine, for an optimizer that exists."""
    if plan.mesh.pp > 1:
        from trimaran.train.steppers.pipeline_stepper import PipelineStepper  # noqa: PLC0415  it imports schedules

        return PipelineStepper(networks, plan, ranks, updater, clock, objective)
    return PlainStepper(networks[0], plan, ranks, updater, clock, objective)
