"""Builds the parts of a rank from its recipe and plan: networks, data, stepper, trainer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from trimaran.data import BatchFeed, share_of
from trimaran.nets import Network
from trimaran.parallel import RankMesh, build_mesh
from trimaran.runs import closed_listeners
from trimaran.train.agreement import RunRequests, StepCheck
from trimaran.train.checkpointing.tiers import Base, CheckpointInputs
from trimaran.train.evaluate import HoldoutEvaluator
from trimaran.train.health.memory_check import CompareReplicas
from trimaran.train.inputs.training_data import TrainingData, build_loader, load_training_data
from trimaran.train.metrics.step_clock import StartupTimer
from trimaran.train.process.rank_setup import set_torch_modes
from trimaran.train.rank_context import Instruments, RankContext
from trimaran.train.rank_networks import build_networks, refuse_unsavable, reload_base
from trimaran.train.steppers.engine import build_stepper
from trimaran.train.steppers.feature import Load, LoadContext, MakeTrainer
from trimaran.train.steppers.stepper import Stepper
from trimaran.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a rank. `seconds` is the time that each phase of the build took."""

    context: RankContext
    networks: tuple[Network, ...]
    ranks: RankMesh
    training_data: TrainingData
    instruments: Instruments
    trainer: Trainer
    checkpoint: CheckpointInputs
    seconds: dict[str, float] = field(default_factory=dict)


def build_worker_parts(context: RankContext) -> WorkerParts:
    """Return the parts of a rank. The process group must be initialised."""
    recipe, plan, rank_info, timer = context.recipe, context.plan, context.rank_info, StartupTimer()
    set_torch_modes(recipe, rank_info.device)
    with closed_listeners():
        ranks = build_mesh(plan.mesh, device_type=rank_info.device.type)
    base = Base()
    if recipe.model.adapter is not None:
        from trimaran.train.checkpointing.base_hashing import AdapterBase, BaseHashing  # noqa: PLC0415  few runs have one

        base = AdapterBase(BaseHashing(recipe, context.link, context.cache), path=str(recipe.model.path))
    with context.link.section("load") as report_progress:
        networks = build_networks(recipe, plan, rank_info, ranks, report_progress)
    refuse_unsavable(recipe, networks)
    timer.lap("network")
    training_data = load_data(context, ranks, networks)
    timer.lap("data")
    instruments = Instruments(context, networks)
    parts = connect_parts(context, ranks, networks, training_data, instruments, base)
    timer.lap("optimizer")
    return replace(parts, seconds=timer.seconds)


def load_data(context: RankContext, ranks: RankMesh, networks: Sequence[Network]) -> TrainingData:
    """Return the data of this rank, prepared first if necessary."""
    with context.link.section("prepare") as report_progress:
        load: Load = partial(
            load_training_data, context.recipe, networks[0], cache=context.cache, report_progress=report_progress
        )
        inputs = LoadContext(
            recipe=context.recipe,
            plan=context.plan,
            rank_info=context.rank_info,
            ranks=ranks,
            networks=networks,
            journal=context.journal,
            cache=context.cache,
            report_progress=report_progress,
        )
        for feature in context.features:
            load = feature.wrap_load(load, inputs)
        return load(share_of(context.plan, ranks.data_rank))


def connect_parts(
    context: RankContext,
    ranks: RankMesh,
    networks: tuple[Network, ...],
    training_data: TrainingData,
    instruments: Instruments,
    base: Base,
) -> WorkerParts:
    """Return the parts with a trainer (stepper, evaluator, recorder and checks) and the state to restore and save."""
    recipe, plan = context.recipe, context.plan
    stepper = build_stepper(
        networks,
        recipe.train,
        plan,
        ranks,
        instruments.clock,
        instruments.guard,
        training_data.objective,
        groups_every=recipe.telemetry.details_every,
        features=context.features,
    )
    state = stepper.state(recipe.train, without_base=base.is_apart)
    stepper.set_training(True)  # transformers loads models in eval mode
    compare_replicas = instruments.watch_memory(context, state)
    trainer = connect_trainer(context, ranks, networks, training_data, instruments, stepper, compare_replicas)
    checkpoint = CheckpointInputs(
        run=context.run,
        rank_info=context.rank_info,
        journal=context.journal,
        link=context.link,
        state=state,
        recipe=recipe,
        plan=plan,
        data=training_data.digest,
        base=base.of_networks(partial(reload_base, networks, recipe, plan, context.rank_info)),
    )
    return WorkerParts(
        context=context,
        networks=networks,
        ranks=ranks,
        training_data=training_data,
        instruments=instruments,
        trainer=trainer,
        checkpoint=checkpoint,
    )


def connect_trainer(
    context: RankContext,
    ranks: RankMesh,
    networks: tuple[Network, ...],
    training_data: TrainingData,
    instruments: Instruments,
    stepper: Stepper,
    compare_replicas: CompareReplicas,
) -> Trainer:
    """Return the trainer of a stepper, with an evaluator, a recorder and a check."""
    recipe, plan, rank_info, link = context.recipe, context.plan, context.rank_info, context.link
    guard, journal = instruments.guard, context.journal

    def feed() -> BatchFeed:
        return training_data.training(guard.quarantine.ids)

    loader_from = partial(build_loader, recipe, rank_info, feed)
    reseed = partial(ranks.reseed, recipe.train.seed + sum(each.seed_offset for each in context.features))
    make: MakeTrainer = Trainer
    for feature in context.features:
        make = feature.wrap_trainer(make)
    return make(
        recipe=recipe,
        device=rank_info.device,
        loader_from=loader_from,
        feed=feed,
        stepper=stepper,
        evaluator=HoldoutEvaluator(
            context=context, data=training_data, stepper=stepper, counts_samples=ranks.counts_samples
        ),
        recorder=instruments.recorder(context, networks),
        check=StepCheck(
            plan=plan,
            guard=guard,
            journal=journal,
            compare_replicas=compare_replicas,
            search=instruments.nonfinite_search(context, networks, stepper, loader_from, reseed, ranks),
        ),
        clock=instruments.clock,
        link=link,
        reseed=reseed,
        requests=RunRequests(stop=context.stop, change=context.change_requested),
    )
