"""FSDP over time: which weights are gathered when, what each rank holds, and how prefetching hides the gathers."""

from collections.abc import Sequence
from typing import NamedTuple

from trimaran.core import show_bytes
from trimaran.cost import ELEMENT_BYTES, Ring, all_gather_seconds, all_reduce_seconds, pipeline_times_of, ring_of
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import (
    Formula,
    Lines,
    Matrix,
    Mode,
    ModeName,
    Span,
    Timeline,
    ValueSeries,
    as_modes,
    plain_bars,
    show_duration,
)
from trimaran.ui.viz.subject import (
    PEAK_TITLE,
    Controls,
    RunMedians,
    Subject,
    measured_lines,
    predicted_waits,
    waits_table,
)

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
    stage = pipeline_times_of(subject.job, subject.cluster, subject.plan)[0]
    element_bytes = ELEMENT_BYTES[subject.plan.precision]
    gradient = float(subject.job.stack.time.parameter_bytes.gradient)
    return [
        GatheredBlock(unit.forward, unit.backward, element_bytes * (unit.dense + unit.experts),
                 gradient * (unit.trained_dense + unit.trained_experts))
        for unit in stage.units[:-1]
        for _ in range(unit.count)
    ]  # fmt: skip


def shard_step(
    units: Sequence[GatheredBlock], ring: Ring, among: Ring | None = None, *, prefetch: int, reshards: bool
) -> list[Work]:
    """Return what happens in a step: passes on the device, gathers on one stream and reductions on another.

    A gather begins when the one before is done and the pass `prefetch` units before it begins. A pass begins when its
    weights are there. If weights are not freed after forward (`reshards` is False), backward gathers nothing. With
    `among`, a ring of replicas, a rank then reduces its shard of the gradients with the other replicas.
    """
    works, device, gathered, reduced = list[Work](), 0.0, 0.0, 0.0
    passes = [("forward", number) for number in range(len(units))]
    passes += [("backward", number) for number in reversed(range(len(units)))]
    starts: list[float] = []
    for at, (kind, number) in enumerate(passes):
        unit = units[number]
        has_weights = 0.0
        if kind == "forward" or reshards:
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
            if among is not None:
                reduced += float(all_reduce_seconds(unit.gradient_bytes / ring.num_ranks, among))
            works.append(Work("reduce", number, begin, reduced))
    return works


def waited_seconds(works: Sequence[Work]) -> float:
    """Return how long the device waits in a step: for weights, and for the last reduction."""
    busy = sum(each.end - each.start for each in works if each.kind in ("forward", "backward"))
    return max(each.end for each in works) - busy


def gathered_bytes(units: Sequence[GatheredBlock], ranks: int, *, reshards: bool) -> float:
    """Return what a rank receives in a step: weights for forward and, unless they are kept, for backward."""
    whole = sum(each.weight_bytes for each in units)
    return (2 if reshards else 1) * whole * (ranks - 1) / ranks


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    plan = subject.plan
    default = plan.mesh.shards if plan.mesh.shards > 1 else max(2, plan.mesh.dp)
    ranks = controls.whole("ranks", "ranks that share the weights", default, least=2, most=1 << 16, log=True)
    replicas = controls.whole("replicas", "replicas of the shards (HSDP)", plan.mesh.dp_replicate, least=1, most=4096,
                              log=True)  # fmt: skip
    layers = controls.whole("layers", "layers that are gathered together", 1, least=1, most=64)
    prefetch = controls.whole("prefetch", "units that are gathered ahead", plan.comm.prefetch, least=1, most=16)
    usual = "no" if plan.comm.reshard == "never" else "yes"
    reshards = controls.choice("reshard", "weights are freed after forward", usual, ("yes", "no")) == "yes"
    blocks = gathered_blocks(subject)
    parts = [blocks[first : first + layers] for first in range(0, len(blocks), layers)]
    units = [GatheredBlock(*(sum(column) for column in zip(*part, strict=True))) for part in parts]
    ring = ring_of(subject.cluster.levels, ranks, plan.mesh.tp)
    among = ring_of(subject.cluster.levels, replicas, plan.mesh.tp * ranks) if replicas > 1 else None
    whole = sum(each.weight_bytes for each in units)
    gradients = sum(each.gradient_bytes for each in units)
    passes = 2 if reshards else 1
    numbers = as_is(f"{show_bytes(whole)} / {ranks}")
    formulas = [Formula("held by a rank between steps", "weights / N", numbers, whole / ranks, "bytes")]
    symbols = say("{passes} x weights x (N - 1) / N", passes=passes)
    numbers = as_is(f"{passes} x {show_bytes(whole)} x {ranks - 1} / {ranks}")
    received = gathered_bytes(units, ranks, reshards=reshards)
    formulas.append(Formula("received by a rank in a step", symbols, numbers, received, "bytes"))
    numbers, sent = as_is(f"{show_bytes(gradients)} x {ranks - 1} / {ranks}"), gradients * (ranks - 1) / ranks
    formulas.append(Formula("gradients that a rank sends in a step", "gradients x (N - 1) / N", numbers, sent, "bytes"))
    if replicas > 1:
        name, symbols = "the same between replicas (HSDP)", "2 (R - 1) / R x gradients / N"
        numbers = as_is(f"2 x {replicas - 1} / {replicas} x {show_bytes(gradients)} / {ranks}")
        sent = 2 * (replicas - 1) / replicas * gradients / ranks
        formulas.append(Formula(name, symbols, numbers, sent, "bytes"))
    shown, drawn = range(min(ranks, MAX_SHOWN_RANKS)), range(min(len(units), MAX_SHOWN_LAYERS))
    matrix = Matrix(
        title="Which part of each layer a rank holds between steps",
        rows=tuple(say("rank {rank}", rank=rank) for rank in shown),
        columns=tuple(say("unit {number}", number=layer) for layer in drawn),
        labels=tuple(tuple(as_is(f"{rank + 1}/{ranks}") for _ in drawn) for rank in shown),
        colors=tuple(tuple(1 + rank for _ in drawn) for rank in shown),
    )
    explained = Mode(formulas=tuple(formulas), figures=(matrix,))
    live = _live(subject, subject.run) if subject.run is not None else None
    return as_modes(explained, _simulate(units, ring, among, prefetch=prefetch, reshards=reshards), live)


def _simulate(units: Sequence[GatheredBlock], ring: Ring, among: Ring | None, *, prefetch: int, reshards: bool) -> Mode:
    works = shard_step(units, ring, among, prefetch=prefetch, reshards=reshards)
    spans = [
        Span(row=ROWS.get(each.kind, 0), start=each.start, end=each.end, label=as_is(each.unit), kind=each.kind)
        for each in sorted(works, key=lambda each: (ROWS.get(each.kind, 0), each.start))
    ]
    rows = ("passes", "gathers", "reductions")
    timeline = Timeline(title="A micro-batch", unit="seconds", rows=rows, spans=tuple(spans))
    # The bytes of weights that a rank holds over time: its shards, and gathered layers.
    changes = []
    for work in works:
        size = units[work.unit].weight_bytes
        if work.kind == "gather":
            changes.append((work.start, size))
        elif work.kind == "backward" or (work.kind == "forward" and reshards):
            changes.append((work.end, -size))
    whole = sum(each.weight_bytes for each in units)
    now = whole / ring.num_ranks
    times, held = [0.0], [now]
    for moment, change in sorted(changes):
        times += [moment, moment]
        held += [now, now + change]
        now += change
    title, x, series = "Weights that a rank holds", tuple(times), (ValueSeries("weights", tuple(held)),)
    limits = {"all weights": whole}
    memory = Lines(title=title, x_name="time", x_unit="seconds", unit="bytes", x=x, series=series, limits=limits)
    ahead = {
        as_is(each): waited_seconds(shard_step(units, ring, among, prefetch=each, reshards=reshards))
        for each in (1, 2, 4, 8)
    }
    waits = plain_bars("Time that the device waits, by units gathered ahead", "seconds", "waits", ahead)
    length = max(each.end for each in works)
    sentence = say("The device waits {waits:.1%} of the time.", waits=waited_seconds(works) / length if length else 0.0)
    return Mode(sentences=(sentence,), figures=(timeline, memory, waits))


def _live(subject: Subject, run: RunMedians) -> Mode:
    peaks = measured_lines(PEAK_TITLE, "bytes", run, run.last.peak_bytes, subject.prediction.peak_bytes)
    if subject.plan.mesh.dp_shard == 1:
        said = say("This run does not shard its weights (`plan.mesh.dp_shard` is 1). Start one that does with "
                   "`--set plan.mesh.dp_shard=2 --set plan.sharding=parameters`.")  # fmt: skip
        return Mode(sentences=(said,), figures=tuple(peaks))
    measured, expected = run.comm_seconds.get("dp_shard", 0.0), predicted_waits(subject).get("dp_shard", 0.0)
    said = say("A step waits {measured} for gathers and reductions of shards; {predicted} is predicted.",
               measured=show_duration(measured), predicted=show_duration(expected))  # fmt: skip
    return Mode(sentences=(said,), figures=(waits_table(subject, run, ("dp_shard",)), *peaks))
