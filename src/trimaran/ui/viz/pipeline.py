"""Pipeline schedules: who computes which micro-batch when, the bubble, and how many micro-batches a rank holds."""

from typing import Literal, get_args

from trimaran.core import Plan
from trimaran.cost import Demands, Order, Schedule, StageCost, StepCosts, pipeline_order, simulate_step, step_costs_of
from trimaran.cost.simulate.step_costs import with_other_compute
from trimaran.cost.simulate.step_simulation import SimulatedStep
from trimaran.planner import MeasuredStages, balanced_cut, present_cut
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Bars, Formula, Mode, ModeName, Span, Timeline, as_modes, plain_bars, stacked_bars
from trimaran.ui.viz.subject import Controls, RunMedians, Subject

NAME = "PipelineParallelismVisualizer"
TITLE = "The pipeline, pass by pass"
QUESTION = "What does each rank of a pipeline compute when, how long does it wait, and what must it hold?"
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)
NO_NETWORK = Demands(card=0.0, ring_card=0.0, ring_uplink=0.0, send_card=0.0, send_uplink=0.0, ranks_per_pod=1)
MAX_SPANS = 4096
MAX_EXPLAINED = 16  # micro-batches of the first picture, unless more are asked for


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    plan = subject.plan
    has_pipeline = plan.mesh.pp > 1
    schedule = controls.choice("schedule", "schedule", plan.pipeline.schedule, SCHEDULES)
    ranks = controls.whole("ranks", "ranks of the pipeline", plan.mesh.pp if has_pipeline else 4, least=2, most=32)
    default = min(plan.grad_accum, MAX_EXPLAINED) if has_pipeline else 8
    count = controls.whole("micro_batches", "micro-batches of a step", default, least=1, most=128)
    rounds = controls.whole("rounds", "stages of each rank (interleaved)", 2, least=2, most=4)
    backward = controls.number("backward", "length of a backward, in forwards", 2.0, least=0.1, most=10)
    slow = controls.whole("slow_rank", "rank whose stages are slower", 0, least=0, most=31)
    factor = controls.number("slow_factor", "times as slow are its stages", 1.0, least=1, most=10)
    chosen: Schedule = next(each for each in SCHEDULES if each == schedule)
    costs = equal_stages(chosen, ranks, count, backward, rounds=rounds)
    if factor > 1:
        costs = with_slow_rank(costs, min(slow, ranks - 1), factor)
    step = simulate_step(costs)
    formulas = []
    if chosen in ("gpipe", "1f1b") and factor == 1:
        numbers, bubble = as_is(f"({ranks} - 1) / ({count} + {ranks} - 1)"), (ranks - 1) / (count + ranks - 1)
        formulas.append(Formula("bubble", "(p - 1) / (m + p - 1)", numbers, bubble, "fraction"))
    title = say("{schedule}: every pass of a step of {count} micro-batches", schedule=chosen, count=count)
    said, timeline = say("Ranks wait {bubble:.1%} of the time.", bubble=step.bubble), _timeline(step, title, "count")
    explained = Mode(sentences=(said,), formulas=tuple(formulas), figures=(timeline, _held(costs.order)))
    live = _live(subject, subject.run) if subject.run is not None else None
    return as_modes(explained, _simulate(subject), live)


def equal_stages(schedule: Schedule, ranks: int, micro_batches: int, backward: float, *, rounds: int = 2) -> StepCosts:
    """Return the costs of equal stages, in forwards of a rank, without communication; `rounds` are those of a rank."""
    num_stages = ranks * ({"interleaved": rounds, "zero-bubble": 2}.get(schedule, 1))
    order = pipeline_order(schedule, ranks=ranks, num_stages=num_stages, micro_batches=micro_batches)
    part = ranks / num_stages
    stages = (StageCost(forward=part, backward=part * backward),) * num_stages
    return StepCosts(
        order=order, stages=stages, send=(0.0,) * (num_stages - 1), overlap=0.0, update=0.0, demands=NO_NETWORK
    )


def with_slow_rank(costs: StepCosts, rank: int, factor: float) -> StepCosts:
    longer = [
        ((factor - 1) * stage.forward, (factor - 1) * stage.backward) if owner == rank else (0.0, 0.0)
        for stage, owner in zip(costs.stages, costs.order.rank_of_stage, strict=True)
    ]
    return with_other_compute(costs, longer)


def most_held(order: Order) -> list[int]:
    """Return for each rank the most micro-batches whose activations it holds at once, counted in its stages."""
    held = []
    for passes in order.passes:
        now = most = 0
        for each in passes:
            now += (each.kind == "forward") - (each.kind in ("backward", "weight_grad"))
            most = max(most, now)
        held.append(most)
    return held


def _simulate(subject: Subject) -> Mode:
    plan: Plan = subject.plan
    if plan.mesh.pp == 1:
        return Mode(sentences=("The plan has no pipeline (`plan.mesh.pp` is 1). See one with `--set plan.mesh.pp=4`.",))
    costs = step_costs_of(subject.job, subject.cluster, plan)
    step = simulate_step(costs)
    passes = {say("stage {stage}", stage=number): {"forward": each.forward, "backward": each.backward}
              for number, each in enumerate(costs.stages)}  # fmt: skip
    stages = stacked_bars("Time of a micro-batch by stage", "seconds", passes)
    slowest = max(range(len(costs.stages)), key=lambda at: costs.stages[at].forward + costs.stages[at].backward)
    said = say("Ranks wait {bubble:.1%} of the time. Stage {stage} is the slowest.", bubble=step.bubble, stage=slowest)
    title = say("A step of {count} micro-batches, {schedule}", count=plan.grad_accum, schedule=plan.pipeline.schedule)
    return Mode(sentences=(said,), figures=(_timeline(step, title, "seconds"), stages, _held(costs.order)))


def _live(subject: Subject, run: RunMedians) -> Mode:
    if subject.plan.mesh.pp == 1:
        return Mode(sentences=("This run has no pipeline. Start one that does with `--set plan.mesh.pp=2`.",))
    costs, plan = step_costs_of(subject.job, subject.cluster, subject.plan), subject.plan
    predicted = [each.forward + each.backward for each in costs.stages]
    if len(run.stage_seconds) != len(predicted):
        return Mode(sentences=("The run has not measured its stages yet.",))
    longer = [
        ((measured / each - 1) * stage.forward, (measured / each - 1) * stage.backward) if each else (0.0, 0.0)
        for measured, each, stage in zip(run.stage_seconds, predicted, costs.stages, strict=True)
    ]
    step = simulate_step(with_other_compute(costs, longer))
    seconds: dict[str, float] = {}
    for number, (before, measured) in enumerate(zip(predicted, run.stage_seconds, strict=True)):
        seconds[say("stage {stage}, predicted", stage=number)] = before
        seconds[say("stage {stage}, measured", stage=number)] = measured
    bars = plain_bars("Time of a micro-batch by stage", "seconds", "forward and backward", seconds)
    sentences = [say("With the measured stages, ranks wait {bubble:.1%} of the time.", bubble=step.bubble)]
    stages = MeasuredStages(layers=run.stage_layers, seconds=run.stage_seconds)
    best = balanced_cut(stages, plan, subject.job.outline, seq_len=subject.job.seq_len)
    if best is not None and best.layers != run.stage_layers:
        gain = 1 - best.step_seconds / present_cut(stages, plan).step_seconds
        sentences.append(say("Layers cut as {cut} should make steps {gain:.0%} shorter (plan.pipeline.stages).",
                             cut=", ".join(map(str, best.layers)), gain=gain))  # fmt: skip
    else:
        sentences.append(say("No other cut of the layers into stages should be faster."))
    timeline = _timeline(step, say("A step with the measured stages"), "seconds")
    return Mode(sentences=tuple(sentences), figures=(timeline, bars))


def _timeline(step: SimulatedStep, title: str, unit: Literal["seconds", "count"]) -> Timeline:
    spans = sorted((each for each in step.spans if each.track == "compute"), key=lambda each: each.start)
    if len(spans) > MAX_SPANS:
        spans, title = spans[:MAX_SPANS], say("{title}, the first {count:,} passes", title=title, count=MAX_SPANS)
    rows = tuple(say("rank {rank}", rank=rank) for rank in range(step.ranks))
    drawn = tuple(
        Span(row=each.rank, start=each.start, end=each.end, label=as_is(each.micro_batch), kind=each.name)
        for each in spans
    )
    x_name = "time" if unit == "seconds" else "time in forwards of a rank"
    return Timeline(title=title, unit=unit, rows=rows, spans=drawn, x_name=x_name)


def _held(order: Order) -> Bars:
    held = {say("rank {rank}", rank=rank): most for rank, most in enumerate(most_held(order))}
    return plain_bars("Micro-batches whose activations a rank holds at once", "count", "held", held)
