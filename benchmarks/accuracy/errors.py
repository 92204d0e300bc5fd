"""Errors of predictions against measurements."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.published import Run

TIE_FRACTION = 1e-6  # relative; closer predictions are a tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run and its prediction. None: the estimator does not predict that figure."""

    run: Run
    peak_bytes: float | None
    tokens_per_second_per_gpu: float | None
    fits: bool | None

    @property
    def memory_error(self) -> float | None:
        """The relative error of the peak, if it was measured; positive if the prediction is too high."""
        if self.peak_bytes is None or not self.run.peak_gib or self.run.failed:
            return None
        return self.peak_bytes / (self.run.peak_gib * 2**30) - 1

    @property
    def speed_error(self) -> float | None:
        """The relative error of tokens per second, if they were measured."""
        if self.tokens_per_second_per_gpu is None or not self.run.tokens_per_second_per_gpu or self.run.failed:
            return None
        return self.tokens_per_second_per_gpu / self.run.tokens_per_second_per_gpu - 1

    @property
    def time_error(self) -> float | None:
        """The relative error of the step time."""
        return None if self.speed_error is None else 1 / (1 + self.speed_error) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of many runs: mean, median and 90th percentile of their size, and their signed mean."""

    count: int
    mape: float
    median: float
    p90: float
    bias: float
    worst: float


def summarise(errors: Iterable[float | None]) -> Errors | None:
    """Return the summary of the errors that are not None; None if there are none."""
    found = [each for each in errors if each is not None]
    if not found:
        return None
    sizes = sorted(abs(each) for each in found)
    return Errors(
        count=len(found),
        mape=statistics.fmean(sizes),
        median=statistics.median(sizes),
        p90=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=statistics.fmean(found),
        worst=max(found, key=abs),
    )


def by(cases: Sequence[Case], key: Callable[[Case], str | int]) -> dict[str | int, list[Case]]:
    """Return the cases of each group, in the order of the groups' names."""
    groups: dict[str | int, list[Case]] = {}
    for case in cases:
        groups.setdefault(key(case), []).append(case)
    return dict(sorted(groups.items()))


def alarms(cases: Sequence[Case]) -> tuple[float, float] | None:
    """Return the fraction of successful runs that were predicted not to fit, and of failed runs that were."""
    answered = [case for case in cases if case.fits is not None]
    ran = [not case.fits for case in answered if not case.run.failed]
    failed = [not case.fits for case in answered if case.run.failed]
    return (statistics.fmean(ran), statistics.fmean(failed)) if ran and failed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that the predictions pick for one model and number of GPUs, against the best measured one.

    If `tied` plans have equal predictions, any of them may be picked: `regret` and `failed` are then expected values.
    """

    group: str
    plans: int
    tied: int
    regret: float
    failed: float


def choices(cases: Sequence[Case]) -> list[Choice]:
    """Return the loss in each group from running the plan that was predicted to fit and to be fastest.

    A pick that failed loses everything. The order of the cases must not matter: published tables are sorted by measured
    speed, so the first of equals would be the best.
    """
    picked = []
    for group, members in by(cases, lambda case: f"{case.run.model}, {case.run.gpus} GPUs").items():
        best = max((_measured(case) for case in members), default=0.0)
        predicted = [case.tokens_per_second_per_gpu or 0.0 for case in members if case.fits]
        if not best or not any(predicted):
            continue
        top = max(predicted) * (1 - TIE_FRACTION)
        picks = [case for case in members if case.fits and (case.tokens_per_second_per_gpu or 0.0) >= top]
        picked.append(
            Choice(
                group=str(group),
                plans=len(members),
                tied=len(picks),
                regret=statistics.fmean(1 - _measured(case) / best for case in picks),
                failed=statistics.fmean(case.run.failed for case in picks),
            )
        )
    return picked


def merge_repeats(cases: Sequence[Case]) -> list[Case]:
    """Return one case per request: it ran if any repeat ran, at the mean speed of those that did.

    Nine of nanotron's configurations are published twice, as successful and as failed, with equal settings.
    """
    merged = []
    for repeats in by(cases, lambda case: json.dumps(case.run.line, sort_keys=True)).values():
        ran = [case for case in repeats if not case.run.failed]
        speeds = [case.run.tokens_per_second_per_gpu for case in ran if case.run.tokens_per_second_per_gpu]
        first = (ran or repeats)[0]
        speed = statistics.fmean(speeds) if speeds else None
        merged.append(replace(first, run=replace(first.run, tokens_per_second_per_gpu=speed)))
    return merged


def _measured(case: Case) -> float:
    return 0.0 if case.run.failed else case.run.tokens_per_second_per_gpu or 0.0
