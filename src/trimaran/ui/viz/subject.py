"""What a view is about: a job, its cluster and plan, and what a run of it has measured."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trimaran.core import Plan, Prediction, UserError, show_count
from trimaran.cost import Job, predict
from trimaran.machine import Cluster, CommResult
from trimaran.planner import Question
from trimaran.ui.language import say
from trimaran.ui.viz.figures import Control


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
    """What a run has measured so far: medians over its last steps, and the peak of its fullest rank.

    `stage_seconds` and `stage_layers` are of the stages of a pipeline, for one micro-batch. `ranks` compares all ranks,
    by measure. `slowest` is in how many of the measured steps each rank was the slowest, by rank.
    """

    name: str
    steps: int
    step_seconds: float
    peak_bytes: float
    tokens_per_second: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    comm_seconds: Mapping[str, float] = field(default_factory=dict)
    stage_seconds: tuple[float, ...] = ()
    stage_layers: tuple[int, ...] = ()
    ranks: Mapping[str, RankSpread] = field(default_factory=dict)
    slowest: Mapping[int, int] = field(default_factory=dict)
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
    """A model and its data, the cluster, and the plan. `settings` are the values that a user gave to controls.

    `comm` are collectives that `trimaran bench comm` measured. `kept` are answers of the planner, which take long, by
    what was asked; copies of the subject with other settings share them.
    """

    question: Question
    cluster: Cluster
    plan: Plan
    run: RunMedians | None = None
    life: RunLife | None = None
    launches: Launches = field(default_factory=dict)
    comm: CommResult | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
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
                raise UserError("V002", f"{name} is '{text[:40]}', which is not a number from {least:g} to {most:g}",
                                where=f"the view {self._view}", fix=f"--with {name}={default:g}")  # fmt: skip
        self._read.append(
            Control(name=name, label=label, kind="number", value=value, least=least, most=most, step=step, log=log)
        )
        return value

    def whole(self, name: str, label: str, default: int, *, least: int, most: int, log: bool = False) -> int:
        return round(self.number(name, label, default, least=least, most=most, log=log, step=1.0))

    def choice(self, name: str, label: str, default: str, options: tuple[str, ...]) -> str:
        value = self._settings.pop(name, default)
        if value not in options:
            raise UserError("V002", f"{name} is '{value[:40]}', which is none of {', '.join(options)}",
                            where=f"the view {self._view}", fix=f"--with {name}={default}")  # fmt: skip
        self._read.append(Control(name=name, label=label, kind="choice", value=value, options=options))
        return value

    def done(self) -> tuple[Control, ...]:
        """Return all controls; raise if a setting is none of them."""
        if self._settings:
            names = ", ".join(each.name for each in self._read) or "none"
            raise UserError("V003", f"the view {self._view} has no control '{next(iter(self._settings))[:40]}'",
                            where="--with", fix=f"its controls are {names}")  # fmt: skip
        return tuple(self._read)
