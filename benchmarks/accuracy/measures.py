"""The accuracy figures, and the bounds that `make accuracy` enforces. Every estimator gets the same figures."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.ask import clean, promised, today
from benchmarks.accuracy.errors import Case, Errors, alarms, choices, merge_repeats, summarise

OWN = "our trainer, H200"
OWN_LATER = "our trainer, after the fit"
OWN_SMALL = "our trainer, 25M to 360M"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One figure of one source. `most` and `least` are the enforced bounds; without them it is informative."""

    name: str
    source: str
    of: Callable[[Sequence[Case]], float | None]
    most: float | None = None
    least: float | None = None
    percent: bool = True

    def show(self, value: float | None) -> str:
        if value is None:
            return "-"
        return f"{100 * value:.1f} %" if self.percent else f"{value:.3g}"

    def holds(self, value: float | None) -> bool:
        if self.most is None and self.least is None:
            return True
        if value is None:
            return False
        return (self.most is None or value <= self.most) and (self.least is None or value >= self.least)

    @property
    def bound(self) -> str:
        if self.most is not None:
            return f"at most {self.show(self.most)}"
        return f"at least {self.show(self.least)}" if self.least is not None else ""


def _part(field: str, error: str, keep: Callable[[Case], bool] = lambda _: True) -> Callable[..., float | None]:
    def of(cases: Sequence[Case]) -> float | None:
        found: Errors | None = summarise(getattr(case, error) for case in cases if keep(case))
        return None if found is None else abs(getattr(found, field))

    return of


def _alarm(which: int) -> Callable[[Sequence[Case]], float | None]:
    def of(cases: Sequence[Case]) -> float | None:
        found = alarms(cases)
        return None if found is None else found[which]

    return of


def _false_alarms(cases: Sequence[Case]) -> float | None:
    flagged = [not case.fits for case in cases if case.fits is not None and not case.run.failed]
    return statistics.fmean(flagged) if flagged else None


def _regret(cases: Sequence[Case]) -> float | None:
    picked = choices(merge_repeats(cases))
    return statistics.fmean(each.regret for each in picked) if picked else None


def _regret_to_256(cases: Sequence[Case]) -> float | None:
    return _regret([case for case in cases if case.run.gpus <= 256])


def _regret_of_rows(cases: Sequence[Case]) -> float | None:
    picked = choices(cases)
    return statistics.fmean(each.regret for each in picked) if picked else None


def _failed_picks(cases: Sequence[Case]) -> float | None:
    picked = choices(merge_repeats(cases))
    return sum(each.failed for each in picked) if picked else None


MEASURES = (
    Measure(name="memory, mean error", source="nanotron", of=_part("mape", "memory_error"), most=0.10),
    Measure(name="memory, bias", source="nanotron", of=_part("bias", "memory_error"), most=0.03),
    Measure(name="memory, median error", source="nanotron", of=_part("median", "memory_error")),
    Measure(name="memory, 90th percentile", source="nanotron", of=_part("p90", "memory_error")),
    Measure(name="memory, worst", source="Megatron 7B", of=_part("worst", "memory_error"), most=0.05),
    Measure(name="tokens/s, median error", source="NVIDIA 405B, Grok-1", of=_part("median", "speed_error"), most=0.12),
    Measure(name="tokens/s, median error", source="NVIDIA Nemotron-4", of=_part("median", "speed_error"), most=0.12),
    Measure(name="tokens/s, median error", source="Korthikanti", of=_part("median", "speed_error"), most=0.12),
    Measure(name="tokens/s, median error", source="torchtitan", of=_part("median", "speed_error"), most=0.12),
    Measure(name="ran, but predicted not to fit", source="NVIDIA Nemotron-4", of=_false_alarms, most=0.0),
    Measure(name="ran, but predicted not to fit", source="nanotron", of=_alarm(0), most=0.03),
    Measure(name="failed, and predicted not to fit", source="nanotron", of=_alarm(1), least=0.85),
    Measure(name="ran, but predicted not to fit", source="llm-foundry", of=_false_alarms),
    Measure(name="tokens/s, mean error", source="llm-foundry", of=_part("mape", "speed_error"), most=0.07),
    Measure(name="tokens/s, mean error, clean", source="nanotron", of=_part("mape", "speed_error", clean), most=0.15),
    Measure(name="tokens/s, median error, all", source="nanotron", of=_part("median", "speed_error")),
    Measure(name="plan choice, mean regret, to 256 GPUs", source="nanotron", of=_regret_to_256, most=0.10),
    # 0.10 is the goal. The two groups of 512 GPUs hold 0.10 of this alone: see "What is not reached" on the page.
    Measure(name="plan choice, mean regret", source="nanotron", of=_regret, most=0.135),
    Measure(name="plan choice, failed picks", source="nanotron", of=_failed_picks, most=0.0, percent=False),
    Measure(name="plan choice, mean regret, repeats apart", source="nanotron", of=_regret_of_rows),
    Measure(name="memory, worst", source=OWN, of=_part("worst", "memory_error", promised), most=0.05),
    Measure(name="step time, worst", source=OWN, of=_part("worst", "time_error", promised), most=0.10),
    Measure(name="memory, worst", source=OWN_LATER, of=_part("worst", "memory_error"), most=0.05),
    Measure(name="step time, worst", source=OWN_LATER, of=_part("worst", "time_error"), most=0.10),
    Measure(name="memory, worst, today's code", source=OWN, of=_part("worst", "memory_error", today), most=0.05),
    Measure(name="step time, worst, today's code", source=OWN, of=_part("worst", "time_error", today), most=0.10),
    Measure(name="memory, worst, today's code", source=OWN_LATER, of=_part("worst", "memory_error", today), most=0.05),
    Measure(name="step time, worst, today's code", source=OWN_LATER, of=_part("worst", "time_error", today), most=0.10),
    Measure(name="memory, worst", source=OWN_SMALL, of=_part("worst", "memory_error"), most=0.05),
    Measure(name="step time, worst", source=OWN_SMALL, of=_part("worst", "time_error"), most=0.10),
    Measure(name="memory, worst, all settings", source=OWN, of=_part("worst", "memory_error")),
    Measure(name="step time, median, all settings", source=OWN, of=_part("median", "time_error")),
)


def broken(cases: Mapping[str, Sequence[Case]]) -> list[str]:
    """Return the bounds that the cases of each source break."""
    lines = []
    for measure in MEASURES:
        value = measure.of(cases[measure.source])
        if not measure.holds(value):
            lines.append(f"{measure.source}: {measure.name} is {measure.show(value)}, {measure.bound} was promised")
    return lines
