"""A run that a drill has started: it trains until the drill stops it, and is started again after it has ended."""

import contextlib
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console

from trimaran.app.drill.drill_run import mark_as_own
from trimaran.app.recipe.request import Request
from trimaran.app.train.session import create_checked_run
from trimaran.launch.supervise.local import LocalRun, start_local
from trimaran.runs import RunDirectory

STEPS = 10_000_000  # more than any drill lasts
CHECKPOINT_EVERY = 20  # steps, if the recipe leaves it to Trimaran: several faults need a checkpoint on disk
STOP_SECONDS = 60.0


class OwnRun:
    """Creates a run of a recipe and starts it; the end of the `with` block stops it, with a checkpoint."""

    def __init__(self, request: Request, path: Path, console: Console) -> None:
        self.run: RunDirectory = create_checked_run(without_end(request), path, console)
        mark_as_own(self.run)
        self._supervisor: LocalRun = start_local(self.run)

    def is_alive(self) -> bool:
        return self._supervisor.poll() is None

    def restart(self) -> None:
        """Start the run again after its supervisor has ended."""
        self._supervisor.wait()
        self._supervisor = start_local(self.run)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._supervisor.poll() is None:
            self._supervisor.request_stop()
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                self._supervisor.wait(STOP_SECONDS if error is None else STOP_SECONDS / 6)
        if self._supervisor.poll() is None:
            self._supervisor.end()


def without_end(request: Request) -> Request:
    """Return the request with enough steps for any drill, and frequent checkpoints unless the recipe sets them."""
    recipe = request.recipe
    every = CHECKPOINT_EVERY if recipe.checkpoint.every in ("auto", "off") else recipe.checkpoint.every
    sections = {
        "train": recipe.train.model_copy(update={"steps": STEPS}),
        "data": recipe.data.model_copy(update={"epochs": 0}),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": every}),
    }
    return Request(
        recipe=recipe.model_copy(update=sections),
        spec=request.spec,
        outline=request.outline,
        cluster=request.cluster,
        plan=request.plan,
    )
