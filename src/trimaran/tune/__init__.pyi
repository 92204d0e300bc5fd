"""Public names of `trimaran.tune`, and the modules that they come from. They are imported on first use."""

from .choose_next import (
    TrialCosts as TrialCosts, best_of as best_of, costs_of as costs_of, propose as propose, why_not as why_not,
)
from .run_trial import (
    MAX_STEADY_STEPS as MAX_STEADY_STEPS, TrialWatch as TrialWatch,
    trial_recipe as trial_recipe,
)
from .step_time_model import (
    ExpectedTime as ExpectedTime, StepTimeModel as StepTimeModel, expected_gain as expected_gain,
)
from .trial_record import TrialLimits as TrialLimits
from .trial_record import (
    MeasuredTrial as MeasuredTrial, TriedCandidate as TriedCandidate, TuneCandidate as TuneCandidate,
    combine as combine,
)
from .trial_store import TrialStore as TrialStore, locked_folder as locked_folder
from .tuner import TuneResult as TuneResult, TuneTask as TuneTask, Tuner as Tuner
