"""Public names of `trimaran.history`, and the modules that they come from. They are imported on first use."""

from .fit_rates import fit_rates as fit_rates
from .measured_plan import measured_plans as measured_plans, pins_of as pins_of
from .measured_run import (
    RankStart as RankStart, plans_in_force as plans_in_force, read_measured_run as read_measured_run,
)
from .rate_model import (
    Observation as Observation, Parameter as Parameter, StepModel as StepModel, parameters_of as parameters_of,
)
from .run_index import find_runs as find_runs, index_path as index_path, open_index as open_index, stamp_of as stamp_of
from .steady_steps import steady_steps as steady_steps
