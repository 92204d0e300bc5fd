"""How far predictions are from what was measured."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from benchmarks.accuracy.published import Run

SAME = 1e-6  # predictions closer than this are a tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run, and what was said about it. None: the estimator has no answer, or nothing to say about that."""

    run: Run
    peak_bytes: float | None
    tokens_per_second_per_gpu: float | None
    fits: bool | None

    @property
    def memory_error(self) -> float | None:
        """The relative error of the peak, where the run has one; above 0 it was said to be more."""
        if self.peak_bytes is None or not self.run.peak_gib or self.run.failed:
            return None
        return self.peak_bytes / (self.run.peak_gib * 2**30) - 1

    @property
    def speed_error(self) -> float | None:
        """The relative error of tokens a second, where the run has them."""
        if self.tokens_per_second_per_gpu is None or not self.run.tokens_per_second_per_gpu or self.run.failed:
            return None
        return self.tokens_per_second_per_gpu / self.run.tokens_per_second_per_gpu - 1

    @property
    def time_error(self) -> float | None:
        """The relative error of a step's time: of what the tokens of a second take."""
        return None if self.speed_error is None else 1 / (1 + self.speed_error) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Relative errors of many runs: mean and median and 90th percentile of their size, and their mean."""

    count: int
    mape: float
    median: float
    p90: float
    bias: float
    worst: float


def summarise(errors: Iterable[float | None]) -> Errors | None:
    """Return the summary of those errors that are there; None without any."""
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
    """Return the share of runs that ran but were said not to fit, and of failed ones that were said to fail."""
    told = [case for case in cases if case.fits is not None]
    ran = [not case.fits for case in told if not case.run.failed]
    failed = [not case.fits for case in told if case.run.failed]
    return (statistics.fmean(ran), statistics.fmean(failed)) if ran and failed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plan that the predictions pick of one model and number of GPUs, against the best that was measured.

    Of `tied` plans that were said to be equally fast any may be picked: `regret` and `failed` are then expected values.
    """

    group: str
    plans: int
    tied: int
    regret: float
    failed: float


def choices(cases: Sequence[Case]) -> list[Choice]:
    """Return what is lost in each group by running the plan that was said to fit and be fastest.

    A pick that failed loses everything. The order of the cases must not matter: published tables are sorted by what was
    measured, so the first of equals would be the best.
    """
    picked = []
    for group, members in by(cases, lambda case: f"{case.run.model}, {case.run.gpus} GPUs").items():
        best = max((_measured(case) for case in members), default=0.0)
        said = [case.tokens_per_second_per_gpu or 0.0 for case in members if case.fits]
        if not best or not any(said):
            continue
        top = max(said) * (1 - SAME)
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
    """Return one case for each question: it ran if any repeat did, at the mean speed of those that ran.

    Nine of nanotron's configurations are published twice, as run and as failed: nothing that is asked tells them apart.
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
