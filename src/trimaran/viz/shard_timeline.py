"""FSDP over time: which weights are gathered when, what each rank holds, and how prefetching hides the gathers."""

from collections.abc import Sequence
from typing import NamedTuple

from trimaran.core import show_bytes
from trimaran.cost.collective import Ring, all_gather_seconds, ring_of
from trimaran.cost.job import ELEMENT_BYTES
from trimaran.cost.step_time import pipeline_times_of
from trimaran.viz.figures import Formula, Lines, Matrix, Mode, ModeName, Span, Timeline, ValueSeries
from trimaran.viz.subject import Controls, Subject

NAME = "FSDPShardingVisualizer"
TITLE = "Sharded weights over time"
QUESTION = "Which weights does a rank hold when, what is sent, and does the step wait for it?"
ROWS = {"gather": 1, "reduce": 2}  # of the timeline; passes are in the first
MAX_SHOWN_LAYERS, MAX_SHOWN_RANKS = 12, 16


class GatheredBlock(NamedTuple):
    """A block whose weights are gathered together: seconds of its passes, and bytes of its weights and gradients."""

    forward: float
    backward: float
    weight_bytes: float
    gradient_bytes: float


class Work(NamedTuple):
    """Something that the device or the link does: gather, forward, backward or reduce, of a unit, from when to when."""

    kind: str
    unit: int
    start: float
    end: float


def gathered_blocks(subject: Subject) -> list[GatheredBlock]:
    """Return the layers of the first pipeline rank as units, in the order of forward."""
    stage = pipeline_times_of(subject.job, subject.cluster, subject.plan)[0]
    element_bytes = ELEMENT_BYTES[subject.plan.precision]
    gradient = float(subject.job.stack.time.parameter_bytes.gradient)
    return [
        GatheredBlock(unit.forward, unit.backward, element_bytes * (unit.dense + unit.experts),
                 gradient * (unit.trained_dense + unit.trained_experts))
        for unit in stage.units[:-1]
        for _ in range(unit.count)
    ]  # fmt: skip


def shard_step(units: Sequence[GatheredBlock], ring: Ring, *, prefetch: int, reshards: bool) -> list[Work]:
    """Return what happens in a step: passes on the device, gathers on one stream and reductions on another.

    A gather begins when the one before is done and the pass `prefetch` units before it begins. A pass begins when its
    weights are there. If weights are not freed after forward (`reshards` is False), backward gathers nothing.
    """
    works, device, gathered, reduced = list[Work](), 0.0, 0.0, 0.0
    passes = [("forward", number) for number in range(len(units))]
    passes += [("backward", number) for number in reversed(range(len(units)))]
    starts: list[float] = []
    for at, (kind, number) in enumerate(passes):
        unit = units[number]
        has_weights = 0.0
        is_held = kind == "backward" and (not reshards or number == len(units) - 1)  # the last is still there
        if not is_held:
            allowed = starts[at - prefetch] if at >= prefetch else 0.0
            begin = max(gathered, allowed)
            gathered = has_weights = begin + float(all_gather_seconds(unit.weight_bytes, ring))
            works.append(Work("gather", number, begin, gathered))
        begin = max(device, has_weights)
        starts.append(begin)
        device = begin + (unit.forward if kind == "forward" else unit.backward)
        works.append(Work(kind, number, begin, device))
        if kind == "backward":
            begin = max(reduced, device)
            reduced = begin + float(all_gather_seconds(unit.gradient_bytes, ring))
            works.append(Work("reduce", number, begin, reduced))
    return works


def waited_seconds(works: Sequence[Work]) -> float:
    """Return how long the device waits in a step: for weights, and for the last reduction."""
    busy = sum(each.end - each.start for each in works if each.kind in ("forward", "backward"))
    return max(each.end for each in works) - busy


def gathered_bytes(units: Sequence[GatheredBlock], ranks: int, *, reshards: bool) -> float:
    """Return what a rank receives in a step: weights for forward and, unless they are kept, for backward."""
    whole = sum(each.weight_bytes for each in units)
    again = whole - units[-1].weight_bytes if reshards and units else 0.0
    return (whole + again) * (ranks - 1) / ranks


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: who holds which shard, and gathers, passes and reductions over time."""
    plan = subject.plan
    default = plan.mesh.shards if plan.mesh.shards > 1 else max(2, plan.mesh.dp)
    ranks = controls.whole("ranks", "ranks that share the weights", default, least=2, most=1 << 16)
    prefetch = controls.whole("prefetch", "units that are gathered ahead", plan.comm.prefetch, least=1, most=64)
    usual = "no" if plan.comm.reshard == "never" else "yes"
    reshards = controls.choice("reshard", "weights are freed after forward", usual, ("yes", "no")) == "yes"
    units = gathered_blocks(subject)
    ring = ring_of(subject.cluster.levels, ranks, plan.mesh.tp)
    modes: dict[ModeName, Mode] = {
        "explain": _explain(units, ranks, reshards=reshards),
        "simulate": _simulate(units, ring, prefetch=prefetch, reshards=reshards),
    }
    return modes


def _explain(units: Sequence[GatheredBlock], ranks: int, *, reshards: bool) -> Mode:
    whole = sum(each.weight_bytes for each in units)
    passes = "2" if reshards else "1"
    formulas = (
        Formula(
            name="held by a rank between steps",
            symbols="weights / N",
            numbers=f"{show_bytes(whole)} / {ranks}",
            value=whole / ranks,
            unit="bytes",
        ),
        Formula(
            name="received by a rank in a step",
            symbols=f"about {passes} x weights x (N - 1) / N",
            numbers=f"{passes} x {show_bytes(whole)} x {ranks - 1} / {ranks}; the last layer is gathered once",
            value=gathered_bytes(units, ranks, reshards=reshards),
            unit="bytes",
        ),
    )
    shown = range(min(ranks, MAX_SHOWN_RANKS))
    layers = range(min(len(units), MAX_SHOWN_LAYERS))
    matrix = Matrix(
        title="Which part of each layer a rank holds between steps",
        rows=tuple(f"rank {rank}" for rank in shown),
        columns=tuple(f"layer {layer}" for layer in layers),
        labels=tuple(tuple(f"{rank}/{ranks}" for _ in layers) for rank in shown),
        colors=tuple(tuple(1 + rank for _ in layers) for rank in shown),
    )
    return Mode(formulas=formulas, figures=(matrix,))


def _simulate(units: Sequence[GatheredBlock], ring: Ring, *, prefetch: int, reshards: bool) -> Mode:
    works = shard_step(units, ring, prefetch=prefetch, reshards=reshards)
    timeline = Timeline(
        title="A micro-batch",
        unit="seconds",
        rows=("passes", "gathers", "reductions"),
        spans=tuple(
            Span(row=ROWS.get(each.kind, 0), start=each.start, end=each.end, label=str(each.unit),
                 kind=each.kind)
            for each in works
        ),
    )  # fmt: skip
    times, held = _held_over_time(units, works, ring.num_ranks, reshards=reshards)
    memory = Lines(
        title="Weights on a rank",
        x_name="seconds",
        x_unit="seconds",
        unit="bytes",
        x=times,
        series=(ValueSeries(name="weights", values=held),),
    )
    length = max(each.end for each in works)
    sentence = f"The device waits {waited_seconds(works) / length:.1%} of the time."
    return Mode(sentences=(sentence,), figures=(timeline, memory))


def _held_over_time(
    units: Sequence[GatheredBlock], works: Sequence[Work], ranks: int, *, reshards: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return moments and the bytes of weights that a rank holds then: its shards, and gathered layers."""
    changes = []
    for work in works:
        size = units[work.unit].weight_bytes
        if work.kind == "gather":
            changes.append((work.start, size))
        elif work.kind == "backward" or (work.kind == "forward" and reshards and work.unit != len(units) - 1):
            changes.append((work.end, -size))
    now = sum(each.weight_bytes for each in units) / ranks
    times, held = [0.0], [now]
    for time, change in sorted(changes):
        times += [time, time]
        held += [now, now + change]
        now += change
    return tuple(times), tuple(held)
