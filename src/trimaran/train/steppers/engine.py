"""The engines that run the steps of a plan. Each is imported only by a rank of such a plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from trimaran.core import Plan, TrainSection
from trimaran.nets import Network
from trimaran.parallel import RankMesh, build_loss_scale
from trimaran.train.health.guard import Guard
from trimaran.train.loss.objective import LanguageObjective, Objective
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.steppers.feature import Feature
from trimaran.train.steppers.stepper import Stepper

# By the plan's engine, the module with its `build_stepper`.
ENGINES = {
    "torch": "trimaran.train.steppers.torch_engine",
    "deepspeed": "trimaran.train.features.deepspeed_stepper",
    "async": "trimaran.train.features.async_trainer",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepperContext:
    """The arguments of an engine's `build_stepper`. `groups_every`: steps between group norms; 0 is none."""

    networks: tuple[Network, ...]
    train: TrainSection
    plan: Plan
    ranks: RankMesh
    clock: StepClock
    guard: Guard
    objective: Objective
    groups_every: int = 0
    features: Sequence[Feature] = ()


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
    features: Sequence[Feature] = (),
) -> Stepper:
    context = StepperContext(
        networks=networks,
        train=train,
        plan=plan,
        ranks=ranks,
        clock=clock,
        guard=guard or Guard(loss_scale=build_loss_scale(plan, train)),
        objective=objective or LanguageObjective(),
        groups_every=groups_every,
        features=features,
    )
    return import_module(ENGINES[plan.engine]).build_stepper(context)
