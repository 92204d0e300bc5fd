"""A recipe and a plan become the parts of a run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trimaran.core import Plan, Recipe, TrainSection
from trimaran.data import TokenShards, prepare
from trimaran.data.loader import Loader, Share
from trimaran.data.quarantine import Screen
from trimaran.data.sequences import Sequences, split
from trimaran.nets import Network
from trimaran.parallel import RankMesh, build_mesh
from trimaran.parallel.axes.pp import StageMap, counted_parameters, map_stages
from trimaran.parallel.comm.local_steps import meeting
from trimaran.telemetry import Journal, RunDirectory
from trimaran.train.build import build_networks
from trimaran.train.clock import Clock
from trimaran.train.deepspeed import build_deepspeed
from trimaran.train.evaluate import Evaluator
from trimaran.train.guard import Guard, agreed_quarantine
from trimaran.train.keeper import Keeper
from trimaran.train.loss_scale import LossScale, build_loss_scale
from trimaran.train.optimizer import build_optimizer
from trimaran.train.pipeline import PipelineStepper
from trimaran.train.place import Place
from trimaran.train.report import Reporter
from trimaran.train.sentinel import Sentinel
from trimaran.train.stepper import PlainStepper, Stepper
from trimaran.train.stop import StopWish
from trimaran.train.ties import ALONE, Ties
from trimaran.train.trainer import Trainer
from trimaran.train.update import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What a run is made of, once everything is built."""

    networks: tuple[Network, ...]
    stages: StageMap
    shards: TokenShards
    trainer: Trainer


def build_crew(
    run: RunDirectory, place: Place, journal: Journal, *, cache: Path, ties: Ties = ALONE, stop: StopWish | None = None
) -> Crew:
    """Return the trainer of `run` with the network and data it works on. The process group must be up."""
    recipe, plan, stop = run.read_recipe(), run.read_plan(), StopWish() if stop is None else stop
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    shards = TokenShards.open(prepare(recipe.data, cache=cache))
    ranks = build_mesh(plan.mesh, device_type=place.device.type)
    networks = build_networks(recipe, plan, place, ranks)
    shards.refuse_unknown(networks[0].vocabulary)
    if recipe.train.save:
        networks[0].disk_config()  # a shape that cannot be written down is a mistake to be told now, not at the end
    share = Share(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    training, holdout = split(shards, recipe.data)
    clock = Clock(place.device)
    guard = Guard(
        recipe.faults, loss_scale=own_loss_scale(plan, recipe.train), quarantine=agreed_quarantine(run.quarantine)
    )
    stepper = build_stepper(networks, recipe.train, plan, ranks, clock, guard)
    state = stepper.state(recipe.train)
    screen = partial(screen_of, guard, networks[0].vocabulary)
    stepper.set_training(True)  # transformers leaves a model that it has read in eval mode
    sentinel = Sentinel(state.pieces, device=place.device) if plan.engine == "torch" else None
    trainer = Trainer(
        recipe=recipe,
        plan=plan,
        device=place.device,
        loader_from=partial(load_from, recipe, place, training, share, screen),
        stepper=stepper,
        evaluator=Evaluator(
            recipe=recipe,
            sequences=holdout,
            share=share,
            stepper=stepper,
            journal=journal,
            device=place.device,
            counts_samples=ranks.counts_samples,
            stop=stop,
            screen=screen(),
            ties=ties,
        ),
        keeper=Keeper(run, place, journal, ties, state, data=shards.digest),
        reporter=Reporter(plan=plan, device=place.device, journal=journal, guard=guard, sentinel=sentinel),
        clock=clock,
        ties=ties,
        reseed=partial(ranks.reseed, recipe.train.seed),
        stop=stop,
    )
    return Crew(networks=networks, stages=map_stages(plan, ranks), shards=shards, trainer=trainer)


def load_from(
    recipe: Recipe, place: Place, sequences: Sequences, share: Share, screen: Callable[[], Screen], start: int
) -> Loader:
    """Return a loader of the batches from step `start` on."""
    return Loader(
        sequences,
        seed=recipe.train.seed,
        share=share,
        start_step=start,
        steps=recipe.train.steps,
        workers=recipe.data.workers,
        timeout_seconds=recipe.data.timeout_seconds,
        pin_memory=place.device.type == "cuda",
        screen=screen(),
    )


def screen_of(guard: Guard, vocabulary: int) -> Screen:
    """Return how samples are let in from now on."""
    return Screen(vocabulary=vocabulary, quarantined=guard.quarantine.ids)


def own_loss_scale(plan: Plan, train: TrainSection) -> LossScale | None:
    """Return the loss scale that is ours to move: DeepSpeed has one of its own."""
    return build_loss_scale(plan, train) if plan.engine == "torch" else None


def build_stepper(
    networks: tuple[Network, ...],
    train: TrainSection,
    plan: Plan,
    ranks: RankMesh,
    clock: Clock,
    guard: Guard | None = None,
) -> Stepper:
    """Return the mode of training that the plan asks for, with its optimizer."""
    network, guard = networks[0], guard or Guard(loss_scale=own_loss_scale(plan, train))
    if plan.engine == "deepspeed":
        return build_deepspeed(network, train, plan, ranks, clock, guard)
    optimizer = build_optimizer([each.module for each in networks], train, plan)
    counted = [*counted_parameters(networks)]
    meet = meeting(plan, ranks, counted)
    optimizer.register_step_post_hook(lambda *_: meet())
    updater = Updater(
        optimizer,
        ranks,
        clock,
        counted=counted,
        clip_norm=train.clip_norm,
        guard=guard,
    )
    if plan.mesh.pp > 1:
        return PipelineStepper(networks, plan, ranks, updater, clock)
    return PlainStepper(network, plan, ranks, updater, clock)
