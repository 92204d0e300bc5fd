"""The plots of a report, built from its facts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trimaran.ui.language import say
from trimaran.ui.report.draw_figure import draw_lines
from trimaran.ui.report.figure_axis import SHOW
from trimaran.ui.report.markup import Html
from trimaran.ui.viz.figures import Lines, Mark, Unit, ValueSeries

Tree = dict[str, Any]
PHASE_KINDS = {
    "data": "orange",
    "forward": "sky",
    "backward": "blue",
    "comm": "red",
    "optimizer": "green",
    "checkpoint": "purple",
}
STEP_PLOTS = ("loss", "gradient", "speed", "time", "memory", "rate")
SPREAD_TITLES: Mapping[str, tuple[str, Unit]] = {
    "busy_seconds": ("Compute per step", "seconds"),
    "wait_seconds": ("Waiting for other ranks", "seconds"),
    "data_seconds": ("Waiting for data", "seconds"),
    "peak_bytes": ("Peak memory", "bytes"),
    "tokens": ("Tokens per step", "count"),
}
MACHINE_TITLES: Mapping[str, tuple[str, Unit]] = {
    "cpu": ("CPU utilization", "share"),
    "ram": ("RAM in use", "share"),
    "disk_free": ("Free disk space of the run", "bytes"),
    "network": ("Network, sent and received", "bytes/s"),
    "gpu_utilisation": ("GPU utilization", "share"),
    "gpu_memory": ("GPU memory in use", "share"),
    "gpu_power": ("GPU power", "W"),
    "gpu_temperature": ("GPU temperature", "C"),
    "gpu_clock": ("GPU clock, of its maximum", "share"),
}


def step_plots(facts: Tree, *, names: Sequence[str] = STEP_PLOTS, may_zoom: bool = False) -> list[Html]:
    curves, marks = facts["curves"], list(_marks(facts))
    expected = facts["prediction"] or {}

    def line(name: str, color: str, label: str) -> list[ValueSeries]:
        return _series(curves[name], color, say(label)) if name in curves else []

    def level(name: str) -> dict[str, float]:
        return {say("predicted"): expected[name]} if expected.get(name) else {}

    def stats(name: str, unit: str, levels: Mapping[str, float] | None = None) -> list[tuple[str, str]]:
        found, show = [], SHOW[unit]
        if name in curves:
            first, last, least, most = (curves[name][each] for each in ("first", "last", "least", "most"))
            if least[1] == most[1]:
                found.append((say("always"), show(first[1])))
            else:
                found += [(say("first"), show(first[1])), (say("last"), show(last[1]))]
                found += [(say(label), say("{value} at {step}", value=show(value), step=f"{at:,.0f}"))
                          for label, (at, value) in (("min", least), ("max", most))]  # fmt: skip
        return [*found, *((label, show(value)) for label, value in (levels or {}).items())]

    memory = [*line("reserved", "orange", "reserved"), *line("allocated", "green", "allocated")]
    peak = line("peak_bytes", "blue", "peak")
    speed, seconds, size = map(level, ("tokens_per_second", "step_seconds", "peak_bytes"))
    if facts["unit"] != "tokens":  # for scenes the prediction counts positions
        speed = {}
    plots = {
        "loss": Lines(title=say("Loss"), unit="number", marks=marks, broad=True, stats=stats("loss", "number"),
                     series=[*line("held_out", "dots", "held out"), *line("loss", "blue", "loss")]),
        "gradient": Lines(title=say("Gradient norm"), unit="number", log_y=True, marks=marks,
                         series=line("grad_norm", "blue", "norm"), stats=stats("grad_norm", "number")),
        "speed": Lines(title=say(f"{facts['unit'].capitalize()} per second"), unit="count", marks=marks,
                      series=line("tokens_per_second", "blue", "measured"), limits=speed,
                      stats=stats("tokens_per_second", "count", speed)),
        "time": Lines(title=say("Step time"), unit="seconds", log_y=True, marks=marks,
                     series=line("step_seconds", "blue", "measured"), limits=seconds,
                     stats=stats("step_seconds", "seconds", seconds)),
        "memory": Lines(title=say("Memory of a rank"), unit="bytes", marks=marks, series=[*memory, *peak], limits=size,
                       stats=stats("peak_bytes", "bytes", size)),
        "rate": Lines(title=say("Learning rate"), unit="number", series=line("lr", "blue", "rate"),
                     stats=stats("lr", "number")),
    }  # fmt: skip
    return [draw_lines(plots[name], may_zoom=may_zoom) for name in names]


def downsample_note(facts: Tree) -> str:
    is_downsampled = any("spread" in found for found in facts["curves"].values())
    note = "A line is the mean of neighbouring steps; the shade is their range, from minimum to maximum."
    return say(note) if is_downsampled else ""


def _series(found: Tree, color: str, label: str) -> list[ValueSeries]:
    if "points" not in found:
        return _banded(found["spread"], color, ("", label))
    at, values = zip(*found["points"], strict=True)
    return [ValueSeries(name=label, color=color, at=at, values=values)]


def _banded(rows: Sequence[Sequence[float]], color: str, names: tuple[str, str]) -> list[ValueSeries]:
    """Return a band and the line in it; a row is: position, minimum, middle, maximum."""
    at, lower, middle, upper = zip(*rows, strict=True)
    band = ValueSeries(name=names[0], color=f"shade {color}", at=at, values=lower, upper=upper)
    return [*([band] if lower != upper else []), ValueSeries(name=names[1], color=color, at=at, values=middle)]


def phases_plot(facts: Tree) -> Html:
    phases = facts["phases_over_time"]
    if not phases:
        return Html("")
    base, parts = [0.0] * len(phases["steps"]), []
    for name, values in phases["seconds"].items():
        top = [below + value for below, value in zip(base, values, strict=True)]
        parts.append(ValueSeries(name=say(name), color=PHASE_KINDS[name], at=phases["steps"], values=base, upper=top))
        base = top
    return draw_lines(Lines(title=say("Phases of a step"), unit="seconds", series=parts, stacked=True))


def spread_plots(facts: Tree) -> list[Html]:
    names = say("min to max"), say("median")
    return [
        draw_lines(Lines(title=say(SPREAD_TITLES[name][0]), unit=SPREAD_TITLES[name][1],
                         series=_banded(rows, "blue", names)))
        for name, rows in facts["ranks_over_time"].get("spreads", {}).items()
        if any(row[1] < row[3] for row in rows)
    ]  # fmt: skip


def machine_plots(facts: Tree) -> list[Html]:
    begin, names = facts["timeline"]["begin"] or 0.0, (say("min to max"), say("mean"))
    return [
        draw_lines(Lines(title=say(MACHINE_TITLES[name][0]), unit=MACHINE_TITLES[name][1], x_unit="seconds",
                         series=_banded([(at - begin, *rest) for at, *rest in rows], "blue", names)))
        for name, rows in facts["machines_over_time"].items()
    ]  # fmt: skip


def _marks(facts: Tree) -> Iterator[Mark]:
    for incident in facts["incidents"][:200]:
        yield Mark(at=incident["step"], kind="red", label=f"{say('incident')}: {incident['id']} {incident['what']}")
    for before, after in zip(facts["timeline"]["attempts"], facts["timeline"]["attempts"][1:], strict=False):
        yield Mark(at=before["step"], kind="orange", label=f"{say('restart')}: {after['number']}")
    for step in facts["not_finite"]:
        yield Mark(at=step, kind="purple", label=f"{say('NaN or Inf')}: {step}")
