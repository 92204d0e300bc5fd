"""A run on disk and between processes: run directory, lease, journal, heartbeat, attempts, incidents. No torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_MODULES = {
    "heartbeat": ("Heartbeat", "HeartbeatBoard", "Section"),
    "incidents": ("IncidentLog", "read_incidents"),
    "journal": ("Journal", "JsonlFollower", "LineFollower", "last_step"),
    "line_writer": ("append_line",),
}


def __getattr__(name: str) -> Any:
    """Import a module on first use: a process that starts others first needs only `process_control`."""
    if name not in __all__:
        raise AttributeError(f"module 'trimaran.run' has no attribute {name!r}")
    module = next((each for each, names in _MODULES.items() if name in names), "run_directory")
    found = globals()[name] = getattr(import_module(f"trimaran.run.{module}"), name)
    return found
