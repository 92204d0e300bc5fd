"""The places where an optional part of training plugs in. `train/features/table.py` lists the parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimaran.core import Plan, Recipe, TrainSection
from trimaran.data.feed import DataShare
from trimaran.data.step_batch import StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.run import Journal
from trimaran.train.checkpointing.training_state import ShardKeys, StatePart, TrainingCounter
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.process.rank_info import RankInfo
from trimaran.train.steppers.step_totals import StepTotals

if TYPE_CHECKING:
    from trimaran.train.trainer import Trainer

Load = Callable[[DataShare], TrainingData]
MakeTotals = Callable[..., StepTotals]  # with the arguments of `StepTotals`
MakeTrainer = Callable[..., "Trainer"]  # with the arguments of `Trainer`
ReadDetails = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlace:
    """What a feature may need to load the data of a rank. `report_progress` is called while it works."""

    recipe: Recipe
    plan: Plan
    rank_info: RankInfo
    ranks: RankMesh
    networks: Sequence[Network]
    journal: Journal
    cache: Path
    report_progress: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlace:
    """What a feature may need to join the update: networks that hold their weights, and the plan that they follow."""

    networks: Sequence[Network]
    train: TrainSection
    plan: Plan
    ranks: RankMesh
    clock: StepClock


class UpdatePart:
    """What a feature adds to each step of a rank. The methods of this class add nothing.

    `keys` and `state` say how checkpoints hold the state; `counters` are saved by their names.
    """

    keys: ShardKeys | None = None
    state: Sequence[StatePart] = ()
    counters: Mapping[str, TrainingCounter] = {}

    def wrap_totals(self, make: MakeTotals) -> MakeTotals:
        """Return what makes the sums of a step, in place of `make`."""
        return make

    def begin_step(self, batch: StepBatch, loss_scale: float) -> None:
        """Prepare for the gradients of a batch."""

    def after_update(self, step: int, refused: Tensor) -> ReadDetails:
        """Do what follows the update after `step` steps of the run, unless it was `refused` (not 0).

        Returns a function that returns fields of the metrics; it is called one step later.
        """
        return dict


class Feature:
    """An optional part of training. The methods of this class change nothing.

    `writes_lines`: rank 0 writes the metrics of each step when it is recorded. `seed_offset` is added to the seed of
    what a rank draws while it trains.
    """

    writes_lines = True
    seed_offset = 0

    def wrap_load(self, load: Load, place: DataPlace) -> Load:
        """Return what loads the data of a rank, in place of `load`. Every rank calls it, and what it returns."""
        return load

    def update_parts(self, place: UpdatePlace) -> Sequence[UpdatePart]:
        """Return what this feature adds to each step. Every rank must call it: it may create process groups."""
        return ()

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        """Return what makes the trainer, in place of `make`."""
        return make
