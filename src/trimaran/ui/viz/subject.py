"""What a view is about: a job, its cluster and plan, and what a run of it has measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trimaran.core import WORLD, Plan, Prediction, UserError, predicted_comm, show_bytes, show_count, templated
from trimaran.cost import Job, predict
from trimaran.machine import Cluster, CommResult
from trimaran.planner import Question
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Control, Figure, Lines, Table, Unit, ValueSeries, plain_bars, show_duration


class RankSpread(NamedTuple):
    """A measure of all ranks: the least, the median and the most, and the rank that has the most."""

    least: float
    median: float
    most: float
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """The last steps of a run: their numbers, and for each its seconds, peak bytes and seconds of communication."""

    numbers: tuple[int, ...] = ()
    seconds: tuple[float, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    comm: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMedians:
    """What a run has measured so far: medians over its last steps, and the peak of its fullest rank."""

    name: str
    steps: int
    step_seconds: float
    peak_bytes: float
    tokens_per_second: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    comm_seconds: Mapping[str, float] = field(default_factory=dict)
    stage_seconds: tuple[float, ...] = ()  # of the stages of a pipeline, for one micro-batch
    stage_layers: tuple[int, ...] = ()
    ranks: Mapping[str, RankSpread] = field(default_factory=dict)  # by measure
    slowest: Mapping[int, int] = field(default_factory=dict)  # of the measured steps, by rank
    last: MeasuredSteps = MeasuredSteps()


class PhaseSpan(NamedTuple):
    """A part of a run's life: its phase, from when to when in seconds since the beginning, and what it was."""

    phase: str
    start: float
    end: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLife:
    """The life of a run so far. `files` are those that it was launched with, by name."""

    name: str
    status: str
    step: int
    total_steps: int
    seconds: float
    spans: tuple[PhaseSpan, ...]
    files: Mapping[str, str] = field(default_factory=dict)


class LaunchText(NamedTuple):
    """What a launch on a target consists of: the command that writes the files, the files, and how to submit them."""

    command: str
    files: Mapping[str, str]
    main: str
    submit: tuple[str, ...]


Launches = Mapping[str, Callable[[], LaunchText]]
"""The launch on each target by its name; a call raises UserError if the target needs more than is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and its data, the cluster, and the plan."""

    question: Question
    cluster: Cluster
    plan: Plan
    run: RunMedians | None = None
    life: RunLife | None = None
    launches: Launches = field(default_factory=dict)
    comm: CommResult | None = None  # that `trimaran bench comm` measured
    settings: Mapping[str, str] = field(default_factory=dict)  # that a user gave to controls
    # Answers of the planner, which take long, by what was asked; copies with other settings share them.
    kept: dict[tuple[object, ...], Any] = field(default_factory=dict, compare=False)

    @property
    def job(self) -> Job:
        return self.question.job

    @property
    def about(self) -> str:
        outline = self.job.outline
        parameters = show_count(outline.num_parameters)
        return say("{model} ({parameters} parameters), {cluster}, {plan}", model=outline.name, parameters=parameters,
                   cluster=self.cluster, plan=self.plan)  # fmt: skip

    def predict(self, plan: Plan, cluster: Cluster | None = None) -> Prediction:
        return predict(self.job, cluster or self.cluster, plan)

    @property
    def prediction(self) -> Prediction:
        return self.plan.prediction or self.predict(self.plan)


class Controls:
    """Reads the controls of a view from the settings, and collects them for the answer."""

    def __init__(self, subject: Subject, view: str) -> None:
        self._settings, self._view, self._read = dict(subject.settings), view, list[Control]()

    def number(
        self, name: str, label: str, default: float, *, least: float, most: float, log: bool = False, step: float = 0.0
    ) -> float:
        text = self._settings.pop(name, None)
        value = default
        if text is not None:
            try:
                value = float(text)
            except ValueError:
                value = float("nan")
            if not least <= value <= most:
                raise UserError(
                    "V002.not-number",
                    where=templated("the view {view}", view=self._view),
                    name=name,
                    text=text[:40],
                    least=least,
                    most=most,
                    default=default,
                )
        self._read.append(
            Control(name=name, label=label, kind="number", value=value, least=least, most=most, step=step, log=log)
        )
        return value

    def whole(self, name: str, label: str, default: int, *, least: int, most: int, log: bool = False) -> int:
        return round(self.number(name, label, default, least=least, most=most, log=log, step=1.0))

    def choice(self, name: str, label: str, default: str, options: tuple[str, ...]) -> str:
        value = self._settings.pop(name, default)
        if value not in options:
            raise UserError(
                "V002.none",
                where=templated("the view {view}", view=self._view),
                name=name,
                value=value[:40],
                options=", ".join(options),
                default=default,
            )
        self._read.append(Control(name=name, label=label, kind="choice", value=value, options=options))
        return value

    def done(self) -> tuple[Control, ...]:
        """Return all controls; raise if a setting is none of them."""
        if self._settings:
            names = ", ".join(each.name for each in self._read) or "none"
            raise UserError(
                "V003.view-no-control",
                where="--with",
                view=self._view,
                next=next(iter(self._settings))[:40],
                names=names,
            )
        return tuple(self._read)


PEAK_TITLE = "Peak memory over the last steps"
MEASURES = {"busy_seconds": "computing", "data_seconds": "waiting for data", "wait_seconds": "waiting for other ranks"}


def error_text(predicted: float, measured: float) -> str:
    """Return how far the prediction is off, as `+12.0%`; nothing if nothing was measured."""
    return as_is(f"{predicted / measured - 1:+.1%}") if measured > 0 else as_is("")


def run_table(subject: Subject, run: RunMedians, *names: str) -> Table:
    values = {
        "time of a step": (float(subject.prediction.step_seconds), run.step_seconds, show_duration),
        "peak of a rank": (float(subject.prediction.peak_bytes), run.peak_bytes, show_bytes),
    }
    rows = []
    for name in names:
        predicted, measured, show = values[name]
        rows.append((say(name), as_is(show(predicted)), as_is(show(measured)), error_text(predicted, measured)))
    return Table(title="This run", columns=("", "predicted", "measured", "error"), rows=tuple(rows))


def predicted_waits(subject: Subject) -> dict[str, float]:
    """Return the predicted seconds of a step that a rank waits, by axis."""
    plan: Plan = subject.plan.model_copy(update={"prediction": subject.prediction})
    return predicted_comm(plan)


def waits_table(subject: Subject, run: RunMedians, axes: tuple[str, ...] = ()) -> Table:
    """Return what rank 0 waits for each axis in a step, measured and predicted; with `axes`, only for those."""
    expected = predicted_waits(subject)
    rows = [
        (
            say("all ranks") if axis == WORLD else as_is(axis),
            as_is(show_duration(expected.get(axis, 0.0))),
            as_is(show_duration(measured)),
            error_text(expected.get(axis, 0.0), measured),
        )
        for axis, measured in run.comm_seconds.items()
        if not axes or axis in axes
    ]
    return Table(title="Waits of rank 0 in a step, by axis", columns=("axis", "predicted", "measured", "error"),
                 rows=tuple(rows))  # fmt: skip


def late_ranks(run: RunMedians) -> list[Figure]:
    found: list[Figure] = []
    rows = [
        (say(name), *(as_is(show_duration(each)) for each in spread[:3]), as_is(spread.at))
        for measure, name in MEASURES.items()
        if (spread := run.ranks.get(measure)) is not None
    ]
    if rows:
        found.append(Table(title="Ranks compared", columns=("", "least", "median", "most", "rank with the most"),
                           rows=tuple(rows)))  # fmt: skip
    if total := sum(run.slowest.values()):
        shares = {say("rank {rank}", rank=rank): run.slowest[rank] / total for rank in sorted(run.slowest)}
        found.append(
            plain_bars("How often each rank was the slowest", "fraction", "share of the measured steps", shares)
        )
    return found


def measured_lines(title: str, unit: Unit, run: RunMedians, values: tuple[float, ...], predicted: float) -> list[Lines]:
    """Return one value for each of the last steps, and the prediction as a limit; nothing for fewer than two steps."""
    if len(run.last.numbers) < 2:
        return []
    return [
        Lines(
            title=title,
            x_name="step number",
            x_unit="count",
            unit=unit,
            x=tuple(map(float, run.last.numbers)),
            series=(ValueSeries(name="measured", values=values),),
            limits={"predicted": float(predicted)},
        )
    ]
