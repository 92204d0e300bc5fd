"""Prints a plan, whether it fits, where its bytes and seconds go, and the answer of `plan` with why others lost."""

from collections.abc import Iterable, Sequence

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trimaran.app.plan.history import short_path, show_date
from trimaran.app.plan.plan_answer import PlanReport
from trimaran.app.recipe.request import Request
from trimaran.app.show.clean_console import plain_table
from trimaran.app.show.text_chart import GREEN, ORANGE, RED, SKY
from trimaran.core import Plan, Prediction, show_bytes, show_count, show_rows, show_seconds
from trimaran.machine import Cluster
from trimaran.models import Outline
from trimaran.planner import TIE_RATIO, Question, explain

BAR_CELLS = 28
WIDE_COLUMNS = 110
MIN_SHOWN_FRACTION = 0.001  # of the communication
FULL_MEMORY_FRACTION = 0.88  # above this the allocator has to search for free blocks, and a step takes longer
MAX_SHOWN_MISSES, MAX_SHOWN_TIES = 6, 4


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
        counts = plan.pipeline.stages
        stages = f"{', '.join(map(str, counts))} layers" if 0 < len(counts) <= 16 else f"{plan.num_stages}"
        facts.add_row("stages", f"{stages}, theoretical bubble {plan.bubble:.0%}")
    if plan.reduces_after_backward and plan.captures_steps:
        when = "after backward, not during it (plan.comm.overlap: false)"
        facts.add_row("gradients", f"summed {when}, so that CUDA graphs launch forward and backward")
    if (prediction := plan.prediction) is None:
        return
    verdict = Text("fits", style=GREEN) if prediction.fits else Text("does not fit", style=f"bold {RED}")
    # device_bytes: tensors, the allocator's reserve, the CUDA context and the collectives' buffers.
    size = prediction.memory_limit or cluster.device.memory_bytes
    full = f"{show_bytes(prediction.device_bytes)} of {show_bytes(size)} a device"
    fraction = f" ({occupancy(prediction, cluster):.0%}), "
    facts.add_row("memory", Text.assemble(full, fraction, verdict, f"; tensors {show_bytes(prediction.peak_bytes)}"))
    for kind in prediction.kinds:
        fewest, most = kind.layers
        layers = f"{most} layers" if fewest == most else f"{fewest} to {most} layers"
        busy = f"busy for {show_seconds(kind.busy_seconds)} of a step"
        needed = f"{show_bytes(kind.device_bytes)} of {show_bytes(kind.memory_bytes)}"
        count = "1 row" if kind.rows == 1 else f"{kind.rows} rows"
        facts.add_row("", f"{kind.ranks} x {kind.device}: {count} and {layers} each, {busy}, {needed}")
    if prediction.host_bytes:
        facts.add_row("host", f"{show_bytes(prediction.host_bytes)} of {show_bytes(cluster.host_bytes)} a node, pinned")
    if prediction.disk_bytes:
        facts.add_row("disk", f"{show_bytes(prediction.disk_bytes)} a node, in files")
    speed = f"{show_seconds(prediction.step_seconds)} a step, {show_count(prediction.tokens_per_second)} {unit}/s"
    facts.add_row("speed", f"{speed}, mfu {prediction.mfu:.0%}" if prediction.mfu_is_known else speed)
    memory = "" if prediction.memory_error is None else f" of a step, ±{prediction.memory_error:.0%} of memory"
    source = f"; {prediction.source}" if prediction.source else ""
    facts.add_row("error", f"±{prediction.error:.0%}{memory}{source}")


def show_terms(plan: Plan, console: Console) -> None:
    """Print where the plan's bytes and seconds go, as bars."""
    terms = explain(plan)
    exposed = plan.prediction.exposed if plan.prediction else {}
    for title, rows, show in (
        ("peak memory of one device", terms.memory, show_bytes),
        ("time of one step", terms.time, show_seconds),
    ):
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=11, no_wrap=True)
        table.add_column(width=BAR_CELLS, no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(justify="right", style="dim", no_wrap=True)
        table.add_column(style="dim")  # the only column that may wrap, so that numbers stay complete
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


def show_report(report: PlanReport, console: Console, *, top: int) -> None:
    """Print the answer. If nothing fits, the plan with the least memory is shown instead of the best."""
    answer = report.answer
    shown = report.best or next((miss.plan for miss in answer.misses), None)
    question = report.request.question
    recipe, facts = question.recipe, facts_table()
    facts.add_row("run", recipe.name)
    add_model(facts, question.outline)
    idle = answer.question.cluster.world_size - answer.cluster.world_size
    facts.add_row("cluster", f"{answer.cluster}{f', {idle} of {question.cluster} stay idle' if idle else ''}")
    facts.add_row("step", _step(question))
    if rows := question.rows:
        facts.add_row("images", f"{rows.images:,.1f} images of {rows.patches:,.0f} patches in all a sequence, by the "
                      f"first {rows.num_samples:,} samples of the data")  # fmt: skip
    if shown:
        add_plan(facts, shown, answer.cluster, unit=unit_of(question.outline))
    if not answer.ranked:
        missing = answer.missing or f"{show_bytes(answer.missing_bytes)} a device"
        facts.add_row("missing", Text(missing, style=f"bold {RED}"))
        facts.add_row("smallest", f"{answer.smallest} is enough" if answer.smallest else "no number of them is enough")
    if found := report.reliability:
        spares = f"{found.spares} spare nodes, a checkpoint every {found.save_every:,} steps"
        facts.add_row("job", f"goodput {found.goodput:.1%} of weeks with failures, simulated: {spares}, "
                      f"MTTR {show_seconds(found.mttr)}")  # fmt: skip
    if report.measured:
        facts.add_row("measured", _measured(report, unit_of(question.outline)))
    for name, text in report.cost.rows if report.cost else ():
        facts.add_row(name, text)
    facts.add_row("searched", f"{answer.num_considered:,} plans")
    console.print(facts)
    if shown:
        show_terms(shown, console)
    if len(answer.ranked) > 1:
        _headline(console, _ranking_title(answer.ranked[:top], answer.question.goal))
        wide = console.width >= WIDE_COLUMNS
        table = plain_table()
        for column in ("mesh", "shard", "recompute", "loss", "offload") if wide else ("plan",):
            table.add_column(column)
        for column in ("batch", "memory", "step", f"{unit_of(answer.question.outline)}/s", "mfu"):
            table.add_column(column, justify="right", no_wrap=True)
        for plan in answer.ranked[:top]:
            how = (_mesh(plan), plan.sharding, _recompute(plan), plan.loss, plan.offload) if wide else (_short(plan),)
            style = f"bold {GREEN}" if plan is report.best else ""
            table.add_row(*(Text(word, style=style) for word in how), *_numbers(plan, answer.cluster))
        console.print(table)
    lost = [
        f"{_short(miss.plan)}, batch {_batch(miss.plan)}: {miss.why}"
        for miss in answer.misses
        if miss.plan is not shown
    ]
    ties = [f"{_short(tie.plan)}, batch {_batch(tie.plan)}: {tie.why}" for tie in answer.ties]
    _show_list(console, "ties, which the error bar does not tell from the chosen plan", ties[:MAX_SHOWN_TIES])
    _show_list(console, "why others lost", lost[:MAX_SHOWN_MISSES])
    _show_list(console, "communication settings that differ from the defaults", answer.choices)
    _show_list(console, "what would change the answer", answer.hints)
    for warning in answer.warnings:
        console.print(Text.assemble(("\nwarning  ", ORANGE), warning))
    emitted = report.emitted
    if emitted is None or emitted.folder is None:
        return
    _headline(console, f"written for {emitted.tool}")
    console.print(Text("\n".join(emitted.files)), soft_wrap=True)
    if emitted.loss:
        console.print(Text(f"not the best plan: {emitted.loss}", style=ORANGE), soft_wrap=True)
    for note in emitted.emission.notes:
        console.print(Text(f"- {note}", style="dim"), soft_wrap=True)


def _measured(report: PlanReport, unit: str) -> str:
    """Return what the fastest run of this model, size and cluster reached, beside what is predicted for the answer."""
    found, best = report.measured, report.best
    assert found is not None, "there is a measured plan"
    rate, run = show_count(found.measured.tokens_per_second), short_path(found.run.path)
    own = best.prediction.tokens_per_second if best and best.prediction else 0.0
    plan = "this plan" if report.is_measured else found.layout
    ending = f"; the planner's own is predicted at {show_count(own)}" if own and not report.is_measured else ""
    return f"{rate} {unit}/s with {plan}, run {run} of {show_date(found.run.time)}{ending}"


def _step(question: Question) -> str:
    """Return the size of an optimizer step: sequences of tokens, or samples if the network fixes the positions."""
    recipe, unit = question.recipe, unit_of(question.outline)
    length = question.outline.main.sample_positions(recipe.data.seq_len)[0] if question.outline else recipe.data.seq_len
    batch, what = recipe.train.global_batch, "sequences" if unit == "tokens" else "samples"
    if length == 1:  # a traced module has no positions to count
        return f"{batch:,} samples"
    return f"{batch:,} {what} of {length:,}: {show_count(batch * length)} {unit}"


def _ranking_title(plans: Sequence[Plan], goal: str) -> str:
    """Return the title of the table: how it is sorted. The first plan is the chosen one, maybe not the fastest."""
    if goal in ("memory", "goodput"):
        return f"the best {len(plans)} plans, {'least memory' if goal == 'memory' else 'most goodput'} first"
    seconds = [plan.prediction.step_seconds for plan in plans if plan.prediction]
    if seconds and seconds[0] > min(seconds):
        simplest = f"the simplest of those within {TIE_RATIO - 1:.0%} of the fastest"
        return f"the best {len(plans)} plans: the chosen one, {simplest}, then the others, fastest first"
    return f"the best {len(plans)} plans, fastest first"


def _numbers(plan: Plan, cluster: Cluster) -> list[Text]:
    cells = [Text(_batch(plan))]
    if (prediction := plan.prediction) is None:
        return cells
    full = occupancy(prediction, cluster)
    style = ORANGE if full > FULL_MEMORY_FRACTION else ""
    cells.append(Text(f"{show_bytes(prediction.device_bytes)} {full:.0%}", style=style))
    step, rate = show_seconds(prediction.step_seconds), show_count(prediction.tokens_per_second)
    return [*cells, *map(Text, (step, rate, f"{prediction.mfu:.0%}" if prediction.mfu_is_known else "-"))]


def _batch(plan: Plan) -> str:
    rows = f"({show_rows(plan.rows_by_rank)})" if plan.rows_by_rank else plan.micro_batch
    return f"{rows} x {plan.grad_accum}"


def _mesh(plan: Plan) -> str:
    return str(plan.mesh) + (f" {plan.pipeline.schedule}" if plan.mesh.pp > 1 else "")


def _recompute(plan: Plan) -> str:
    return plan.recompute if isinstance(plan.recompute, str) else f"every {plan.recompute}"


def _short(plan: Plan) -> str:
    parts = [_mesh(plan)]
    for name, value in (("shard", plan.sharding), ("recompute", _recompute(plan)), ("offload", plan.offload)):
        parts += [f"{name} {value}"] if value != "none" else []
    parts += ["gradients summed after backward"] if plan.reduces_after_backward else []
    return ", ".join(parts)


def _show_list(console: Console, title: str, lines: Iterable[str]) -> None:
    if lines := list(lines):
        _headline(console, title)
    for line in lines:
        console.print(Text(f"- {line}"), soft_wrap=True)


def _headline(console: Console, title: str) -> None:
    console.print(Text(f"\n{title}", style="dim"))
