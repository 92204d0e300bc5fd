"""The methods through which an optional part of training plugs in. `train/features/table.py` lists the parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from trimaran.core import Plan, Recipe
from trimaran.data import DataShare, StepBatch
from trimaran.nets import Network
from trimaran.parallel import RankMesh
from trimaran.runs import Journal
from trimaran.train.checkpointing.training_state import ShardKeys, StatePart, TrainingCounter
from trimaran.train.inputs.training_data import TrainingData
from trimaran.train.process.rank_setup import RankInfo
from trimaran.train.steppers.step_totals import StepTotals

if TYPE_CHECKING:
    from trimaran.train.steppers.engine import StepperContext
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


class UpdatePart:
    """The part of a feature in each step; here none. Checkpoints hold `state` by `keys`, and `counters`."""

    keys: ShardKeys | None = None
    state: Sequence[StatePart] = ()
    counters: Mapping[str, TrainingCounter] = {}

    def wrap_totals(self, make: MakeTotals) -> MakeTotals:
        """Return the constructor of the sums of a step; `make` is the one so far."""
        return make

    def begin_step(self, batch: StepBatch, loss_scale: float) -> None:
        """Prepare for the gradients of a batch."""

    def after_update(self, step: int, refused: Tensor) -> ReadDetails:
        """Finish a step that was `refused` unless 0; return a function for its metrics, one step later."""
        return dict


class Feature:
    """An optional part of training; here it changes nothing.

    `writes_lines`: rank 0 writes the metrics of each step when it is recorded. `seed_offset` is added to a rank's
    training seed.
    """

    writes_lines = True
    seed_offset = 0

    def wrap_load(self, load: Load, context: LoadContext) -> Load:
        """Return the loader of the data of a rank; `load` is the one so far. Every rank calls both."""
        return load

    def update_parts(self, context: "StepperContext") -> Sequence[UpdatePart]:
        """Return the parts of this feature in each step. Every rank must call it: it may create process groups."""
        return ()

    def wrap_trainer(self, make: MakeTrainer) -> MakeTrainer:
        """Return the constructor of the trainer; `make` is the one so far."""
        return make
