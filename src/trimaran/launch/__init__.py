"""Outside the worker: starts the ranks and watches over them. Meets them only through files and command lines."""

from trimaran.launch.local import LocalRun, allocator_settings, local_command, start_local

__all__ = ["LocalRun", "allocator_settings", "local_command", "start_local"]
