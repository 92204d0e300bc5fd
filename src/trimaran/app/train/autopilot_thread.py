"""Runs the autopilot of a run in a thread of the process that shows the run."""

import os
import threading
from types import TracebackType
from typing import Self

from trimaran.runs import RunDirectory

START_SECONDS = 5.0  # a run that starts has better things to do with the cores
END_SECONDS = 5.0


class AutopilotThread:
    """The autopilot of a run, as long as the `with` block lasts. It never disturbs the run or the view of it."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self._stop = run, threading.Event()
        self._thread = threading.Thread(target=self._control, name="autopilot", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(timeout=END_SECONDS)

    def _control(self) -> None:
        if self._stop.wait(START_SECONDS):
            return
        from trimaran.autopilot.controller import control
        from trimaran.machine import calibration_folder

        control(self._run, self._stop, calibrations=calibration_folder(os.environ))
