"""One trial: a short real run of a plan, with its supervisor and ranks, until its step time is known well enough."""

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from trimaran.core import EXIT_AGAIN, EXIT_DONE, Recipe, UserError, relative_error
from trimaran.core.recipe import MlflowSection, PrometheusSection, WandbSection
from trimaran.launch.supervise.local import LocalRun, start_local
from trimaran.planner.measure.trial_record import MeasuredTrial, TrialLimits, TrialOutcome, TuneCandidate
from trimaran.runs import RunDirectory, RunReader, StepLine, create_run, read_incidents
from trimaran.runs.read.steady_steps import (
    MIN_STEADY_STEPS,
    SteadyMarks,
    median_step,
    seconds_without_stall,
    steady_ones,
)

STEPS = 10_000_000  # more than any trial lasts
POLL_SECONDS = 0.05
TARGET_ERROR = 0.01  # relative standard error of the median step at which a trial ends
MAX_STEADY_STEPS = 40
SLOW_RATIO = 1.5  # of the best: a trial whose steps are all slower ends after MIN_SLOW_STEPS
MIN_SLOW_STEPS = 2
CLEARLY_SLOWER = 1.1  # of the best: such a trial needs no smaller error
MAX_REASON_CHARACTERS = 300


class TrialEnd(NamedTuple):
    """Why a trial ended: an outcome, and the reason for a person."""

    outcome: TrialOutcome
    reason: str = ""


def trial_recipe(recipe: Recipe, candidate: TuneCandidate) -> Recipe:
    """Return the recipe of a trial: the same work with this plan, without an end, checkpoints, restarts and sinks."""
    telemetry = {"sample_seconds": 0.0, "profile": "", "prometheus": PrometheusSection(), "wandb": WandbSection()}
    telemetry |= {"tensorboard": False, "mlflow": MlflowSection(), "ecs": False, "otel": "", "nvtx": False}
    telemetry |= {"memory_snapshots": False}
    sample = recipe.train.sample.model_copy(update={"tokens": 0})
    evaluate = recipe.train.evaluate.model_copy(update={"every": 0, "batches": 0})
    sections = {
        "plan": candidate.plan.model_copy(update={"prediction": None}),
        "data": recipe.data.model_copy(update={"epochs": 0, "workers": candidate.workers}),
        "train": recipe.train.model_copy(
            update={"steps": STEPS, "save": False, "sample": sample, "evaluate": evaluate}
        ),
        "checkpoint": recipe.checkpoint.model_copy(update={"every": "off", "memory": 0, "store": ""}),
        "faults": recipe.faults.model_copy(update={"restart": False, "ranks": None}),
        "telemetry": recipe.telemetry.model_copy(update=telemetry),
    }
    return recipe.model_copy(update=sections)


def run_trial(
    recipe: Recipe,
    candidate: TuneCandidate,
    path: Path,
    limits: TrialLimits,
    *,
    warm: bool = True,
    show: Callable[[Sequence[float]], None] = lambda steps: None,
) -> MeasuredTrial:
    """Run the candidate in `path` and return the outcome, whatever goes wrong. `show` gets the seconds of the steps."""
    began = time.monotonic()
    prediction = candidate.plan.prediction
    figures = None
    if prediction is not None:
        figures = {"step_seconds": float(prediction.step_seconds), "peak_bytes": float(prediction.peak_bytes)}
        figures["error"] = prediction.error
    record = MeasuredTrial(
        key=candidate.key,
        plan=candidate.plan.model_dump(mode="json"),
        workers=candidate.workers,
        origin=candidate.origin,
        run=path.name,
        outcome="unfinished",
        predicted=figures,
    )
    try:
        run = create_run(path, trial_recipe(recipe, candidate), candidate.plan)
        ranks = start_local(run, warm=warm)
    except UserError as error:
        return replace(record, outcome="refused", reason=_short(f"{error.code}: {error.what}"), time=time.time())
    watch = TrialWatch(run, limits, began=began)
    try:
        while (end := watch.poll(ranks)) is None:
            show(watch.seconds)
            time.sleep(POLL_SECONDS)
    finally:
        if ranks.poll() is None:
            ranks.end()
        run.reserve.unlink(missing_ok=True)
        shutil.rmtree(run.checkpoints, ignore_errors=True)
    record = replace(record, outcome=end.outcome, reason=_short(end.reason), time=time.time())
    record = replace(record, trial_seconds=time.monotonic() - began, start_seconds=watch.start_seconds)
    if end.outcome not in ("measured", "slower"):
        return record
    steps = median_step(watch.steady)  # of a trial that was stopped early, there are few
    sigma = max(steps.standard_error, relative_error([*map(seconds_without_stall, watch.steady)]))
    figures = {"step_seconds": steps.step_seconds, "sigma": sigma, "steps": float(steps.num_steps)}
    figures |= {"peak_bytes": float(steps.peak_bytes)}
    figures |= {"data_fraction": steps.phases.get("data", 0.0) / steps.step_seconds}
    return replace(record, measured=figures)


class TrialWatch:
    """Follows the steps of a trial, and says when and why it is over."""

    def __init__(self, run: RunDirectory, limits: TrialLimits, *, began: float) -> None:
        self._run, self._limits, self._began = run, limits, began
        self._reader = RunReader(run)
        self._marks = SteadyMarks()
        self._steady_since = math.inf
        self.steps: list[StepLine] = []
        self.start_seconds = 0.0

    @property
    def seconds(self) -> list[float]:
        """The seconds of all steps."""
        return [each.step_seconds for each in self.steps]

    @property
    def steady(self) -> list[StepLine]:
        return steady_ones(self.steps, self._marks)

    def poll(self, ranks: LocalRun) -> TrialEnd | None:
        """Return why the trial is over; None while it is not."""
        code, now = ranks.poll(), time.monotonic()
        self.refresh(now)
        if code is not None:
            # Why the run ended by itself: a mistake in its settings, no memory, or a fault.
            if (error := ranks.read_error()) is not None:
                return TrialEnd("refused", f"{error.code}: {error.what}")
            incidents = read_incidents(self._run)
            if incidents and incidents[-1].cause == "preempted":
                return TrialEnd("unfinished", "the run was asked to stop")
            if incidents:
                last = incidents[-1]
                outcomes: dict[str, TrialOutcome] = {"oom": "out of memory", "user": "refused"}
                return TrialEnd(outcomes.get(last.cause, "failed"), last.what)
            if code in (EXIT_DONE, EXIT_AGAIN):
                return TrialEnd("failed", "the run ended before enough steps were measured")
            return TrialEnd("failed", f"the supervisor ended with exit code {code}; see logs/agent.log")
        return self.judge(now)

    def refresh(self, now: float) -> None:
        """Read what is new."""
        for event in self._reader.events():
            self._marks.add(event)
        self.add([*self._reader.steps()], now)

    def add(self, steps: Sequence[StepLine], now: float) -> None:
        """Add the steps that were finished by `now`."""
        if steps and not self.steps:
            self.start_seconds = now - self._began
        self.steps += steps
        if self.steady and self._steady_since == math.inf:
            self._steady_since = now

    def judge(self, now: float) -> TrialEnd | None:
        """Return why the trial is over by what was measured until `now`; None while it is not."""
        steady, best, limits = [*map(seconds_without_stall, self.steady)], self._limits.best_seconds, self._limits
        if best and len(steady) >= MIN_SLOW_STEPS and min(steady) > SLOW_RATIO * best:
            return TrialEnd("slower", f"stopped after {len(self.steps)} steps: {min(steady) / best:.1f} x the best")
        if len(steady) >= MIN_STEADY_STEPS:
            error = relative_error(steady)
            is_slower = best is not None and median(steady) * (1 - 2 * error) > CLEARLY_SLOWER * best
            is_over = now >= min(limits.deadline, self._steady_since + limits.steady_seconds)
            if is_slower or is_over or error <= TARGET_ERROR or len(steady) >= MAX_STEADY_STEPS:
                return TrialEnd("measured")
        if now >= limits.deadline:
            return TrialEnd("unfinished", f"time was over after {len(self.steps)} steps")
        if not self.steps and now >= self._began + limits.start_seconds:
            return TrialEnd("failed", f"no step within {limits.start_seconds:.0f} s")
        return None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARACTERS else f"{line[:MAX_REASON_CHARACTERS]}..."
