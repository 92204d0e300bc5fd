"""DDP's buckets: when the gradients of each are ready, when they are reduced, and what backward does not hide."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trimaran.core import show_seconds
from trimaran.cost.collective import Ring, all_reduce_seconds, ring_of
from trimaran.cost.step_time import pipeline_times_of
from trimaran.viz.figures import Formula, Lines, Mode, ModeName, Span, Table, Timeline, ValueSeries
from trimaran.viz.subject import Controls, Subject

NAME = "DDPCommunicationFlow"
TITLE = "Buckets against backward"
QUESTION = "Which gradients are reduced while backward still computes, and how long does the step wait for the rest?"
MIB = float(1 << 20)
SIZES_MB = (1, 2, 5, 10, 25, 50, 100, 250, 1000)


class BackwardBlock(NamedTuple):
    """A block in the order of backward: its name, its seconds, and the bytes of its gradients."""

    name: str
    seconds: float
    gradient_bytes: float


class Bucket(NamedTuple):
    """Gradients that are reduced together: their bytes, when the last is ready, and from when to when it is reduced."""

    num_bytes: float
    ready: float
    start: float
    end: float


def backward_blocks(subject: Subject) -> list[BackwardBlock]:
    """Return the blocks of the first pipeline rank in the order of backward: head, layers from the last, embedding."""
    stage = pipeline_times_of(subject.job, subject.cluster, subject.plan)[0]
    per_parameter = float(subject.job.stack.time.parameter_bytes.gradient)
    *units, root = stage.units
    layers = [
        BackwardBlock(f"layer {number}", unit.backward, per_parameter * (unit.trained_dense + unit.trained_experts))
        for number, unit in enumerate(each for each in units for _ in range(each.count))
    ]
    head = BackwardBlock("head", root.backward, per_parameter * stage.part.head)
    return [head, *reversed(layers), BackwardBlock("embedding", 0.0, per_parameter * stage.part.embedding)]


def reduce_in_buckets(blocks: Sequence[BackwardBlock], bucket_bytes: float, ring: Ring) -> list[Bucket]:
    """Return the buckets. Each is reduced when it is full and the one before is done; the last may be smaller."""
    buckets, now, waiting, last_end = list[Bucket](), 0.0, 0.0, 0.0
    for number, block in enumerate(blocks):
        now += block.seconds
        waiting += block.gradient_bytes
        is_last = number == len(blocks) - 1
        while waiting >= bucket_bytes or (is_last and waiting > 0):
            num_bytes = min(waiting, bucket_bytes)
            start = max(now, last_end)
            last_end = start + float(all_reduce_seconds(num_bytes, ring))
            buckets.append(Bucket(num_bytes, now, start, last_end))
            waiting -= num_bytes
    return buckets


def exposed_seconds(blocks: Sequence[BackwardBlock], buckets: Sequence[Bucket]) -> float:
    """Return how long the step waits for gradients after backward has computed all of them."""
    return max(0.0, max((each.end for each in buckets), default=0.0) - sum(block.seconds for block in blocks))


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: one bucket after the other beside backward, and what another size would expose."""
    plan = subject.plan
    size = controls.number("bucket_mb", "MiB of gradients in a bucket", plan.comm.bucket_mb, least=0.1, most=1e5)
    default = max(2, plan.mesh.data)
    ranks = controls.whole("ranks", "ranks with the same weights", default, least=2, most=1 << 16)
    slower = controls.number("slowdown", "times as slow as the links of the cluster", 1.0, least=0.01, most=1e4)
    ring = ring_of(subject.cluster.levels, ranks, plan.mesh.tp)
    ring = ring._replace(
        latency=type(ring.latency)(ring.latency * slower),
        reduce_bandwidth=ring.reduce_bandwidth / slower,
        tree_bandwidth=ring.tree_bandwidth / slower,
    )
    blocks = backward_blocks(subject)
    modes: dict[ModeName, Mode] = {
        "explain": _explain(blocks, size, ring),
        "simulate": _simulate(subject, blocks, size, ring),
    }
    if subject.run is not None:
        modes["live"] = _live(subject)
    return modes


def _explain(blocks: Sequence[BackwardBlock], size: float, ring: Ring) -> Mode:
    total, backward = sum(each.gradient_bytes for each in blocks), sum(each.seconds for each in blocks)
    num, buckets = ring.num_ranks, reduce_in_buckets(blocks, size * MIB, ring)
    exposed = exposed_seconds(blocks, buckets)
    reducing = sum(each.end - each.start for each in buckets)
    formulas = (
        Formula(
            name="sent and received by a rank",
            symbols="2 (N - 1) / N x gradients",
            numbers=f"2 x {num - 1} / {num} x {total:,.0f} B",
            value=2 * (num - 1) / num * total,
            unit="bytes",
        ),
        Formula(
            name="all gradients at once",
            symbols="2 (N - 1) x (latency + bytes / N / bandwidth)",
            numbers=f"N = {num}, {ring.reduce_bandwidth / 1e9:.1f} GB/s on {ring.link}",
            value=float(all_reduce_seconds(total, ring)),
            unit="seconds",
        ),
        Formula(
            name="exposed",
            symbols="end of the last bucket - end of backward",
            numbers=f"buckets of {size:g} MiB, backward {show_seconds(backward)}",
            value=exposed,
            unit="seconds",
        ),
    )
    said = f"A bucket is sent as soon as its gradients are there. Backward hides {1 - exposed / reducing:.0%} of that."
    return Mode(sentences=(said,), formulas=formulas)


def _simulate(subject: Subject, blocks: Sequence[BackwardBlock], size: float, ring: Ring) -> Mode:
    buckets = reduce_in_buckets(blocks, size * MIB, ring)
    spans = [*_backward_spans(blocks)]
    spans += [
        Span(row=1, start=each.start, end=each.end, label=str(number), kind="reduce")
        for number, each in enumerate(buckets)
    ]
    timeline = Timeline(
        title=f"{len(buckets)} buckets of {size:g} MiB",
        unit="seconds",
        rows=("backward", "reduction"),
        spans=tuple(spans),
    )
    lines = Lines(
        title="Exposed time",
        x_name="MiB in a bucket",
        x_unit="count",
        unit="seconds",
        x=tuple(map(float, SIZES_MB)),
        series=(
            ValueSeries(
                name="exposed",
                values=tuple(exposed_seconds(blocks, reduce_in_buckets(blocks, each * MIB, ring)) for each in SIZES_MB),
            ),
        ),
        log_x=True,
    )
    sent = {name: seconds for name, seconds in subject.prediction.exposed.items() if name.startswith("gradients")}
    said = [f"The cost model exposes {show_seconds(seconds)} for {name} in the plan." for name, seconds in sent.items()]
    return Mode(sentences=tuple(said), figures=(timeline, lines))


def _backward_spans(blocks: Sequence[BackwardBlock]) -> Iterator[Span]:
    now = 0.0
    for block in blocks:
        if block.seconds:
            yield Span(row=0, start=now, end=now + block.seconds, label=block.name, kind="backward")
        now += block.seconds


def _live(subject: Subject) -> Mode:
    run = subject.run
    assert run is not None
    rows = tuple((axis, show_seconds(seconds)) for axis, seconds in run.comm_seconds.items())
    predicted = sum(float(each) for each in subject.prediction.exposed.values())
    said = f"Exposed communication of all kinds is predicted to take {show_seconds(predicted)} of a step."
    return Mode(
        sentences=(said,), figures=(Table(title="Waits of rank 0 by axis", columns=("axis", "measured"), rows=rows),)
    )
