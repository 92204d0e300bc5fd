"""A run on disk and between processes: run directory, lease, journal, heartbeat, attempts, incidents. No torch."""

from trimaran.run.heartbeat import Heartbeat, HeartbeatBoard, Section
from trimaran.run.incidents import IncidentLog, read_incidents
from trimaran.run.journal import Journal, JsonlFollower, LineFollower, last_step
from trimaran.run.line_writer import append_line
from trimaran.run.run_directory import (
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
    "Heartbeat",
    "HeartbeatBoard",
    "IncidentLog",
    "Journal",
    "JsonlFollower",
    "LineFollower",
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
