"""Prints what `trimaran bench comm` measured: fits, a curve for each collective, sizes, outliers, comparisons."""

import math
from collections.abc import Sequence

from rich.columns import Columns
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from trimaran.app.machine.comm_links import find_outliers
from trimaran.app.show.text_chart import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, curve
from trimaran.core import show_bytes
from trimaran.machine.comm_result import CommCurve, CommResult, LinkFit

COLORS = {"all_reduce": BLUE, "all_gather": GREEN, "reduce_scatter": ORANGE, "all_to_all": PURPLE, "broadcast": SKY,
          "send_recv": RED}  # fmt: skip
CHART_WIDTH, CHART_HEIGHT = 24, 5
MIN_GIGABYTES = 0.1  # a second: slower links are shown in MB/s
NOTABLE_CHANGE = 0.1  # of a bandwidth against an earlier result


def show_comm(result: CommResult, console: Console, *, against: CommResult | None = None) -> None:
    """Print the result, group by group."""
    console.print(Text(headline(result), style="bold"))
    for group in dict.fromkeys(each.group for each in result.curves):
        curves = [each for each in result.curves if each.group == group]
        console.print(Text(f"\n{describe_group(curves[0])}", style="bold"))
        console.print(_fit_table(curves, against))
        console.print()
        console.print(Columns([_panel(each) for each in curves], padding=(0, 3)))
        console.print(_size_table(curves))
    for line in notes(result, against):
        console.print(Text(line), soft_wrap=True)


def headline(result: CommResult) -> str:
    """Return the machine, the ranks and the versions in one line."""
    nodes = f"{result.num_nodes} nodes, " if result.num_nodes > 1 else ""
    versions = ", ".join([f"torch {result.torch}", *([f"NCCL {result.nccl}"] if result.nccl else [])])
    return f"{result.device}: {nodes}{result.world_size} ranks, {result.backend}, {result.dtype} ({versions})"


def describe_group(each: CommCurve) -> str:
    """Return `tp: 4 groups of 2 ranks at once, over loopback`."""
    many = f"{each.groups} groups of {each.ranks} ranks at once" if each.groups > 1 else f"{each.ranks} ranks"
    nodes = f" on {each.nodes} nodes" if each.nodes > 1 else ""
    return f"{each.group}: {many}{nodes}" + (f", over {each.link}" if each.link else "")


def notes(result: CommResult, against: CommResult | None) -> list[str]:
    """Return what deserves attention: wrong values, slow ranks, sizes without a time, changed variables."""
    lines = [f"WRONG: {each['collective']} of {each['group']} returned {each['values']} wrong values"
             for each in result.wrong]  # fmt: skip
    lines += [f"slow: {each.text(result.hosts)}" for each in find_outliers(result.pairs)]
    if result.skipped:
        least = min(each["bytes"] for each in result.skipped)
        curves = len({(each["group"], each["collective"]) for each in result.skipped})
        lines.append(f"not measured: sizes from {show_bytes(least)} in {curves} curves; give it more --seconds")
    if against is not None:
        lines += changed_variables(against, result)
    return lines


def changed_variables(before: CommResult, after: CommResult) -> list[str]:
    """Return how the variables of NCCL and gloo, the versions and the ranks differ."""
    lines = []
    for name in ("device", "backend", "dtype", "world_size", "num_nodes", "torch", "nccl"):
        old, new = getattr(before, name), getattr(after, name)
        lines += [f"differs: {name} was {old or 'none'}, is {new or 'none'}"] if old != new else []
    for name in sorted({*before.environment, *after.environment}):
        old, new = before.environment.get(name), after.environment.get(name)
        lines += [f"differs: {name} was {old or 'not set'}, is {new or 'not set'}"] if old != new else []
    return lines


def _fit_table(curves: Sequence[CommCurve], against: CommResult | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    compares, (name, unit) = against is not None, rate_unit(curves)
    columns = (
        "collective",
        "latency",
        "±",
        f"bus {name}",
        "±",
        "best",
        "planner's",
        *(["against"] if compares else []),
    )
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for each in curves:
        fit = each.fit()
        planned = each.planned_gb_per_second
        cells = [
            *fit_cells(fit, unit),
            show_rate(each.best_bus_bandwidth, unit),
            show_rate(planned * 1e9, unit) if planned else "",
            *([_change(each, fit, against)] if against is not None else []),
        ]
        table.add_row(Text(each.collective.replace("_", "-"), style=COLORS[each.collective]), *cells)
    return table


def fit_cells(fit: LinkFit | None, unit: float) -> list[str]:
    """Return latency and bandwidth with their errors as text; empty where nothing could be fitted."""
    if fit is None:
        return ["", "", "", ""]
    error = show_time(fit.alpha_error_seconds) if math.isfinite(fit.alpha_error_seconds) else ""
    bandwidth = f"{fit.bandwidth_error:.0%}" if math.isfinite(fit.bandwidth_error) else ""
    return [show_time(fit.alpha_seconds), error, show_rate(fit.bytes_per_second, unit), bandwidth]


def _change(each: CommCurve, fit: LinkFit | None, against: CommResult) -> Text:
    """Return how the fitted bandwidth compares with that of the other result."""
    other = against.find(each.group, each.collective)
    old = other.fit() if other else None
    if fit is None or old is None:
        return Text("")
    ratio = fit.bytes_per_second / old.bytes_per_second - 1
    style = "" if abs(ratio) < NOTABLE_CHANGE else GREEN if ratio > 0 else RED
    return Text(f"{ratio:+.0%}", style=style)


def _panel(each: CommCurve) -> Group:
    """Return the curve of bus bandwidth by size, with both ends of its axes."""
    values, (name, unit) = [each.bus_bandwidth(point) for point in each.points], rate_unit([each])
    lines = curve(values, width=CHART_WIDTH, height=CHART_HEIGHT)
    title = Text(each.collective.replace("_", "-"), style="bold")
    title.append(f"  up to {show_rate(max(values), unit)} {name}", style="dim")
    first, last = show_bytes(each.points[0].num_bytes), show_bytes(each.points[-1].num_bytes)
    axis = Text(first + last.rjust(max(CHART_WIDTH - len(first), len(last) + 1)), style="dim")
    return Group(title, *(Text(line, style=COLORS[each.collective]) for line in lines), axis)


def _size_table(curves: Sequence[CommCurve]) -> Table:
    """Return bus bandwidth by size and collective."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    name, unit = rate_unit(curves)
    table.add_column(f"bus {name}", no_wrap=True)
    for each in curves:
        table.add_column(each.collective.replace("_", "-"), justify="right", no_wrap=True)
    for size in sorted({point.num_bytes for each in curves for point in each.points}):
        cells = []
        for each in curves:
            point = next((point for point in each.points if point.num_bytes == size), None)
            cells.append(show_rate(each.bus_bandwidth(point), unit) if point else "")
        table.add_row(show_bytes(size), *cells)
    return table


def rate_unit(curves: Sequence[CommCurve]) -> tuple[str, float]:
    """Return the unit of bandwidths that suits these curves, and its bytes a second."""
    return ("GB/s", 1e9) if max(each.best_bus_bandwidth for each in curves) >= MIN_GIGABYTES * 1e9 else ("MB/s", 1e6)


def show_rate(bytes_per_second: float, unit: float = 1e9) -> str:
    """Return a bandwidth in `unit` with three digits."""
    rate = bytes_per_second / unit
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}" if rate >= 0.001 else f"{rate:.4f}"


def show_time(seconds: float) -> str:
    """Return a short time with three digits: `12.3 us`, `4.56 ms`."""
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
