"""Outside the worker: starts the ranks and watches over them. Meets them only through files and command lines."""

from trimaran.launch.local import LocalRun, local_command, start_local

__all__ = ["LocalRun", "local_command", "start_local"]
