"""Public names of `trimaran.doctor`, and the modules that they come from. They are imported on first use."""

from .diagnose import TargetCheck as TargetCheck, check_targets as check_targets, diagnose as diagnose
from .evidence import Evidence as Evidence, read_evidence as read_evidence, read_planner_inputs as read_planner_inputs
from .memory_fix import usable_bytes as usable_bytes
from .predicted_gain import (
    apply_patch as apply_patch, forecast as forecast, patch_settings as patch_settings, predicted_gain as
    predicted_gain, with_measured_links as with_measured_links,
)
from .rules import RULES as RULES
from .rules.communication import MAX_BUSY_CORES_FRACTION as MAX_BUSY_CORES_FRACTION
from .rules.compute import debug_on as debug_on
from .rules.hardware import swap as swap
from .rules.memory import memory_growth as memory_growth
from .step_breakdown import (
    StepBreakdown as StepBreakdown, steady_steps as steady_steps, step_breakdown as step_breakdown,
)
