"""What happened: the run directory, its journals, and how to follow them. Receives numbers, never tensors."""

from trimaran.telemetry.journal import Follower, Journal, LineFollower
from trimaran.telemetry.run_directory import (
    RunDirectory,
    create_run,
    dump_plan,
    free_run_path,
    open_run,
    refuse_full_disk,
    refuse_occupied,
)

__all__ = [
    "Follower",
    "Journal",
    "LineFollower",
    "RunDirectory",
    "create_run",
    "dump_plan",
    "free_run_path",
    "open_run",
    "refuse_full_disk",
    "refuse_occupied",
]
