"""Prints a plan: what it is, whether it fits, and where the bytes and seconds go."""

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.recipe.request import Request
from trimaran.app.show.text_chart import GREEN, RED, SKY
from trimaran.core import Plan, Prediction, show_bytes, show_count, show_seconds
from trimaran.core.plan import KindPrediction
from trimaran.machine import Cluster
from trimaran.models import Outline
from trimaran.planner import explain

BAR_CELLS = 28
WIDE_COLUMNS = 110
MIN_SHOWN_FRACTION = 0.001  # of the communication


def show_plan(request: Request, console: Console) -> None:
    """Print the plan of `request` and its prediction, term by term, the longest bar first."""
    facts = facts_table()
    facts.add_row("run", Text(request.recipe.name, style="bold"))
    facts.add_row("cluster", str(request.cluster))
    add_model(facts, request.outline)
    add_plan(facts, request.plan, request.cluster, unit=unit_of(request.outline))
    console.print(facts)
    show_terms(request.plan, console)


def facts_table() -> Table:
    """Return an empty table of names and facts."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    return facts


def add_model(facts: Table, outline: Outline | None) -> None:
    """Add the network, and its towers if it has several."""
    if outline is None:
        return
    facts.add_row("model", f"{outline.name}, {show_count(outline.num_parameters)} parameters")
    if outline.code:
        facts.add_row("code", outline.code)
    if len(outline.towers) > 1:
        towers = [
            f"{each.name} {show_count(each.parameters)}{' frozen' if each.frozen else ''}" for each in outline.towers
        ]
        facts.add_row("towers", ", ".join(towers))
    if adapter := outline.adapter:
        kind = "DoRA" if adapter.has_magnitude else "LoRA"
        base = "; the frozen weights are 4-bit" if adapter.is_4bit else ""
        trained = f"{show_count(outline.trained_parameters)} parameters are trained"
        facts.add_row("adapter", f"{kind} of rank {adapter.rank} on {', '.join(adapter.targets)}: {trained}{base}")


def unit_of(outline: Outline | None) -> str:
    """Return the unit of throughput: tokens, or positions if a sample has a fixed number of them, or samples if one."""
    fixed = outline.main.positions if outline else 0
    return {0: "tokens", 1: "samples"}.get(fixed, "positions")


def add_plan(facts: Table, plan: Plan, cluster: Cluster, *, unit: str) -> None:
    """Add the plan and its cost: whether it fits, how fast it is, and the error of the prediction."""
    facts.add_row("plan", Text(str(plan), style="bold"))
    for name, own in plan.towers.items():
        parts = [f"tp {own.tp}"] * (own.tp is not None)
        parts += [f"shard {own.sharding}"] * (own.sharding is not None)
        parts += [f"recompute {own.recompute}"] * (own.recompute is not None)
        facts.add_row("", f"{name}: {', '.join(parts)}")
    if plan.mesh.pp > 1:
        facts.add_row("stages", _stages(plan))
    if plan.reduces_after_backward and plan.captures_steps:
        when = "after backward, not during it (plan.comm.overlap: false)"
        facts.add_row("gradients", f"summed {when}, so that CUDA graphs launch forward and backward")
    if prediction := plan.prediction:
        _add_cost(facts, prediction, cluster, unit)


def show_terms(plan: Plan, console: Console) -> None:
    """Print where the plan's bytes and seconds go, as bars."""
    terms = explain(plan)
    exposed = plan.prediction.exposed if plan.prediction else {}
    for title, rows, show in (
        ("peak memory of one device", terms.memory, show_bytes),
        ("time of one step", terms.time, show_seconds),
    ):
        table = _term_table()
        for row in rows:
            bar = Bar(rows[0].value, 0, row.value, width=BAR_CELLS, color=SKY)
            meaning = [row.meaning] if console.width >= WIDE_COLUMNS else []
            table.add_row(row.term, bar, show(row.value), f"{row.fraction:.0%}", *meaning)
        if rows:
            console.print(Text(f"\n{title}", style="dim"))
            console.print(table)
    least = MIN_SHOWN_FRACTION * sum(exposed.values())
    waits = sorted(((seconds, what) for what, seconds in exposed.items() if seconds > least), reverse=True)
    if waits:
        parts = ", ".join(f"{what} {show_seconds(seconds)}" for seconds, what in waits)
        console.print(Text(f"comm is {parts}", style="dim"))


def occupancy(prediction: Prediction, cluster: Cluster) -> float:
    """Return the fraction of a device's memory that the plan uses."""
    return prediction.device_bytes / (prediction.memory_limit or cluster.device.memory_bytes)


def _stages(plan: Plan) -> str:
    counts = plan.pipeline.stages
    stages = f"{', '.join(map(str, counts))} layers" if 0 < len(counts) <= 16 else f"{plan.num_stages}"
    return f"{stages}, theoretical bubble {plan.bubble:.0%}"


def _add_cost(facts: Table, prediction: Prediction, cluster: Cluster, unit: str) -> None:
    verdict = Text("fits", style=GREEN) if prediction.fits else Text("does not fit", style=f"bold {RED}")
    # device_bytes: tensors, the allocator's reserve, the CUDA context and the collectives' buffers.
    size = prediction.memory_limit or cluster.device.memory_bytes
    full = f"{show_bytes(prediction.device_bytes)} of {show_bytes(size)} a device"
    fraction = f" ({occupancy(prediction, cluster):.0%}), "
    facts.add_row("memory", Text.assemble(full, fraction, verdict, f"; tensors {show_bytes(prediction.peak_bytes)}"))
    for kind in prediction.kinds:
        facts.add_row("", _kind_text(kind))
    if prediction.host_bytes:
        facts.add_row("host", f"{show_bytes(prediction.host_bytes)} of {show_bytes(cluster.host_bytes)} a node, pinned")
    if prediction.disk_bytes:
        facts.add_row("disk", f"{show_bytes(prediction.disk_bytes)} a node, in files")
    speed = f"{show_seconds(prediction.step_seconds)} a step, {show_count(prediction.tokens_per_second)} {unit}/s"
    facts.add_row("speed", f"{speed}, mfu {prediction.mfu:.0%}" if prediction.mfu_is_known else speed)
    memory = "" if prediction.memory_error is None else f" of a step, ±{prediction.memory_error:.0%} of memory"
    source = f"; {prediction.source}" if prediction.source else ""
    facts.add_row("error", f"±{prediction.error:.0%}{memory}{source}")


def _kind_text(kind: KindPrediction) -> str:
    """Return what the ranks of one kind of device do in a step, and what they need for it."""
    fewest, most = kind.layers
    layers = f"{most} layers" if fewest == most else f"{fewest} to {most} layers"
    busy = f"busy for {show_seconds(kind.busy_seconds)} of a step"
    memory = f"{show_bytes(kind.device_bytes)} of {show_bytes(kind.memory_bytes)}"
    rows = "1 row" if kind.rows == 1 else f"{kind.rows} rows"
    return f"{kind.ranks} x {kind.device}: {rows} and {layers} each, {busy}, {memory}"


def _term_table() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=11, no_wrap=True)
    table.add_column(width=BAR_CELLS, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(style="dim")  # the only column that may wrap, so that numbers stay complete
    return table
