"""Figures of views as markup: axes with round ticks, legends, and nothing that the page's policy refuses."""

import itertools
import re

import pytest

from trimaran.ui import (
    Bars,
    FigureAxis,
    FileText,
    GraphArrow,
    GraphNode,
    Lines,
    Matrix,
    NodeGraph,
    Point,
    Scatter,
    Span,
    Timeline,
    Unit,
    ValueSeries,
    axis_for,
    draw_figure,
    tick_label,
)


def labels_of(low: float, high: float, unit: Unit, *, log: bool = False) -> list[str]:
    return [tick.label for tick in FigureAxis(low, high, unit, log).ticks()]


def test_ticks_are_round_in_the_unit_of_the_axis() -> None:
    assert labels_of(0, 43.2, "seconds") == ["0 s", "10 s", "20 s", "30 s", "40 s"]
    assert labels_of(0, 0.0031, "seconds") == ["0 s", "1 ms", "2 ms", "3 ms"]
    assert labels_of(0, 80 * 2**30, "bytes") == ["0 B", "20 GiB", "40 GiB", "60 GiB", "80 GiB"]
    assert labels_of(1, 1024, "count", log=True) == ["1", "8", "64", "512"]
    assert labels_of(1, 1000, "count", log=True) == ["1", "10", "100", "1,000"]
    assert labels_of(1e-5, 1e-1, "seconds", log=True) == ["10 us", "100 us", "1 ms", "10 ms", "100 ms"]
    assert labels_of(0, 1, "fraction") == ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert tick_label(7200, "seconds") == "2 h 00 min"


@pytest.mark.parametrize("values", [[0.0], [5.0, 5.0], [1e-9, 3e12], [0.2, 0.21], [-3.0, 4.0], []])
def test_every_value_is_on_its_axis_between_the_ends(values: list[float]) -> None:
    units: tuple[Unit, ...] = ("bytes", "seconds", "count", "fraction", "bytes/second", "")
    for unit, log in itertools.product(units, (True, False)):
        axis = axis_for(values, unit, log=log)
        assert axis.high > axis.low
        ticks = axis.ticks()
        assert 1 <= len(ticks) <= 12
        assert all(0 <= tick.at <= 1 for tick in ticks)
        if not axis.log:
            assert all(axis.low <= value <= axis.high * (1 + 1e-9) for value in values)


FIGURES = {
    "lines": Lines(title="t <b>", x_name="ranks", x_unit="count", unit="bytes", x=(1.0, 10.0, 100.0), log_x=True,
                   series=(ValueSeries(name="a&b", values=(1.0, 2.0, None)),), limits={"device": 3.0}),
    "scatter": Scatter(title="t", x_name="memory", x_unit="bytes", y_name="step", y_unit="seconds", x_limit=9e9,
                       limit_name="H100", points=(Point(name="<p>", x=5e9, y=1.0, kind="fits", note="n"),)),
    "timeline": Timeline(title="t", unit="seconds", rows=("r",), x_name="time", spans=(
        Span(row=0, start=0.0, end=2.0, label="long", kind="forward"),
        Span(row=0, start=3.0, end=3.0, label="moment", kind="save"))),
    "bars": Bars(title="t", unit="bytes", categories=("c",), limits={"H100": 4.0}, series=(
        ValueSeries(name="x", values=(1.0,)), ValueSeries(name="y", values=(None,)))),
    "matrix": Matrix(title="t", rows=("r",), columns=("c", "d"), labels=(("1", "2"),), heat=((0.5, None),)),
    "graph": NodeGraph(title="t", nodes=(GraphNode(name="0", x=0, y=0), GraphNode(name="1", x=1, y=1)),
                       arrows=(GraphArrow(source=0, target=1, text="3"),)),
    "file": FileText(title="t", content="a <script>\nb"),
}  # fmt: skip


def test_texts_of_figures_are_escaped() -> None:
    markup = "".join(draw_figure(figure) for figure in FIGURES.values())  # type: ignore[arg-type]
    assert "<script" not in markup
    assert "<b>" not in markup


def test_axes_have_names_ticks_and_limits() -> None:
    lines = draw_figure(FIGURES["lines"])  # type: ignore[arg-type]
    assert re.findall(r">([\d,]+)</text>", lines) == ["1", "10", "100"]
    assert "ranks →" in lines
    assert "device 3 B" in lines
    scatter = draw_figure(FIGURES["scatter"])  # type: ignore[arg-type]
    assert "↑ step" in scatter
    assert "memory →" in scatter
    assert "H100 8.4 GiB" in scatter
    timeline = draw_figure(FIGURES["timeline"])  # type: ignore[arg-type]
    assert "moment: 3.0 s" in timeline
    assert ">2 s<" in timeline
    assert "heat-5" in draw_figure(FIGURES["matrix"])  # type: ignore[arg-type]
