"""What happened: the run directory, its journals, and how to follow them. Receives numbers, never tensors."""

from trimaran.telemetry.incidents import IncidentLog, read_incidents
from trimaran.telemetry.journal import Follower, Journal, LineFollower, append_line, last_step
from trimaran.telemetry.pulse import Pulse, PulseBoard, Section
from trimaran.telemetry.run_directory import (
    RunDirectory,
    create_run,
    dump_plan,
    free_run_path,
    holds_run,
    open_run,
    refuse_full_disk,
    refuse_occupied,
    writing,
)

__all__ = [
    "Follower",
    "IncidentLog",
    "Journal",
    "LineFollower",
    "Pulse",
    "PulseBoard",
    "RunDirectory",
    "Section",
    "append_line",
    "create_run",
    "dump_plan",
    "free_run_path",
    "holds_run",
    "last_step",
    "open_run",
    "read_incidents",
    "refuse_full_disk",
    "refuse_occupied",
    "writing",
]
