"""The torch engine: our optimizer and update, with a stepper of one network or of the stages of a pipeline."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from trimaran.nets import Network
from trimaran.parallel import apply_joint_projections, build_optimizer, split_weights, trained_parameters
from trimaran.train.metrics.group_norms import build_group_meter
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.stepper import PlainStepper, TorchStepper
from trimaran.train.steppers.update import Updater

MAX_REPORTED_NAMES = 64


def watch_unused_parameters(optimizer: Optimizer, networks: Sequence[Network]) -> Callable[[], dict[str, Any]]:
    """Return a function that reports, once, parameters without a gradient at the optimizer's first step.

    They are under `unused`; before and afterwards the dict is empty. A gradient of zeros counts as one: experts that
    received no token have it.
    """
    names: list[str] = []

    def find_unused(*_: object) -> None:
        handle.remove()
        held = {each for group in optimizer.param_groups for each in group["params"]}
        named = ((name, each) for network in networks for name, each in network.module.named_parameters())
        names.extend(name for name, each in named if each in held and each.grad is None)
        del names[MAX_REPORTED_NAMES:]

    handle = optimizer.register_step_pre_hook(find_unused)
    return lambda: {"unused": [names.pop(0) for _ in range(len(names))]} if names else {}


def build_stepper(context: StepperContext) -> TorchStepper:
    """Return the stepper of a rank, with its optimizer."""
    networks, train, plan, ranks = context.networks, context.train, context.plan, context.ranks
    split = split_weights(networks, plan)
    apply_joint_projections(networks, plan)
    optimizer = build_optimizer([each.module for each in networks], train, plan, networks[0].towers, split)
    trained = trained_parameters(networks, plan)
    updater = Updater(
        optimizer,
        ranks,
        trained=trained,
        clip_norm=train.clip_norm,
        guard=context.guard,
        meter=build_group_meter(networks, plan, ranks, trained, split, every=context.groups_every),
        parts=[part for feature in context.features for part in feature.update_parts(context)],
        unused=watch_unused_parameters(optimizer, networks),
    )
    return connect_stepper(context, updater)


def connect_stepper(context: StepperContext, updater: Updater) -> TorchStepper:
    if context.plan.mesh.pp > 1:
        from trimaran.train.steppers.pipeline_stepper import PipelineStepper  # noqa: PLC0415  it imports schedules

        return PipelineStepper(context, updater)
    return PlainStepper(context, updater)
