"""A recipe and a plan become the parts of a run."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trimaran.data import TokenShards, prepare
from trimaran.data.loader import Loader, Share
from trimaran.data.sequences import split
from trimaran.nets import Network
from trimaran.telemetry import Journal, RunDirectory
from trimaran.train.build import build_network
from trimaran.train.clock import Clock
from trimaran.train.evaluate import Evaluator
from trimaran.train.optimizer import build_optimizer
from trimaran.train.place import Place
from trimaran.train.stepper import PlainStepper
from trimaran.train.stop import StopWish
from trimaran.train.trainer import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """What a run is made of, once everything is built."""

    network: Network
    shards: TokenShards
    trainer: Trainer


def build_crew(run: RunDirectory, place: Place, journal: Journal, *, cache: Path) -> Crew:
    """Return the trainer of `run` with the network and data it works on. The process group must be up."""
    recipe, plan = run.read_recipe(), run.read_plan()
    if recipe.train.deterministic:
        torch.use_deterministic_algorithms(True)
    shards = TokenShards.open(prepare(recipe.data, cache=cache))
    network = build_network(recipe, plan, place)
    shards.refuse_unknown(network.vocabulary)
    if recipe.train.save:
        network.disk_config()  # a shape that cannot be written down is a mistake to be told now, not at the end
    torch.manual_seed(recipe.train.seed + place.rank)  # dropout; the weights are drawn by name and never from here
    share = Share(rank=place.rank, dp=plan.mesh.dp, micro_batch=plan.micro_batch, grad_accum=plan.grad_accum)
    training, holdout = split(shards, recipe.data)
    clock = Clock(place.device)
    stepper = PlainStepper(network, plan, place.device, clock)
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
        optimizer=build_optimizer(network.module, recipe.train),
        evaluator=Evaluator(
            recipe=recipe,
            plan=plan,
            sequences=holdout,
            share=share,
            stepper=stepper,
            module=network.module,
            journal=journal,
            device=place.device,
        ),
        journal=journal,
        clock=clock,
        stop=StopWish(run.stop_request if place.rank == 0 else None),
    )
    return Crew(network=network, shards=shards, trainer=trainer)
