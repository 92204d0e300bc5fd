"""The plots of a report, built from its facts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trimaran.ui.language import say
from trimaran.ui.report.figure_axis import SHOW
from trimaran.ui.report.markup import Html
from trimaran.ui.report.plot import Curve, Mark, Plot, draw

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
SPREAD_TITLES = {
    "busy_seconds": ("Compute per step", "seconds"),
    "wait_seconds": ("Waiting for other ranks", "seconds"),
    "data_seconds": ("Waiting for data", "seconds"),
    "peak_bytes": ("Peak memory", "bytes"),
    "tokens": ("Tokens per step", "count"),
}
MACHINE_TITLES = {
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
    """Return loss, gradient, throughput, memory, step time and learning rate over the steps, or only some of them."""
    curves, marks = facts["curves"], list(_marks(facts))
    expected = facts["prediction"] or {}

    def line(name: str, kind: str, label: str) -> list[Curve]:
        return _curves(curves[name], kind, say(label)) if name in curves else []

    def level(name: str) -> dict[str, float]:
        return {say("predicted"): expected[name]} if expected.get(name) else {}

    def stats(name: str, unit: str, levels: Mapping[str, float] | None = None) -> list[tuple[str, str]]:
        extremes = _extremes(curves[name], SHOW[unit]) if name in curves else []
        return [*extremes, *((label, SHOW[unit](value)) for label, value in (levels or {}).items())]

    memory = [*line("reserved", "orange", "reserved"), *line("allocated", "green", "allocated")]
    peak = line("peak_bytes", "blue", "peak")
    speed, seconds, size = map(level, ("tokens_per_second", "step_seconds", "peak_bytes"))
    if facts["unit"] != "tokens":  # for scenes the prediction counts positions
        speed = {}
    plots = {
        "loss": Plot(title=say("Loss"), unit="number", marks=marks, wide=True, stats=stats("loss", "number"),
                     curves=[*line("held_out", "dots", "held out"), *line("loss", "blue", "loss")]),
        "gradient": Plot(title=say("Gradient norm"), unit="number", may_log=True, marks=marks,
                         curves=line("grad_norm", "blue", "norm"), stats=stats("grad_norm", "number")),
        "speed": Plot(title=say(f"{facts['unit'].capitalize()} per second"), unit="count", marks=marks,
                      curves=line("tokens_per_second", "blue", "measured"), levels=speed,
                      stats=stats("tokens_per_second", "count", speed)),
        "time": Plot(title=say("Step time"), unit="seconds", may_log=True, marks=marks,
                     curves=line("step_seconds", "blue", "measured"), levels=seconds,
                     stats=stats("step_seconds", "seconds", seconds)),
        "memory": Plot(title=say("Memory of a rank"), unit="bytes", marks=marks, curves=[*memory, *peak], levels=size,
                       stats=stats("peak_bytes", "bytes", size)),
        "rate": Plot(title=say("Learning rate"), unit="number", curves=line("lr", "blue", "rate"),
                     stats=stats("lr", "number")),
    }  # fmt: skip
    return [draw(plots[name], may_zoom=may_zoom) for name in names]


def downsample_note(facts: Tree) -> str:
    """Return how to read downsampled curves; empty if none is downsampled."""
    is_downsampled = any("spread" in found for found in facts["curves"].values())
    note = "A line is the mean of neighbouring steps; the shade is their range, from minimum to maximum."
    return say(note) if is_downsampled else ""


def _curves(found: Tree, kind: str, label: str) -> list[Curve]:
    """Return a line; if it is downsampled, the line of the means and the band from minimum to maximum."""
    if "points" in found:
        return [Curve(name=label, kind=kind, points=found["points"])]
    lower, mean, upper = ([(row[0], row[each]) for row in found["spread"]] for each in (1, 2, 3))
    band = Curve(name="", kind=f"shade {kind}", points=lower, upper=upper)
    return [band, Curve(name=label, kind=kind, points=mean)]


def _extremes(found: Tree, show: Callable[[float], str]) -> list[tuple[str, str]]:
    """Return the first, last, smallest and largest value of a curve; one value if it never changes."""
    first, last, least, most = (found[name] for name in ("first", "last", "least", "most"))
    if least[1] == most[1]:
        return [(say("always"), show(first[1]))]
    return [
        (say("first"), show(first[1])),
        (say("last"), show(last[1])),
        (say("min"), say("{value} at {step}", value=show(least[1]), step=f"{least[0]:,.0f}")),
        (say("max"), say("{value} at {step}", value=show(most[1]), step=f"{most[0]:,.0f}")),
    ]


def phases_plot(facts: Tree) -> Html:
    """Return the phases of a step over time, stacked: their sum is the step time."""
    phases = facts["phases_over_time"]
    if not phases:
        return Html("")
    base, curves = [0.0] * len(phases["steps"]), []
    for name, values in phases["seconds"].items():
        top = [below + value for below, value in zip(base, values, strict=True)]
        lower, upper = (list(zip(phases["steps"], each, strict=True)) for each in (base, top))
        curves.append(Curve(name=say(name), kind=PHASE_KINDS[name], points=lower, upper=upper))
        base = top
    return draw(Plot(title=say("Phases of a step"), unit="seconds", curves=curves, stacked=True))


def spread_plots(facts: Tree) -> list[Html]:
    """Return the spread over ranks, a plot for each quantity that differs."""
    spreads = facts["ranks_over_time"].get("spreads", {})
    differing = [(SPREAD_TITLES[name], rows) for name, rows in spreads.items() if any(row[1] < row[3] for row in rows)]
    return [_band(say(title), unit, rows, (say("min to max"), say("median"))) for (title, unit), rows in differing]


def machine_plots(facts: Tree) -> list[Html]:
    """Return the samples of the machines over the time since the start of the run."""
    begin = facts["timeline"]["begin"]
    found = facts["machines_over_time"]
    rows = [(*MACHINE_TITLES[name], spreads) for name, spreads in found.items()]
    return [
        _band(say(title), unit, spreads, (say("min to max"), say("mean")), since=begin) for title, unit, spreads in rows
    ]


def _band(title: str, unit: str, rows: list[list[float]], names: tuple[str, str], since: float | None = None) -> Html:
    """Return a line with a band around it; a row is: position, minimum, middle, maximum."""
    lower, middle, upper = ([(row[0], row[each]) for row in rows] for each in (1, 2, 3))
    band = [Curve(name=names[0], kind="shade blue", points=lower, upper=upper)] if lower != upper else []
    line = Curve(name=names[1], kind="blue", points=middle)
    return draw(Plot(title=title, unit=unit, curves=[*band, line], since=since))


def _marks(facts: Tree) -> Iterator[Mark]:
    """Yield incidents, restarts and steps with NaN or Inf."""
    for incident in facts["incidents"][:200]:
        yield Mark(at=incident["step"], kind="red", label=f"{say('incident')}: {incident['id']} {incident['what']}")
    for before, after in zip(facts["timeline"]["attempts"], facts["timeline"]["attempts"][1:], strict=False):
        yield Mark(at=before["step"], kind="orange", label=f"{say('restart')}: {after['number']}")
    for step in facts["not_finite"]:
        yield Mark(at=step, kind="purple", label=f"{say('NaN or Inf')}: {step}")
