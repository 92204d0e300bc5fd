"""The torch engine: our optimizer and update, with a stepper of one network or of the stages of a pipeline."""

from collections.abc import Sequence

from trimaran.core import Plan
from trimaran.nets import Network
from trimaran.optim import build_optimizer
from trimaran.optim.split_weights import split_weights
from trimaran.parallel import RankMesh, apply_joint_projections
from trimaran.parallel.axes.stage_map import trained_parameters
from trimaran.train.health.unused_parameters import watch_unused_parameters
from trimaran.train.loss.objective import Objective
from trimaran.train.metrics.parameter_groups import build_group_meter
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.engine import StepperContext
from trimaran.train.steppers.feature import UpdateContext
from trimaran.train.steppers.stepper import PlainStepper, TorchStepper
from trimaran.train.steppers.update import Updater


def build_stepper(context: StepperContext) -> TorchStepper:
    """Return the stepper of a rank, with its optimizer."""
    networks, train, plan, ranks = context.networks, context.train, context.plan, context.ranks
    split = split_weights(networks, plan)
    apply_joint_projections(networks, plan)
    optimizer = build_optimizer([each.module for each in networks], train, plan, networks[0].towers, split)
    trained = trained_parameters(networks, plan)
    update = UpdateContext(networks=networks, train=train, plan=plan, ranks=ranks, clock=context.clock)
    updater = Updater(
        optimizer,
        ranks,
        trained=trained,
        clip_norm=train.clip_norm,
        guard=context.guard,
        meter=build_group_meter(networks, plan, ranks, trained, split, every=context.groups_every),
        parts=[part for feature in context.features for part in feature.update_parts(update)],
        unused=watch_unused_parameters(optimizer, networks),
    )
    return connect_stepper(networks, plan, ranks, updater, context.clock, context.objective)


def connect_stepper(
    networks: Sequence[Network],
    plan: Plan,
    ranks: RankMesh,
    updater: Updater,
    clock: StepClock,
    objective: Objective,
) -> TorchStepper:
    """Return the stepper of a plan, for an optimizer that exists."""
    if plan.mesh.pp > 1:
        from trimaran.train.steppers.pipeline_stepper import PipelineStepper  # noqa: PLC0415  it imports schedules

        return PipelineStepper(networks, plan, ranks, updater, clock, objective)
    return PlainStepper(networks[0], plan, ranks, updater, clock, objective)
