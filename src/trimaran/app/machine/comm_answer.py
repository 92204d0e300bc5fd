"""The answer of `trimaran bench comm`: what it says about links, how it is shown, and what the planner gets of it."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.text import Text

from trimaran.app.show.clean_console import plain_table
from trimaran.app.show.text_chart import BLUE, GREEN, ORANGE, PURPLE, RED, SKY, curve
from trimaran.core import show_bytes
from trimaran.cost import NETWORK_HOP_FACTOR, REDUCE_HOP_FACTOR
from trimaran.machine import Calibration, Collectives, CommCurve, CommPair, CommResult, LinkFit, culprits, suspects
from trimaran.runs import finite_values

Tree = dict[str, Any]
RATES = {"all_reduce": "all_reduce", "all_gather": "all_gather", "all_to_all": "all_to_all", "send_recv": "send"}
MAX_BANDWIDTH_ERROR = 0.3  # of a fitted bandwidth that a calibration takes
COLORS = {"all_reduce": BLUE, "all_gather": GREEN, "reduce_scatter": ORANGE, "all_to_all": PURPLE, "broadcast": SKY,
          "send_recv": RED}  # fmt: skip
CHART_WIDTH, CHART_HEIGHT = 24, 5
MIN_GIGABYTES = 0.1  # a second: slower links are shown in MB/s
NOTABLE_CHANGE = 0.1  # of a bandwidth against an earlier result


def tree_of(result: CommResult) -> Tree:
    """Return the result with what follows from it: bandwidths, fits and outliers."""
    tree = result.model_dump(mode="json")
    for row, each in zip(tree["curves"], result.curves, strict=True):
        fit = each.fit()
        row["points"] = [
            {
                **point.model_dump(mode="json"),
                "algorithm_gb_per_second": each.algorithm_bandwidth(point) / 1e9,
                "bus_gb_per_second": each.bus_bandwidth(point) / 1e9,
            }
            for point in each.points
        ]
        row["fit"] = fit and {
            "alpha_us": fit.alpha_seconds * 1e6,
            "alpha_error_us": finite_values(fit.alpha_error_seconds * 1e6),
            "bus_gb_per_second": fit.bytes_per_second / 1e9,
            "bandwidth_error": finite_values(fit.bandwidth_error),
            "residual": fit.residual,
            "hop_us": fit.alpha_seconds * 1e6 / each.num_hops,
            "outlier_bytes": [round(size / each.bus_factor) for size in fit.outliers],
        }
    tree["outliers"] = [{"ranks": each.ranks, "factor": each.factor, "is_pair": each.is_pair,
                         "text": each.text(result.hosts)} for each in find_outliers(result.pairs)]  # fmt: skip
    return tree


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOutlier:
    """Ranks, or one pair of them, that are slower than the others, and how many times."""

    ranks: tuple[int, ...]
    factor: float
    is_pair: bool

    def text(self, hosts: Sequence[str]) -> str:
        names = [f"{rank} ({hosts[rank]})" if rank < len(hosts) else f"{rank}" for rank in self.ranks]
        if self.is_pair:
            return f"ranks {' and '.join(names)} are {self.factor:.1f} times slower together than other pairs"
        many = len(names) > 1
        return (f"rank{'s' if many else ''} {', '.join(names)} {'are' if many else 'is'} {self.factor:.1f} times "
                "slower with every partner than the other ranks")  # fmt: skip


def find_outliers(pairs: Sequence[CommPair]) -> list[CommOutlier]:
    """Return the slow ranks, or else the slow pairs. Pairs inside a node and across nodes are compared apart."""
    found: list[CommOutlier] = []
    for nodes in (1, 2):
        seconds = {each.ranks: each.seconds for each in pairs if each.nodes == nodes}
        slow = suspects(seconds)
        if not slow:
            continue
        usual = statistics.median([took for pair, took in seconds.items() if pair not in slow])
        bad = culprits(seconds, {})
        for rank in sorted(bad):
            took = statistics.median(took for pair, took in seconds.items() if rank in pair)
            found.append(CommOutlier(ranks=(rank,), factor=took / usual, is_pair=False))
        found += [CommOutlier(ranks=pair, factor=seconds[pair] / usual, is_pair=True)
                  for pair in sorted(slow) if not bad & set(pair)]  # fmt: skip
    return found


def calibrated(result: CommResult, earlier: Calibration | None) -> Calibration:
    """Return `earlier` with the measured links, without factors that runs fitted to these links before."""
    inside = _widest(result, between_nodes=False)
    network = _widest(result, between_nodes=True)
    update: dict[str, Any] = {"date": result.date, "device": result.device}
    names = set()
    for field, curves in (("collectives", inside), ("network", network)):
        measured = _collectives(curves, per_node=result.world_size // result.num_nodes) if curves else None
        if measured is not None:
            update[field] = measured
            names.add(curves[0].link)
    base = earlier or Calibration()
    if base.fitted is not None:
        links = {name: factors for name, factors in base.fitted.links.items() if name not in names}
        update["fitted"] = base.fitted.model_copy(update={"links": links})
    return Calibration.model_validate(base.model_copy(update=update).model_dump())


def _widest(result: CommResult, *, between_nodes: bool) -> list[CommCurve]:
    """Return the curves of the group with most ranks, inside a node or between nodes."""
    curves = [each for each in result.curves if (each.nodes > 1) == between_nodes]
    most = max((each.ranks for each in curves), default=0)
    group = next((each.group for each in curves if each.ranks == most), "")
    return [each for each in curves if each.group == group]


def _collectives(curves: Sequence[CommCurve], *, per_node: int) -> Collectives | None:
    """Return latency and bus bandwidths in the terms of the cost model; None if no bandwidth could be fitted."""
    fits = {each.collective: (each, fit) for each in curves if (fit := each.fit()) is not None}
    ranks, nodes = curves[0].ranks, curves[0].nodes
    rates: dict[str, float] = {}
    for name, field in RATES.items():
        if name in fits and fits[name][1].bandwidth_error <= MAX_BANDWIDTH_ERROR:
            rates[f"{field}_gb_per_second"] = fits[name][1].bytes_per_second / 1e9
    if nodes > 1 and "all_to_all_gb_per_second" in rates:
        # The cost model counts only what leaves the node; what stays inside it takes no time on this link.
        rates["all_to_all_gb_per_second"] *= (ranks - min(per_node, ranks - 1)) / (ranks - 1)
    # The latency of a hop of an all-gather; without one, from the next best collective.
    hops = {"all_gather": ranks - 1, "reduce_scatter": ranks - 1, "send_recv": 1,
            "all_reduce": 2 * (ranks - 1) * REDUCE_HOP_FACTOR, "all_to_all": ranks - 1, "broadcast": 1}  # fmt: skip
    best = next((name for name in hops if name in fits), None)
    if not rates or best is None:
        return None
    curve, fit = fits[best]
    hop = (fit.alpha_seconds or min(curve.points, key=lambda point: point.num_bytes).seconds) / hops[best]
    if hop <= 0:
        return None
    latency = hop / (NETWORK_HOP_FACTOR if nodes > 1 else 1.0)
    return Collectives(devices=ranks, latency_us=latency * 1e6, **rates)


def show_comm(result: CommResult, console: Console, *, against: CommResult | None = None) -> None:
    """Print the result, group by group."""
    console.print(Text(headline(result), style="bold"))
    for group in dict.fromkeys(each.group for each in result.curves):
        curves = [each for each in result.curves if each.group == group]
        console.print(Text(f"\n{describe_group(curves[0])}", style="bold"))
        name, unit = rate_unit(curves)
        table = plain_table("collective", "latency", "±", f"bus {name}", "±", "best", "planner's")
        table.columns[0].justify = "left"
        if against is not None:
            table.add_column("against", justify="right", no_wrap=True)
        for each in curves:
            fit = each.fit()
            planned = each.planned_gb_per_second
            other = against.find(each.group, each.collective) if against is not None else None
            old, ratio = other.fit() if other else None, Text("")
            if fit is not None and old is not None:
                change = fit.bytes_per_second / old.bytes_per_second - 1
                style = "" if abs(change) < NOTABLE_CHANGE else GREEN if change > 0 else RED
                ratio = Text(f"{change:+.0%}", style=style)
            cells = [
                *fit_cells(fit, unit),
                show_rate(each.best_bus_bandwidth, unit),
                show_rate(planned * 1e9, unit) if planned else "",
                *([ratio] if against is not None else []),
            ]
            table.add_row(Text(each.collective.replace("_", "-"), style=COLORS[each.collective]), *cells)
        console.print(table)
        console.print()
        console.print(Columns([_panel(each) for each in curves], padding=(0, 3)))
        table = plain_table(gap=1)
        table.add_column(f"bus {name}", no_wrap=True)
        for each in curves:
            table.add_column(each.collective.replace("_", "-"), justify="right", no_wrap=True)
        for size in sorted({point.num_bytes for each in curves for point in each.points}):
            cells = []
            for each in curves:
                point = next((point for point in each.points if point.num_bytes == size), None)
                cells.append(show_rate(each.bus_bandwidth(point), unit) if point else "")
            table.add_row(show_bytes(size), *cells)
        console.print(table)
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
        for name in ("device", "backend", "dtype", "world_size", "num_nodes", "torch", "nccl"):
            old, new = getattr(against, name), getattr(result, name)
            lines += [f"differs: {name} was {old or 'none'}, is {new or 'none'}"] if old != new else []
        for name in sorted({*against.environment, *result.environment}):
            old, new = against.environment.get(name), result.environment.get(name)
            lines += [f"differs: {name} was {old or 'not set'}, is {new or 'not set'}"] if old != new else []
    return lines


def fit_cells(fit: LinkFit | None, unit: float) -> list[str]:
    """Return latency and bandwidth with their errors as text; empty where nothing could be fitted."""
    if fit is None:
        return ["", "", "", ""]
    error = show_time(fit.alpha_error_seconds) if math.isfinite(fit.alpha_error_seconds) else ""
    bandwidth = f"{fit.bandwidth_error:.0%}" if math.isfinite(fit.bandwidth_error) else ""
    return [show_time(fit.alpha_seconds), error, show_rate(fit.bytes_per_second, unit), bandwidth]


def _panel(each: CommCurve) -> Group:
    values, (name, unit) = [each.bus_bandwidth(point) for point in each.points], rate_unit([each])
    lines = curve(values, width=CHART_WIDTH, height=CHART_HEIGHT)
    title = Text(each.collective.replace("_", "-"), style="bold")
    title.append(f"  up to {show_rate(max(values), unit)} {name}", style="dim")
    first, last = show_bytes(each.points[0].num_bytes), show_bytes(each.points[-1].num_bytes)
    axis = Text(first + last.rjust(max(CHART_WIDTH - len(first), len(last) + 1)), style="dim")
    return Group(title, *(Text(line, style=COLORS[each.collective]) for line in lines), axis)


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
