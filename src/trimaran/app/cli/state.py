"""A run as its files tell it: nothing here talks to the processes, so a run can be watched from anywhere."""

import math
import platform
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import psutil

from trimaran.app.cli.logs import LogFollower, LogLine
from trimaran.core import PHASES, Event, StepMetrics, UserError
from trimaran.telemetry import Follower, RunDirectory

Status = Literal["starting", "training", "done", "stopped", "failed", "vanished"]

RECENT_STEPS = 20
MEASURED_STEPS = 1000

DETAILS: dict[str, Callable[[Any], str]] = {
    "bubble": lambda told: f"{told['measured']:.0%} of the pipeline's time, {told['theoretical']:.0%} in theory",
    "router": lambda told: f"busiest expert {told['imbalance']:.2f} x the mean, {told['dropped']:.1%} dropped",
    "loss_scale": lambda told: f"{told:g}",
}
_STEP_FIELDS = {field.name for field in fields(StepMetrics)} - {"details"}
_EVENT_FIELDS = {field.name for field in fields(Event)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the last thousand steps really cost, in the prediction's terms: medians, and the peak of the whole run.

    The first step warms up and counts only when it is alone.
    """

    step_seconds: float
    peak_bytes: int
    tokens_per_second: float
    mfu: float

    def as_dict(self) -> dict[str, float]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class RunState:
    """What the files of a run say so far. `refresh` reads what was added since the last look."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        try:
            self.recipe, self.plan = run.read_recipe(), run.read_plan()
        except (OSError, ValueError, KeyError):
            raise UserError("A008", "the recipe or the plan of this run cannot be read", where=str(run.path),
                            fix="wait if the run is just starting; otherwise start it again") from None  # fmt: skip
        ranks = range(self.plan.mesh.world_size)
        self.steps: list[StepMetrics] = []
        self.events: list[Event] = []
        self._metrics_follower = Follower(run.metrics)
        self._event_followers = [Follower(run.events(rank)) for rank in ranks]
        self._log_followers = [LogFollower(run.log(rank), rank) for rank in ranks]

    def refresh(self) -> list[LogLine]:
        """Read on, and return the lines that the ranks have printed since the last look."""
        self.steps.extend(_step(line) for line in self._read(self._metrics_follower, self.run.metrics))
        for rank, follower in enumerate(self._event_followers):
            lines = self._read(follower, self.run.events(rank))
            self.events.extend(Event(**{key: line[key] for key in _EVENT_FIELDS & line.keys()}) for line in lines)
        return [line for follower in self._log_followers for line in follower.new()]

    @staticmethod
    def _read(follower: Follower, path: Path) -> list[dict[str, Any]]:
        try:
            return list(follower.new())
        except ValueError:
            raise UserError("A008", "a line of this journal is not JSON", where=str(path),
                            fix="delete the broken line to read the rest") from None  # fmt: skip

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "failed"
        if self.of_kind("stop") and len(self.steps) < self.recipe.train.steps:
            return "stopped"
        if any(event.rank == 0 for event in self.of_kind("done")):
            return "done"
        if not self._rank_zero_lives():
            return "vanished"
        return "training" if self.steps else "starting"

    def _rank_zero_lives(self) -> bool:
        """Whether rank 0 may still be at work; only a process of this host that is gone, or a newer one, says no."""
        start = next((event for event in self.of_kind("start") if event.rank == 0), None)
        if start is None or start.data.get("host") != platform.node() or "pid" not in start.data:
            return True
        try:
            process = psutil.Process(start.data["pid"])
            return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= start.time
        except psutil.NoSuchProcess:
            return False

    @property
    def failure(self) -> Event | None:
        """The first error that a rank reported; a person's mistake comes before the faults that follow from it."""
        return min(self.of_kind("error"), key=lambda event: ("code" not in event.data, event.time), default=None)

    @property
    def silent_ranks(self) -> list[int]:
        """The ranks that started and never said how they ended."""
        ended = {event.rank for event in self.events if event.kind in ("error", "done")}
        return sorted({event.rank for event in self.of_kind("start")} - ended)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Steps and their losses on data that was never trained on."""
        found = [(event.step, event.data["loss"]) for event in self.of_kind("evaluation") if event.rank == 0]
        return [(step, math.nan if loss is None else loss) for step, loss in found]

    @property
    def measured(self) -> Measured | None:
        if not self.steps:
            return None
        warm = self.steps[1:][-MEASURED_STEPS:] or self.steps
        return Measured(
            step_seconds=statistics.median(step.step_seconds for step in warm),
            peak_bytes=max(step.peak_bytes for step in self.steps),
            tokens_per_second=statistics.median(step.tokens_per_second for step in warm),
            mfu=statistics.median(step.mfu for step in warm),
        )

    @property
    def differences(self) -> dict[str, float]:
        """How far what was measured lies from what was predicted, as a share of that: 0.1 is a tenth more."""
        predicted, measured = self.plan.prediction, self.measured
        if predicted is None or measured is None:
            return {}
        pairs = {name: (value, getattr(predicted, name)) for name, value in measured.as_dict().items()}
        return {name: after / before - 1 for name, (after, before) in pairs.items() if before > 0}

    @property
    def details(self) -> list[tuple[str, str]]:
        """What only some plans have, of the last step: names and words."""
        told = self.steps[-1].details if self.steps else {}
        return [(name, show(told[name])) for name, show in DETAILS.items() if name in told]

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds to the last step at the pace of the recent ones."""
        recent = self.steps[1:][-RECENT_STEPS:]
        if not recent or self.status != "training":
            return None
        pace = statistics.median(step.step_seconds for step in recent)
        return pace * (self.recipe.train.steps - self.steps[-1].step)

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of a recent step by phase, those that took no time left out."""
        recent = (self.steps[1:] or self.steps)[-RECENT_STEPS:]
        means = {name: sum(step.phases.get(name, 0.0) for step in recent) / max(1, len(recent)) for name in PHASES}
        return {name: seconds for name, seconds in means.items() if seconds > 0}

    def as_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: strict JSON, a number that is not finite is null."""
        measured, failure = self.measured, self.failure
        return {
            "run_dir": str(self.run.path),
            "status": self.status,
            "steps": len(self.steps),
            "total_steps": self.recipe.train.steps,
            "first_loss": finite(self.losses[:1]),
            "final_loss": finite(self.losses[-1:]),
            "held_out_loss": finite(loss for _, loss in self.evaluations[-1:]),
            "tokens_per_second": measured.tokens_per_second if measured else None,
            "plan": self.plan.model_dump(mode="json"),
            "prediction": self.plan.prediction.model_dump(mode="json") if self.plan.prediction else None,
            "measured": measured.as_dict() if measured else None,
            "differences": self.differences,
            "phases": self.phases,
            "details": self.steps[-1].details if self.steps else {},
            "samples": [event.data for event in self.of_kind("sample")],
            "error": failure.data | {"rank": failure.rank} if failure else None,
        }


def finite(values: Iterable[float]) -> float | None:
    """Return the one value if there is one and JSON can hold it."""
    return next((value for value in values if math.isfinite(value)), None)


def _step(line: dict[str, Any]) -> StepMetrics:
    """Return a line of `metrics.jsonl`: null is a number that is not finite; what only some plans have are details."""
    values: dict[str, Any] = {key: math.nan if line[key] is None else line[key] for key in _STEP_FIELDS & line.keys()}
    details = {key: value for key, value in line.items() if key in DETAILS}
    return StepMetrics(**values, details=details)
