"""Prints a simulated job, and returns it for `--json`."""

from collections import Counter
from itertools import pairwise
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.plan.plan_view import add_model, facts_table
from trimaran.app.plan.simulate_request import SimulateRequest
from trimaran.app.show.text_chart import GREEN
from trimaran.core import show_count, show_seconds
from trimaran.cost import ACTIVITIES, Simulation, Worth
from trimaran.cost.simulate.simulation import NODE_DISK_BANDWIDTH

MAX_SHOWN_CAUSES = 4


def show_simulation(request: SimulateRequest, simulation: Simulation, console: Console) -> None:
    """Print the answer: the steps, the job, where its time goes, and what spares and checkpoints are worth."""
    facts, terms, sample = facts_table(), simulation.terms, simulation.sample
    facts.add_row("run", Text(request.question.recipe.name, style="bold"))
    add_model(facts, request.question.outline)
    facts.add_row("plan", str(simulation.plan))
    for note in request.notes:
        facts.add_row("note", note)
    facts.add_row("cluster", f"{simulation.cluster}, and {terms.spares:,} spare nodes")
    mfu = f", mfu {simulation.mfu:.1%}" if simulation.mfu else ""
    bubble = f"; the pipeline waits {simulation.step.bubble:.1%}" if simulation.plan.mesh.pp > 1 else ""
    facts.add_row("step", f"{show_seconds(sample.mean)} on average{mfu}; "
                  f"{show_seconds(simulation.step.seconds)} if all nodes were equal, "
                  f"99% below {show_seconds(sample.quantile(0.99))}{bubble}")  # fmt: skip
    facts.add_row("goodput", Text(f"{simulation.goodput:.1%} of {simulation.scenario.days:g} days", style="bold")
                  .append(f" (± {simulation.goodput_error:.1%}): {simulation.steps:,.0f} steps, "
                          f"{show_count(_tokens(request, simulation))} tokens", style="not bold"))  # fmt: skip
    failures = fmean(sum(each.by_cause.values()) for each in simulation.histories)
    facts.add_row("failures", f"{failures:,.0f}, one every {show_seconds(terms.mtbf)}: {_causes(simulation)}")
    if simulation.mttr:
        facts.add_row("MTTR", f"{show_seconds(simulation.mttr)} from a failure to the first new step")
    facts.add_row("checkpoint", f"every {terms.save.every:,} steps ({show_seconds(terms.save.every * sample.mean)}): "
                  f"stops training for {show_seconds(terms.save.stall)}, complete after "
                  f"{show_seconds(terms.save.write)} more")  # fmt: skip
    facts.add_row("assumed", f"a restart takes {show_seconds(terms.restart)}, a repair {show_seconds(terms.repair)}; "
                  f"failures as in the Llama 3 run{_scaled(simulation)}; a node writes "
                  f"{NODE_DISK_BANDWIDTH / 1e9:g} GB/s; one node in {1 / terms.slow.per_node_second / 86400:,.0f} "
                  f"becomes {terms.slow.factor - 1:.0%} slower a day, until {show_seconds(terms.slow.seconds)} "
                  "later")  # fmt: skip
    console.print(facts)
    console.print(Text("\nwhere the time goes", style="bold"))
    console.print(_activities(simulation))
    console.print(Text("\nwhat a spare node is worth", style="bold"))
    console.print(_spares(simulation))
    console.print(Text("\nwhat the checkpoint interval is worth", style="bold"))
    console.print(_intervals(simulation))


def _tokens(request: SimulateRequest, simulation: Simulation) -> float:
    question = request.question
    assert question.outline is not None, "a model that is not known is refused"
    positions = question.outline.main.sample_positions(question.recipe.data.seq_len)[0]
    return simulation.steps * simulation.plan.global_batch * positions


def _causes(simulation: Simulation) -> str:
    counts = Counter[str]()
    for history in simulation.histories:
        counts.update(history.by_cause)
    runs, shown = len(simulation.histories), counts.most_common(MAX_SHOWN_CAUSES)
    rest = counts.total() - sum(count for _, count in shown)
    texts = [f"{name} {count / runs:,.0f}" for name, count in shown]
    return ", ".join([*texts, f"others {rest / runs:,.0f}"] if rest else texts) or "none"


def _scaled(simulation: Simulation) -> str:
    scale = simulation.terms.failure_scale
    return "" if scale == 1 else f" x {scale:.3g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _activities(simulation: Simulation) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for activity in ACTIVITIES:
        fraction = fmean(each.by_activity[activity] / each.seconds for each in simulation.histories)
        table.add_row(activity, f"{fraction:.2%}")
    return table


def _spares(simulation: Simulation) -> Table:
    """Return the goodput by number of spares; a gain in nodes compares a spare with a node that trains."""
    table = _table("spares", "goodput", "±", "per spare more", "as nodes that train")
    nodes = simulation.terms.num_devices / simulation.terms.devices_per_node
    for worth, gain in gains_of(simulation.spares):
        cells = [f"{gain:+.3%}", f"{gain * nodes:+.2f}"] if gain is not None else ["", ""]
        style = f"bold {GREEN}" if worth.value == simulation.terms.spares else ""
        table.add_row(f"{worth.value:,}", f"{worth.goodput:.2%}", f"{worth.error:.2%}", *cells, style=style)
    return table


def _intervals(simulation: Simulation) -> Table:
    table = _table("steps", "seconds", "goodput", "±")
    for worth in simulation.intervals:
        style = f"bold {GREEN}" if worth.value == simulation.terms.save.every else ""
        seconds = show_seconds(worth.value * simulation.sample.mean)
        table.add_row(f"{worth.value:,}", seconds, f"{worth.goodput:.2%}", f"{worth.error:.2%}", style=style)
    return table


def gains_of(worths: tuple[Worth, ...]) -> list[tuple[Worth, float | None]]:
    """Return each with the goodput that one more is worth, compared with the entry before; None for the first."""
    pairs = pairwise(worths)
    return [(worths[0], None), *((there, (there.goodput - here.goodput) / (there.value - here.value))
                                 for here, there in pairs)]  # fmt: skip


def simulation_as_dict(request: SimulateRequest, simulation: Simulation) -> dict[str, Any]:
    """Return what `--json` prints. Times are seconds, fractions are of the job's time."""
    sample, terms, histories = simulation.sample, simulation.terms, simulation.histories
    counts = Counter[str]()
    for history in histories:
        counts.update(history.by_cause)
    return {
        "name": request.question.recipe.name,
        "cluster": str(simulation.cluster),
        "plan": simulation.plan.model_dump(mode="json"),
        "notes": list(request.notes),
        "days": simulation.scenario.days,
        "seed": simulation.scenario.seed,
        "runs": simulation.scenario.runs,
        "step": {
            "equal_nodes": simulation.step.seconds, "mean": sample.mean,
            "quantiles": {f"{each:g}": sample.quantile(each) for each in (0.01, 0.1, 0.5, 0.9, 0.99)},
            "mfu": simulation.mfu or None, "bubble": simulation.step.bubble,
        },
        "goodput": simulation.goodput,
        "goodput_error": simulation.goodput_error,
        "steps": simulation.steps,
        "tokens": _tokens(request, simulation),
        "mttr": simulation.mttr,
        "mtbf": terms.mtbf,
        "failures": {name: count / len(histories) for name, count in counts.most_common()},
        "time": {name: fmean(each.by_activity[name] / each.seconds for each in histories) for name in ACTIVITIES},
        "checkpoint": {"steps": terms.save.every, "stall": terms.save.stall, "write": terms.save.write},
        "spares": terms.spares,
        "spares_worth": [each._asdict() | {"per_spare": gain} for each, gain in gains_of(simulation.spares)],
        "intervals_worth": [
            each._asdict() | {"seconds": each.value * sample.mean} for each in simulation.intervals
        ],
        "assumed": {
            "restart": terms.restart, "replace": terms.replace, "repair": terms.repair,
            "failure_scale": terms.failure_scale, "planned_per_day": terms.planned_per_second * 86400,
            "slow_node": {"days": 1 / terms.slow.per_node_second / 86400, "factor": terms.slow.factor,
                          "seconds": terms.slow.seconds},
            "node_jitter": simulation.scenario.jitter, "node_disk_bytes_per_second": NODE_DISK_BANDWIDTH,
        },
    }  # fmt: skip
