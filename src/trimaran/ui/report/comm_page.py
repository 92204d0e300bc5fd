"""Measured collectives as one self-contained HTML page."""

from collections import Counter
from collections.abc import Callable, Sequence

from trimaran.app import describe_group, fit_cells, headline, notes, rate_unit, show_rate, show_time
from trimaran.core import show_bytes
from trimaran.machine import CommCurve, CommPoint, CommResult
from trimaran.ui.report.draw_figure import draw_figure
from trimaran.ui.report.markup import Html, html_document, table, tag
from trimaran.ui.viz.figures import Lines, Unit, ValueSeries

KINDS = {"all_reduce": "blue", "all_gather": "green", "reduce_scatter": "orange", "all_to_all": "purple",
         "broadcast": "sky", "send_recv": "red"}  # fmt: skip
Value = Callable[[CommCurve, CommPoint], float]
MIN_PLOTTED = 2  # points of a curve


def comm_page(result: CommResult, against: CommResult | None) -> str:
    groups = dict.fromkeys(each.group for each in result.curves)
    sections = [_group([each for each in result.curves if each.group == group], against) for group in groups]
    found = [tag("p", {"class": "why" if line.startswith(("WRONG", "slow")) else "quiet"}, line)
             for line in notes(result, against)]  # fmt: skip
    hosts = [f"{host} ({count} ranks)" if count > 1 else host for host, count in Counter(result.hosts).items()]
    where = tag("p", {"class": "quiet"}, f"measured on {result.date}; hosts: {', '.join(hosts)}")
    lead = tag("p", {"class": "lead"}, headline(result))
    head = tag("header", None, tag("h1", None, "Collectives"), lead, where, *found)
    if result.environment:
        lines = "\n".join(f"{name}={value}" for name, value in result.environment.items())
        sections.append(tag("section", None, tag("h2", None, "Variables of NCCL and gloo"), tag("pre", None, lines)))
    return html_document(f"Collectives: {result.device}", [head, *sections])


def _group(curves: Sequence[CommCurve], against: CommResult | None) -> Html:
    lines = [(each.collective.replace("_", "-"), KINDS[each.collective], each) for each in curves
             if len(each.points) >= MIN_PLOTTED]  # fmt: skip
    plots = [_plot("Bus bandwidth", "bytes/second", lines, CommCurve.bus_bandwidth),
             _plot("Time", "seconds", lines, lambda curve, point: point.seconds)]  # fmt: skip
    for each in curves:
        if against is not None and (other := against.find(each.group, each.collective)) is not None:
            title = f"{each.collective.replace('_', '-')}: bus bandwidth of both results"
            both = [("other", "grey", other), ("this", KINDS[each.collective], each)]
            plots.append(_plot(title, "bytes/second", both, CommCurve.bus_bandwidth))
    name, unit = rate_unit(curves)
    sizes = []
    for each in curves:
        for point in each.points:
            times = [show_time(took) for took in (point.seconds, point.median_seconds, point.max_seconds)]
            rates = [show_rate(rate, unit) for rate in (each.algorithm_bandwidth(point), each.bus_bandwidth(point))]
            kind = each.collective.replace("_", "-")
            sizes.append([kind, show_bytes(point.num_bytes), *times, *rates, f"{point.rounds}"])
    heads = ("collective", "size", "time", "median", "slowest round", f"algorithm {name}", f"bus {name}", "rounds")
    details = tag("details", None, tag("summary", None, "every size"), table(heads, sizes))
    title = tag("h2", None, describe_group(curves[0]))
    heads = ("collective", "latency", "±", f"bus {name}", "±", "best", "link", "planner expects", "residual")
    rows = []
    for each in curves:
        fit = each.fit()
        link = show_rate(each.link_gb_per_second * 1e9, unit) if each.link_gb_per_second else ""
        planned = show_rate(each.planned_gb_per_second * 1e9, unit) if each.planned_gb_per_second else ""
        rows.append([each.collective.replace("_", "-"), *fit_cells(fit, unit),
                     show_rate(each.best_bus_bandwidth, unit), link, planned,
                     f"{fit.residual:.0%}" if fit else ""])  # fmt: skip
    return tag("section", None, title, table(heads, rows), tag("div", {"class": "plots"}, *plots), details)


def _plot(title: str, unit: Unit, curves: Sequence[tuple[str, str, CommCurve]], value: Value) -> Html:
    series = [
        ValueSeries(name=name, color=color, at=[float(point.num_bytes) for point in each.points],
                    values=[value(each, point) for point in each.points])
        for name, color, each in curves
    ]  # fmt: skip
    if not series:
        return Html("")
    return draw_figure(
        Lines(title=title, x_name="size", x_unit="bytes", unit=unit, series=series, log_x=True, log_y=True)
    )
