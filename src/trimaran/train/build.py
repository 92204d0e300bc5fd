"""A recipe and a plan become the parts of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimaran.core import Plan, Recipe, TrainSection
from trimaran.data.feed import BatchFeed, DataShare
from trimaran.data.loader import Loader
from trimaran.nets import Network
from trimaran.optim import build_optimizer
from trimaran.optim.loss_scale import LossScale, build_loss_scale
from trimaran.optim.split_weights import split_weights
from trimaran.parallel import RankMesh, build_mesh
from trimaran.parallel.axes.pp import StageMap, map_stages, trained_parameters
from trimaran.parallel.comm.local_steps import meeting
from trimaran.run import Journal, RunDirectory
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.evaluate import Evaluator
from trimaran.train.health.bad_sample_limit import BadSampleCount
from trimaran.train.health.compilations import Compilations
from trimaran.train.health.guard import Guard, Refusal, agreed_quarantine
from trimaran.train.health.nonfinite_search import NonfiniteSearch
from trimaran.train.health.replica_check import ReplicaCheck
from trimaran.train.health.unused_parameters import watch_unused
from trimaran.train.inputs.loader_limits import room_of
from trimaran.train.inputs.training_data import Remember, TrainingData, load_training_data
from trimaran.train.inputs.vision_features import keep_features
from trimaran.train.loss.objective import Objective
from trimaran.train.metrics.meters import build_meters
from trimaran.train.metrics.parameter_groups import build_group_meter
from trimaran.train.metrics.profiler import build_profiler
from trimaran.train.metrics.step_clock import Clock, Laps
from trimaran.train.metrics.step_monitor import StepMonitor
from trimaran.train.networks import build_networks
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.process.stop_request import StopRequest
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.steppers.deepspeed_stepper import build_deepspeed
from trimaran.train.steppers.pipeline_stepper import PipelineStepper
from trimaran.train.steppers.stepper import PlainStepper, Stepper
from trimaran.train.steppers.update import Updater
from trimaran.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a run is made of, once everything is built."""

    networks: tuple[Network, ...]
    stages: StageMap
    training_data: TrainingData
    trainer: Trainer
    seconds: dict[str, float]  # that building took, by phase


def build_worker_parts(
    run: RunDirectory,
    place: RankInfo,
    journal: Journal,
    *,
    cache: Path,
    link: SupervisorLink = NO_SUPERVISOR,
    stop: StopRequest | None = None,
) -> WorkerParts:
    """Return the trainer of `run` with the network and data it works on. The process group must be up."""
    recipe, plan, stop, laps = run.read_recipe(), run.read_plan(), StopRequest() if stop is None else stop, Laps()
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    ranks = build_mesh(plan.mesh, device_type=place.device.type)
    networks = build_networks(recipe, plan, place, ranks)
    if recipe.train.save:
        networks[0].disk_config()  # a shape that cannot be written down is a mistake to be told now, not at the end
    laps.lap("network")
    share = DataShare(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    training_data = load_training_data(
        recipe, networks[0], share, cache=cache, remember=_remember(recipe, plan, place, link)
    )
    laps.lap("data")
    clock, guard = Clock(place.device), build_guard(recipe, plan, run)
    every = recipe.telemetry.details_every
    stepper = build_stepper(
        networks, recipe.train, plan, ranks, clock, guard, training_data.objective, groups_every=every
    )
    state = stepper.state(recipe.train)
    stepper.set_training(True)  # transformers leaves a model that it has read in eval mode
    replica_check = ReplicaCheck(state.pieces, device=place.device) if plan.engine == "torch" else None
    loader_from = partial(load_from, recipe, place, lambda: training_data.training(guard.quarantine.ids))
    reseed = partial(ranks.reseed, recipe.train.seed)
    evaluator = Evaluator(recipe=recipe, feed=training_data.holdout, stepper=stepper, objective=training_data.objective,
                          journal=journal, device=place.device, counts_samples=ranks.counts_samples,
                          stop=stop, link=link)  # fmt: skip
    trainer = Trainer(
        recipe=recipe,
        plan=plan,
        device=place.device,
        loader_from=loader_from,
        stepper=stepper,
        evaluator=evaluator,
        checkpointer=Checkpointer(run, place, journal, link, state, data=training_data.digest),
        monitor=StepMonitor(
            plan=plan,
            meters=build_meters(recipe, plan, networks[0], place.device),
            journal=journal,
            guard=guard,
            profiler=build_profiler(run, journal, clock, networks, place.device, link),
            replica_check=replica_check,
            compilations=Compilations(link),
            search=_searching(networks, stepper, loader_from, reseed, place.device, clock, link),
        ),
        clock=clock,
        link=link,
        reseed=reseed,
        stop=stop,
    )
    laps.lap("optimizer")
    return WorkerParts(
        networks=networks,
        stages=map_stages(plan, ranks),
        training_data=training_data,
        trainer=trainer,
        seconds=laps.seconds,
    )


def _searching(  # noqa: PLR0913 - what a step is made of, and who counts its time
    networks: tuple[Network, ...],
    stepper: Stepper,
    loader_from: Callable[[int], Loader],
    reseed: Callable[[int], None],
    device: torch.device,
    clock: Clock,
    link: SupervisorLink,
) -> Callable[[Refusal], dict[str, Any]]:
    """Return what looks for the birth of a number that is none; the time belongs to no step."""
    births = NonfiniteSearch(networks, stepper, loader_from, reseed, device)

    def search(refusal: Refusal) -> dict[str, Any]:
        link.enter("evaluation", refusal.step)
        found = births.find(refusal)
        clock.aside()
        link.enter("data", refusal.step)
        return found

    return search


def _remember(recipe: Recipe, plan: Plan, place: RankInfo, link: SupervisorLink) -> Remember:
    """Return what keeps the features of a frozen tower.

    It enters section "start" anew with each part: all of them may take hours, and one no longer than a start may.
    """
    return partial(keep_features, recipe, plan, place, beat=partial(link.enter, "start"))


def build_guard(recipe: Recipe, plan: Plan, run: RunDirectory) -> Guard:
    """Return who decides what becomes of bad steps and bad samples. All ranks ask together."""
    return Guard(
        recipe.faults,
        loss_scale=own_loss_scale(plan, recipe.train),
        quarantine=agreed_quarantine(run.quarantine),
        tally=BadSampleCount(recipe.data.samples.max_bad),
    )


def load_from(recipe: Recipe, place: RankInfo, feed: Callable[[], BatchFeed], start: int) -> Loader:
    """Return a loader of the batches from step `start` on. Which samples are left out may have changed by then."""
    return Loader(
        feed(),
        start_step=start,
        steps=recipe.train.steps,
        workers=recipe.data.workers,
        timeout_seconds=recipe.data.timeout_seconds,
        room=room_of(place),
    )


def own_loss_scale(plan: Plan, train: TrainSection) -> LossScale | None:
    """Return the loss scale that is ours to move: DeepSpeed has one of its own."""
    return build_loss_scale(plan, train) if plan.engine == "torch" else None


def build_stepper(  # noqa: PLR0913 - the parts of a step
    networks: tuple[Network, ...],
    train: TrainSection,
    plan: Plan,
    ranks: RankMesh,
    clock: Clock,
    guard: Guard | None = None,
    objective: Objective | None = None,
    *,
    groups_every: int = 0,
) -> Stepper:
    """Return the mode of training that the plan asks for, with its optimizer.

    Gradients and updates are measured by groups of modules at every `groups_every`-th step; 0: never.
    """
    network, guard = networks[0], guard or Guard(loss_scale=own_loss_scale(plan, train))
    if plan.engine == "deepspeed":
        stepper = build_deepspeed(network, train, plan, ranks, clock, guard)
        stepper.objective = objective or stepper.objective
        return stepper
    lows = split_weights(networks, plan)
    optimizer = build_optimizer([each.module for each in networks], train, plan, network.towers, lows)
    trained = trained_parameters(networks, plan)
    meet = meeting(plan, ranks, trained.parameters)
    optimizer.register_step_post_hook(lambda *_: meet())
    updater = Updater(
        optimizer,
        ranks,
        clock,
        trained=trained,
        clip_norm=train.clip_norm,
        guard=guard,
        meter=build_group_meter(networks, plan, ranks, trained, every=groups_every),
    )
    updater.unused = watch_unused(optimizer, networks)
    if plan.mesh.pp > 1:
        return PipelineStepper(networks, plan, ranks, updater, clock, objective)
    return PlainStepper(network, plan, ranks, updater, clock, objective)
