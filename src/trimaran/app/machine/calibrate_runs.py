"""The answer of `trimaran calibrate --from`: which runs are used, what is fitted to them, and how that is printed."""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trimaran.app.recipe.ask_torch import cluster_of_text
from trimaran.app.recipe.options import RUNS
from trimaran.app.show.clean_console import plain_table
from trimaran.app.show.text_chart import GREEN
from trimaran.core import UserError, show_seconds
from trimaran.machine import Calibration, Cluster, calibration_folder
from trimaran.machine.calibration import MAX_SOURCES, SourceRun, combined, find_calibration, with_fitted
from trimaran.planner.measure.fit_rates import FitResult, fit_rates, median_error
from trimaran.planner.measure.measured_run import MeasuredRun, PlanSteps, UnusableRunError, read_measured_run
from trimaran.planner.measure.rate_model import (
    ObservedRun,
    Parameter,
    by_device,
    factors_of,
    latest_of_each_plan,
    observe,
    rate_of,
)
from trimaran.planner.measure.run_index import find_runs, layout_of

MAX_SHOWN_REASONS = 3
MAX_SHOWN_RUNS, MAX_SHOWN_SKIPPED = 20, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChange:
    """A rate that was fitted: before and after, in `unit`, the standard deviation of its logarithm, and its runs."""

    parameter: Parameter
    before: float
    after: float
    unit: str
    sigma: float
    runs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFit:
    """What was fitted to the runs of one device, and the calibration with it; None if nothing got better."""

    name: str
    observed: tuple[ObservedRun, ...]
    result: FitResult
    changes: tuple[RateChange, ...]
    calibration: Calibration | None
    path: Path

    @property
    def device(self) -> str:
        device = self.observed[0].cluster.device
        return self.name if device.traits.shares_cores else device.name

    def as_dict(self) -> dict[str, Any]:
        result, left_out = self.result, self.result.left_out
        return {
            "device": self.device,
            "path": str(self.path),
            "improved": self.calibration is not None,
            "runs": [
                {
                    "run": str(each.run.path),
                    "plan": layout_of(each.found.plan),
                    "cluster": str(each.cluster),
                    "steps": each.found.steps.num_steps,
                    "step_seconds": each.found.steps.step_seconds,
                    "busy_seconds": each.found.steps.busy_seconds,
                    "error_before": result.before[number],
                    "error_after": result.after[number],
                    "error_left_out": left_out[number] if left_out else None,
                }
                for number, each in enumerate(self.observed)
            ],
            "median_error": {
                "before": median_error(result.before),
                "after": median_error(result.after),
                "left_out": median_error(left_out) if left_out else None,
            },
            "changes": [
                {
                    "rate": str(each.parameter),
                    "kind": each.parameter.kind,
                    "before": each.before,
                    "after": each.after,
                    "unit": each.unit,
                    "relative_error": each.sigma,
                    "runs": list(each.runs),
                }
                for each in self.changes
            ],
            "unchanged": [str(each) for each in result.undetermined],
            "calibration": self.calibration.model_dump(exclude_none=True) if self.calibration else None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateAnswer:
    """The fits by device, and why other runs were not used."""

    fits: tuple[DeviceFit, ...]
    skipped: tuple[tuple[str, str], ...]

    @property
    def better(self) -> list[DeviceFit]:
        return [each for each in self.fits if each.calibration is not None]


def calibrate_runs(names: Sequence[str], *, cluster: str | None, output: Path | None) -> CalibrateAnswer:
    """Fit rates to the runs of these names, run directories or folders that contain them; write nothing."""
    if not names:
        raise UserError("P085.no-run-named", where="trimaran calibrate --from")
    found: dict[Path, None] = {}
    for text in names:
        folder = Path(text) if Path(text).exists() or not (RUNS / text).is_dir() else RUNS / text
        found_runs = dict.fromkeys(find_runs(folder))
        if not found_runs:
            what = "there is no run here" if folder.exists() else "there is no such folder"
            raise UserError("P085", what, where=text,
                            fix="name a folder that `trimaran train` made, or one that contains such folders"
                            )  # fmt: skip
        found |= found_runs
    observed, skipped = _observe(list(found), cluster)
    if not observed:
        reasons = "; ".join(f"{Path(run).name}: {why}" for run, why in skipped[:MAX_SHOWN_REASONS])
        raise UserError("P085.none-runs", where=", ".join(names), num_skipped=len(skipped), reasons=reasons)
    groups = by_device(observed)
    if output is not None and len(groups) > 1:
        raise UserError("P087.runs-devices-output", where="--output", num_groups=len(groups), groups=", ".join(groups))
    folder = calibration_folder(os.environ)
    if folder is None and output is None:
        raise UserError("A023.user-no-home", where="the environment variable HOME")
    fits = []
    for name, group in groups.items():
        path = output or (folder or Path()) / f"{name}.json"
        newest = latest_of_each_plan(group)
        result = fit_rates([each.observation for each in newest])
        is_better = result.is_better
        fits.append(
            DeviceFit(
                name=name,
                observed=tuple(newest),
                result=result,
                changes=tuple(_change(each, result, newest) for each in result.fit.values) if is_better else (),
                calibration=_calibration(name, newest, find_calibration(folder, name), result) if is_better else None,
                path=path,
            )
        )
    return CalibrateAnswer(fits=tuple(fits), skipped=tuple(skipped))


def _observe(runs: Iterable[Path], cluster: str | None) -> tuple[list[ObservedRun], list[tuple[str, str]]]:
    found: list[ObservedRun] = []
    skipped: list[tuple[str, str]] = []
    cluster_named = lru_cache(lambda text: cluster_of_text(text, os.environ))

    def cluster_of(run: MeasuredRun, plan: PlanSteps) -> Cluster:
        if cluster is not None:
            return cluster_named(cluster)
        # The cluster of a run with the rates that the planner would take for it.
        # The recipe's own text is better than the recorded name, if it means the same: a file has links, and `auto`
        # has the topology of this machine.
        if not plan.cluster:
            raise UnusableRunError("it does not say what it ran on: name it with --cluster")
        is_here = plan.start.host in ("", platform.node())
        if plan.cluster.endswith("xcpu") and not is_here:
            raise UnusableRunError(f"the rates of a CPU are those of one machine, and it ran on {plan.start.host}")
        text = run.recipe.cluster
        if text != "auto" or is_here:
            try:
                if str(own := cluster_named(text)) == plan.cluster:
                    return own
            except UserError:
                pass  # a cluster file that is not here
        return cluster_named(plan.cluster)

    for path in runs:
        try:
            found += observe(read_measured_run(path), cluster_of)
        except UnusableRunError as error:
            skipped.append((str(path), str(error)))
    return found, skipped


def _change(parameter: Parameter, result: FitResult, observed: Sequence[ObservedRun]) -> RateChange:
    users = result.users[parameter] or range(len(observed))
    cluster = observed[users[0]].cluster
    before, unit = rate_of(parameter, cluster)
    after, _ = rate_of(parameter, with_fitted(cluster, factors_of(result.fit.values)))
    runs = tuple(dict.fromkeys(str(observed[number].run.path) for number in users))
    return RateChange(
        parameter=parameter, before=before, after=after, unit=unit, sigma=result.sigmas[parameter], runs=runs
    )


def _calibration(
    name: str, observed: Sequence[ObservedRun], known: Calibration | None, result: FitResult
) -> Calibration:
    """Return the calibration that is known, with the new factors and the runs that they come from."""
    sources = tuple(
        SourceRun(
            run=str(each.run.path),
            date=f"{time.strftime('%Y-%m-%d', time.localtime(each.found.steps.last_time))}",
            host=each.found.start.host,
            version=each.found.start.version,
            plan=layout_of(each.found.plan),
            steps=each.found.steps.num_steps,
            step_seconds=each.found.steps.step_seconds,
            before=result.before[number],
            after=result.after[number],
        )
        for number, each in enumerate(observed[:MAX_SOURCES])
    )
    factors = factors_of(result.fit.values)
    fitted = combined(known.fitted if known else None, factors.model_copy(update={"runs": sources}))
    fitted = fitted.model_copy(update={"date": time.strftime("%Y-%m-%d")})
    device = observed[0].cluster.device
    base = known or Calibration(device=name if device.traits.shares_cores else device.name)
    return base.model_copy(update={"fitted": fitted})


def show_calibration(answer: CalibrateAnswer, console: Console) -> None:
    """Print the fits by device, and the runs that were not used."""
    for number, fit in enumerate(answer.fits):
        if number:
            console.print()
        result = fit.result
        console.print(Text(f"{fit.device}: predicted steps of {len(fit.observed)} measured plans", style="bold"))
        columns = ("run", "plan", "measured", "error before", "after", *(["left out"] if result.left_out else []))
        table = plain_table()
        for column in columns:
            table.add_column(column, justify="left" if column in ("run", "plan") else "right", no_wrap=column != "plan")
        for number, each in enumerate(fit.observed[:MAX_SHOWN_RUNS]):
            errors = [result.before[number], result.after[number], *result.left_out[number : number + 1]]
            seconds = show_seconds(each.found.steps.busy_seconds)
            table.add_row(
                each.run.path.name, layout_of(each.found.plan), seconds, *(f"{error:+.1%}" for error in errors)
            )
        medians = [result.before, result.after, *([result.left_out] if result.left_out else [])]
        table.add_row("median", "", "", *(f"{median_error(each):.1%}" for each in medians), style="bold")
        console.print(table)
        if (more := len(fit.observed) - MAX_SHOWN_RUNS) > 0:
            console.print(Text(f"and {more:,} more, which the medians include", style="dim"))
        if not fit.changes:
            continue
        console.print()
        table = plain_table()
        for column in ("rate", "before", "after", "±", "from"):
            table.add_column(
                column, justify="left" if column in ("rate", "from") else "right", no_wrap=column != "from"
            )
        every = {str(each.run.path) for each in fit.observed}
        for change in fit.changes:
            runs = f"{len(change.runs)} of {len(every)} runs"
            if len(change.runs) == len(every):
                runs = "all runs" if len(every) > 1 else "the run"
            after = Text(f"{_rate(change.after)} {change.unit}", style=GREEN)
            table.add_row(str(change.parameter), _rate(change.before), after, f"{change.sigma:.0%}", runs)
        console.print(table)
        if result.undetermined:
            names = ", ".join(map(str, result.undetermined))
            console.print(Text(f"as they were, because these runs do not determine them: {names}", style="dim"),
                          soft_wrap=True)  # fmt: skip
    if answer.skipped:
        console.print(Text("\nnot used", style="dim"))
        for run, reason in answer.skipped[:MAX_SHOWN_SKIPPED]:
            console.print(Text(f"- {run}: {reason}"), soft_wrap=True)
        if (more := len(answer.skipped) - MAX_SHOWN_SKIPPED) > 0:
            console.print(Text(f"- and {more:,} more"))


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
