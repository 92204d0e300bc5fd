"""What a view consists of, as data: sentences, formulas, figures. The terminal and the pages draw the same."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trimaran.core import show_bytes, show_count, show_seconds

Unit = Literal["bytes", "seconds", "bytes/second", "count", "fraction", "currency", "",
               "number", "share", "bytes/s", "W", "C", "step", "tokens"]  # fmt: skip
"""Units of views, then those that only reports have."""

ModeName = Literal["explain", "simulate", "live"]
ControlKind = Literal["number", "choice"]


@dataclass(frozen=True, slots=True)
class Formula:
    """A quantity, how it is computed in symbols, the same with the numbers of this subject, and its value."""

    name: str
    symbols: str
    numbers: str
    value: float
    unit: Unit


@dataclass(frozen=True, slots=True)
class ValueSeries:
    """Values with one name, one for each category or position of the x axis; None where there is none.

    A line of a report has positions of its own, `at`, and a CSS class of `page.css`, `color`; with `upper` it is a band
    from `values` up to there. One without a name is neither in the legend nor shown under the pointer.
    """

    name: str
    values: Sequence[float | None]
    at: Sequence[float] = ()
    upper: Sequence[float] = ()
    color: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """One bar for each category, stacked from the series. `limits` are lines across all bars, by name."""

    title: str
    unit: Unit
    categories: tuple[str, ...]
    series: tuple[ValueSeries, ...]
    limits: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event at one position of the x axis of a report."""

    at: float
    kind: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Lines over a common x axis. `dots`: names of series that are drawn as points, such as measured ones.

    `limits` are horizontal lines by name, such as what was predicted. Without `x_name` it is a plot of a report over
    steps, seconds or tokens: `stats` are names and values below it, a `broad` one takes a whole row, the parts of a
    `stacked` one are bands, and `log_y` counts only if the range is wide.
    """

    title: str
    unit: Unit
    series: Sequence[ValueSeries]
    x_name: str = ""
    x_unit: Unit = "step"
    x: tuple[float, ...] = ()
    log_x: bool = False
    log_y: bool = False
    dots: tuple[str, ...] = ()
    limits: Mapping[str, float] = field(default_factory=dict)
    marks: Sequence[Mark] = ()
    stats: Sequence[tuple[str, str]] = ()
    stacked: bool = False
    broad: bool = False


REPORT_FIELDS = {"at", "upper", "color", "marks", "stats", "stacked", "broad"}  # not in the JSON of a view


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point of a scatter plot. `kind` decides its colour; `note` is what it says when it is selected."""

    name: str
    x: float
    y: float
    kind: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scatter:
    """Points in two dimensions. `x_limit` is a line upwards, whose name is `limit_name`."""

    title: str
    x_name: str
    x_unit: Unit
    y_name: str
    y_unit: Unit
    points: tuple[Point, ...]
    x_limit: float | None = None
    limit_name: str = ""
    colors: Mapping[str, int] = field(default_factory=dict)  # of some kinds; the others follow in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something in a row of a timeline from `start` to `end`, or at one moment. `kind` decides its colour."""

    row: int
    start: float
    end: float
    label: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Rows of spans over time. `unit` is that of the time axis: seconds, or a count of equal steps."""

    title: str
    unit: Unit
    rows: tuple[str, ...]
    spans: tuple[Span, ...]
    x_name: str = "time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A table of cells with short labels. Cells with the same number in `colors` have the same colour."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    labels: tuple[tuple[str, ...], ...]
    colors: tuple[tuple[int, ...], ...] = ()
    heat: tuple[tuple[float | None, ...], ...] = ()  # a fraction for each cell, drawn as a shade


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphNode:
    """A node of a graph: its name, a text below it, and its place in a square from 0 to 1. `kind` is its colour."""

    name: str
    x: float
    y: float
    text: str = ""
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphArrow:
    """An arrow from one node to another, by their numbers, with a text beside it."""

    source: int
    target: int
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGraph:
    """Nodes, and arrows between them. A `wide` one is in a row, others in a square."""

    title: str
    nodes: tuple[GraphNode, ...]
    arrows: tuple[GraphArrow, ...]
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FileText:
    title: str
    content: str


Figure = Bars | Lines | Scatter | Timeline | Matrix | Table | NodeGraph | FileText


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A setting of a view that can be changed: a number in a range, or one of several options."""

    name: str
    label: str
    kind: ControlKind
    value: float | str
    options: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    step: float = 0.0  # the distance of two values of a number; 0: any
    log: bool = False  # a slider moves by factors


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One of the ways in which a view answers: explained, simulated, or as a run measures it."""

    sentences: tuple[str, ...] = ()
    formulas: tuple[Formula, ...] = ()
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """One view of one subject. `question` is what it answers; `about` says of which model, plan and cluster."""

    name: str
    title: str
    question: str
    about: str
    modes: Mapping[ModeName, Mode]
    controls: tuple[Control, ...] = ()


def as_modes(explain: Mode, simulate: Mode, live: Mode | None) -> dict[ModeName, Mode]:
    modes: dict[ModeName, Mode] = {"explain": explain, "simulate": simulate}
    if live is not None:
        modes["live"] = live
    return modes


def plain_bars(title: str, unit: Unit, name: str, values: Mapping[str, float]) -> Bars:
    series = ValueSeries(name=name, values=tuple(map(float, values.values())))
    return Bars(title=title, unit=unit, categories=tuple(values), series=(series,))


def stacked_bars(
    title: str, unit: Unit, parts: Mapping[str, Mapping[str, float]], limits: Mapping[str, float] | None = None
) -> Bars:
    terms = dict.fromkeys(term for each in parts.values() for term in each)
    return Bars(
        title=title,
        unit=unit,
        categories=tuple(parts),
        series=tuple(
            ValueSeries(name=term, values=tuple(float(each.get(term, 0.0)) for each in parts.values()))
            for term in terms
        ),
        limits=limits or {},
    )


def view_as_dict(view: PlanView) -> dict[str, Any]:
    tree = asdict(view, dict_factory=lambda pairs: {name: each for name, each in pairs if name not in REPORT_FIELDS})
    for name, mode in view.modes.items():
        kinds = [type(each).__name__.lower() for each in mode.figures]
        pairs = zip(kinds, tree["modes"][name]["figures"], strict=True)
        tree["modes"][name]["figures"] = [{"kind": kind} | figure for kind, figure in pairs]
    return tree


TIB = float(1 << 40)


def show_duration(seconds: float) -> str:
    """Return a time from microseconds to days: `35 us`, `1.2 ms`, `4.2 s`, `3 min 05 s`, `2.5 days`."""
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.3g} us" if seconds else "0 s"
    if size < 0.1:
        return f"{seconds * 1e3:.3g} ms"
    if size >= 172_800:
        return f"{seconds / 86_400:,.3g} days" if size < 8.64e7 else f"{seconds / 86_400:,.0f} days"
    return show_seconds(seconds)


def _bytes(value: float) -> str:
    return f"{value / TIB:,.1f} TiB" if abs(value) >= TIB else show_bytes(value)


SHOW: dict[str, Callable[[float], str]] = {
    "bytes": _bytes,
    "seconds": show_duration,
    "count": lambda value: f"{value:g}" if abs(value) < 1000 else show_count(value),
    "fraction": lambda value: f"{value:.1%}",
    "bytes/second": lambda value: f"{_bytes(value)}/s",
    "currency": lambda value: f"{value:,.0f}",
    "": lambda value: f"{value:g}",
}


def show_value(value: float | None, unit: Unit) -> str:
    return "" if value is None else SHOW[unit](value)
