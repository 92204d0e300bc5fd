"""Values that cross process boundaries: recipe, plan, events, units and errors. Only `regular_files` opens files."""

from trimaran.core.autopilot_section import AutopilotSection
from trimaran.core.errors import (
    EXIT_AGAIN,
    EXIT_DONE,
    EXIT_STUCK,
    EXIT_USER,
    UserError,
    did_you_mean,
)
from trimaran.core.event import PHASES, SECONDS_DECIMALS, SLOW_DETAILS, Event, EventKind, StepMetrics
from trimaran.core.finding import Decision, DecisionOutcome, Finding
from trimaran.core.image_rules import ImageRules, RowCost, RowSizes
from trimaran.core.incident import Action, Cause, Incident
from trimaran.core.plan import AXES, Comm, Mesh, Pipeline, Plan
from trimaran.core.prediction import Prediction
from trimaran.core.recipe import (
    AdapterSection,
    CheckpointSection,
    DataSection,
    FaultsSection,
    MixtureSource,
    ModelSection,
    Recipe,
    SamplesSection,
    TelemetrySection,
    TrainSection,
)
from trimaran.core.recipe_changes import fixed_field_changes
from trimaran.core.recipe_parser import dump_recipe, parse_recipe
from trimaran.core.units import GIB, Bytes, Flops, Seconds, show_bytes, show_count, show_seconds

__all__ = [
    "AXES",
    "EXIT_AGAIN",
    "EXIT_DONE",
    "EXIT_STUCK",
    "EXIT_USER",
    "GIB",
    "PHASES",
    "SECONDS_DECIMALS",
    "SLOW_DETAILS",
    "Action",
    "AdapterSection",
    "AutopilotSection",
    "Bytes",
    "Cause",
    "CheckpointSection",
    "Comm",
    "DataSection",
    "Decision",
    "DecisionOutcome",
    "Event",
    "EventKind",
    "FaultsSection",
    "Finding",
    "Flops",
    "ImageRules",
    "Incident",
    "Mesh",
    "MixtureSource",
    "ModelSection",
    "Pipeline",
    "Plan",
    "Prediction",
    "Recipe",
    "RowCost",
    "RowSizes",
    "SamplesSection",
    "Seconds",
    "StepMetrics",
    "TelemetrySection",
    "TrainSection",
    "UserError",
    "did_you_mean",
    "dump_recipe",
    "fixed_field_changes",
    "parse_recipe",
    "show_bytes",
    "show_count",
    "show_seconds",
]
