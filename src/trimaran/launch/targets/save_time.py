"""How long a stop takes: the last checkpoint and the last step, as a run has measured them or as they are predicted."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimaran.core import Seconds
from trimaran.launch.targets.target import LaunchRequest
from trimaran.runs import RunDirectory
from trimaran.runs.line_files import last_lines, lines_from_end

SLACK_SECONDS = 60
NUM_SAVES = 5  # the longest of the last ones counts
NUM_STEPS = 20
MAX_EVENTS = 2000  # lines to look at, from the end


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTime:
    """The seconds that a run needs to stop with a complete checkpoint, and whether they were measured."""

    save_seconds: Seconds
    step_seconds: Seconds
    measured: bool

    @property
    def lead_seconds(self) -> int:
        """How long before the end of its time a run must be asked to stop."""
        return math.ceil(self.save_seconds) + math.ceil(self.step_seconds) + SLACK_SECONDS

    def __str__(self) -> str:
        how = "the longest of the last saves" if self.measured else "predicted"
        save, step = math.ceil(self.save_seconds), math.ceil(self.step_seconds)
        return f"{save} s for a save ({how}) + {step} s for a step + {SLACK_SECONDS} s = {self.lead_seconds} s"


def stop_time(request: LaunchRequest) -> StopTime:
    """Return how long a stop takes: as measured by the run if it has saved before, else as predicted."""
    predicted = request.plan.prediction.step_seconds if request.plan.prediction else Seconds(0.0)
    known = measured_stop_time(request.run_dir)
    if known is None:
        return StopTime(save_seconds=request.save_seconds, step_seconds=predicted, measured=False)
    return known


def measured_stop_time(run_dir: Path) -> StopTime | None:
    """Return what the run in `run_dir` has measured; None if it has not saved yet."""
    run, saves, uploads = RunDirectory(run_dir), [], [0.0]
    for number, (_, line) in enumerate(_lines(run.events(0))):
        event = _parse(line)
        if event.get("kind") == "checkpoint":
            saves.append(float(event.get("data", {}).get("seconds", 0.0)))
        elif event.get("kind") == "upload":  # a run that stops waits until its store has the last checkpoint
            uploads.append(float(event.get("data", {}).get("seconds", 0.0)))
        if len(saves) == NUM_SAVES or number == MAX_EVENTS:
            break
    if not saves:
        return None
    steps = [float(_parse(line).get("step_seconds", 0.0)) for line in _last(run.metrics)]
    save_seconds = Seconds(max(saves) + max(uploads))
    return StopTime(save_seconds=save_seconds, step_seconds=Seconds(max(steps, default=0.0)), measured=True)


def _lines(path: Path) -> Any:
    try:
        yield from lines_from_end(path)
    except OSError:
        return


def _last(path: Path) -> list[bytes]:
    try:
        return last_lines(path, NUM_STEPS)
    except OSError:
        return []


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
