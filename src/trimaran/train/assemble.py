"""A recipe and a plan become the parts of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trimaran.core import Plan, TrainSection
from trimaran.data import TokenShards, prepare
from trimaran.data.loader import Loader, Share
from trimaran.data.sequences import split
from trimaran.nets import Network
from trimaran.parallel import RankMesh, build_mesh
from trimaran.parallel.axes.pp import StageMap, counted_parameters, map_stages
from trimaran.parallel.comm.local_steps import meeting
from trimaran.telemetry import Journal, RunDirectory
from trimaran.train.build import build_networks
from trimaran.train.clock import Clock
from trimaran.train.deepspeed import build_deepspeed
from trimaran.train.evaluate import Evaluator
from trimaran.train.loss_scale import build_loss_scale
from trimaran.train.optimizer import build_optimizer
from trimaran.train.pipeline import PipelineStepper
from trimaran.train.place import Place
from trimaran.train.stepper import PlainStepper, Stepper
from trimaran.train.stop import StopWish
from trimaran.train.trainer import Trainer
from trimaran.train.update import Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What a run is made of, once everything is built."""

    networks: tuple[Network, ...]
    stages: StageMap
    shards: TokenShards
    trainer: Trainer


def build_crew(run: RunDirectory, place: Place, journal: Journal, *, cache: Path) -> Crew:
    """Return the trainer of `run` with the network and data it works on. The process group must be up."""
    recipe, plan = run.read_recipe(), run.read_plan()
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    shards = TokenShards.open(prepare(recipe.data, cache=cache))
    ranks = build_mesh(plan.mesh, device_type=place.device.type)
    networks = build_networks(recipe, plan, place, ranks)
    shards.refuse_unknown(networks[0].vocabulary)
    if recipe.train.save:
        networks[0].disk_config()  # a shape that cannot be written down is a mistake to be told now, not at the end
    torch.manual_seed(ranks.dropout_seed(recipe.train.seed))  # the weights are drawn by name and never from here
    share = Share(rank=ranks.data_rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    training, holdout = split(shards, recipe.data)
    clock = Clock(place.device)
    stepper = build_stepper(networks, recipe.train, plan, ranks, clock)
    stepper.set_training(True)  # transformers leaves a model that it has read in eval mode
    trainer = Trainer(
        recipe=recipe,
        plan=plan,
        device=place.device,
        loader=Loader(
            training,
            seed=recipe.train.seed,
            share=share,
            steps=recipe.train.steps,
            workers=recipe.data.workers,
            timeout_seconds=recipe.data.timeout_seconds,
            pin_memory=place.device.type == "cuda",
        ),
        stepper=stepper,
        evaluator=Evaluator(
            recipe=recipe,
            sequences=holdout,
            share=share,
            stepper=stepper,
            journal=journal,
            device=place.device,
            counts_samples=ranks.counts_samples,
        ),
        journal=journal,
        clock=clock,
        stop=StopWish(run.stop_request if place.rank == 0 else None),
    )
    return Crew(networks=networks, stages=map_stages(plan, ranks), shards=shards, trainer=trainer)


def build_stepper(
    networks: tuple[Network, ...], train: TrainSection, plan: Plan, ranks: RankMesh, clock: Clock
) -> Stepper:
    """Return the mode of training that the plan asks for, with its optimizer."""
    network = networks[0]
    if plan.engine == "deepspeed":
        return build_deepspeed(network, train, plan, ranks, clock)
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
        loss_scale=build_loss_scale(plan, train),
    )
    if plan.mesh.pp > 1:
        return PipelineStepper(networks, plan, ranks, updater, clock)
    return PlainStepper(network, plan, ranks, updater, clock)
