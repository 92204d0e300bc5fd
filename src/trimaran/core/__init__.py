"""Nouns that cross a process: frozen values, units and errors. Nothing here reads a file or asks a device."""

from trimaran.core.errors import (
    EXIT_AGAIN,
    EXIT_DONE,
    EXIT_STUCK,
    EXIT_USER,
    UserError,
    nearest,
)
from trimaran.core.event import PHASES, Event, EventKind, StepMetrics
from trimaran.core.finding import Decision, Finding
from trimaran.core.image_rules import ImageRules, RowCost
from trimaran.core.incident import Action, Cause, Incident
from trimaran.core.plan import AXES, Comm, Mesh, Pipeline, Plan
from trimaran.core.prediction import Prediction
from trimaran.core.recipe import (
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
from trimaran.core.recipe_changes import changes_of_course
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
    "Action",
    "Bytes",
    "Cause",
    "CheckpointSection",
    "Comm",
    "DataSection",
    "Decision",
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
    "SamplesSection",
    "Seconds",
    "StepMetrics",
    "TelemetrySection",
    "TrainSection",
    "UserError",
    "changes_of_course",
    "dump_recipe",
    "nearest",
    "parse_recipe",
    "show_bytes",
    "show_count",
    "show_seconds",
]
