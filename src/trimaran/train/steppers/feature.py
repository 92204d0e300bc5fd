"""The methods through which an optional part of training plugs in. `train/features/table.py` lists the parts."""

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
from trimaran.runs import Journal
from trimaran.train.checkpointing.training_state import ShardKeys, StatePart, TrainingCounter
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.metrics.step_clock import StepClock
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.steppers.step_totals import StepTotals

if TYPE_CHECKING:
    from trimaran.train.trainer import Trainer

Load = Callable[[DataShare], TrainingData]
MakeTotals = Callable[..., StepTotals]  # with the arguments of `StepTotals`
MakeTrainer = Callable[..., "Trainer"]  # with the arguments of `Trainer`
ReadDetails = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadContext:
    """The arguments of `Feature.wrap_load`. Call `report_progress` during long work."""

    recipe: Recipe
    plan: Plan
    rank_info: RankInfo
    ranks: RankMesh
    networks: Sequence[Network]
    journal: Journal
    cache: Path
    report_progress: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateContext:
    """The arguments of `Feature.update_parts`. The networks hold their weights."""

    networks: Sequence[Network]
    train: TrainSection
    plan: Plan
    ranks: RankMesh
    clock: StepClock


class UpdatePart:
    """The part of a feature in the steps of a rank. The methods of this class do nothing.

    `keys` and `state` say how checkpoints hold the state; `counters` are saved by their names.
    """

    keys: ShardKeys | None = None
    state: Sequence[StatePart] = ()
    counters: Mapping[str, TrainingCounter] = {}

    def wrap_totals(self, make: MakeTotals) -> MakeTotals:
        """Return the constructor of the sums of a step; `make` is the one so far."""
        return make

    def begin_step(self, batch: StepBatch, loss_scale: float) -> None:
        """Prepare for the gradients of a batch."""

    def after_update(self, step: int, refused: Tensor) -> ReadDetails:
        """Finish step `step`, whose update was `refused` unless that is 0.

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

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        """Return the loader of the data of a rank; `load` is the one so far. Every rank calls both."""
        return load

    def update_parts(self, context: UpdateContext) -> Sequence[UpdatePart]:
        """Return the parts of this feature in each step. Every rank must call it: it may create process groups."""
        return ()

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        """Return the constructor of the trainer; `make` is the one so far."""
        return make
