"""DDP's buckets: when the gradients of each are ready, when they are reduced, and what backward does not hide."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trimaran.cost import Ring, all_reduce_seconds, pipeline_times_of, ring_of
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Formula, Lines, Mode, ModeName, Span, Timeline, ValueSeries, as_modes, show_duration
from trimaran.ui.viz.subject import (
    Controls,
    RunMedians,
    Subject,
    late_ranks,
    measured_lines,
    predicted_waits,
    waits_table,
)

NAME = "DDPCommunicationFlow"
TITLE = "Buckets against backward"
QUESTION = "Which gradients are reduced while backward still computes, and how long does the step wait for the rest?"
MIB = float(1 << 20)
SIZES_MB = (1, 2, 5, 10, 25, 50, 100, 250, 1000)
MAX_DRAWN = 600  # buckets of a picture


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
        BackwardBlock(
            say("layer {number}", number=number),
            unit.backward,
            per_parameter * (unit.trained_dense + unit.trained_experts),
        )
        for number, unit in enumerate(each for each in units for _ in range(each.count))
    ]
    head = BackwardBlock(say("head"), root.backward, per_parameter * stage.part.head)
    return [head, *reversed(layers), BackwardBlock(say("embedding"), 0.0, per_parameter * stage.part.embedding)]


def reduce_in_buckets(blocks: Sequence[BackwardBlock], bucket_bytes: float, ring: Ring) -> list[Bucket]:
    """Return the buckets. Each is reduced when it is full and the one before is done; the last may be smaller."""
    buckets, now, waiting, last_end = list[Bucket](), 0.0, 0.0, 0.0
    full = float(all_reduce_seconds(bucket_bytes, ring))
    for number, block in enumerate(blocks):
        now += block.seconds
        waiting += block.gradient_bytes
        is_last = number == len(blocks) - 1
        while waiting >= bucket_bytes or (is_last and waiting > 0):
            num_bytes = min(waiting, bucket_bytes)
            start = max(now, last_end)
            last_end = start + (full if num_bytes == bucket_bytes else float(all_reduce_seconds(num_bytes, ring)))
            buckets.append(Bucket(num_bytes, now, start, last_end))
            waiting -= num_bytes
    return buckets


def reduced_at(blocks: Sequence[BackwardBlock], bucket_bytes: float, ring: Ring) -> float:
    """Return when the last bucket of `reduce_in_buckets` is reduced, without making all of them."""
    full, now, waiting, end = float(all_reduce_seconds(bucket_bytes, ring)), 0.0, 0.0, 0.0
    for block in blocks:
        now += block.seconds
        count, waiting = divmod(waiting + block.gradient_bytes, bucket_bytes)
        end = max(now, end) + count * full if count else end
    return max(now, end) + float(all_reduce_seconds(waiting, ring)) if waiting else end


def exposed_seconds(blocks: Sequence[BackwardBlock], buckets: Sequence[Bucket]) -> float:
    """Return how long the step waits for gradients after backward has computed all of them."""
    return max(0.0, max((each.end for each in buckets), default=0.0) - sum(block.seconds for block in blocks))


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    plan = subject.plan
    size = controls.number("bucket_mb", "MiB of gradients in a bucket", plan.comm.bucket_mb, least=1, most=4096,
                           log=True)  # fmt: skip
    default = max(2, plan.mesh.data)
    ranks = controls.whole("ranks", "ranks with the same weights", default, least=2, most=1 << 16, log=True)
    slower = controls.number("slowdown", "times as slow as the links of the cluster", 1.0, least=0.01, most=1e4,
                             log=True)  # fmt: skip
    straggler = controls.number("straggler", "times as slow in backward is the slowest rank", 1.0, least=1, most=10)
    ring = ring_of(subject.cluster.levels, ranks, plan.mesh.tp)
    ring = ring._replace(
        latency=type(ring.latency)(ring.latency * slower),
        reduce_bandwidth=ring.reduce_bandwidth / slower,
        tree_bandwidth=ring.tree_bandwidth / slower,
    )
    blocks = backward_blocks(subject)
    buckets = reduce_in_buckets(slowed(blocks, straggler), size * MIB, ring)
    # Backward beside the buckets. A bucket starts when the slowest rank has its gradients, too.
    rows = ["backward", *(["backward of the slowest rank"] if straggler > 1 else []), "all-reduce of buckets"]
    spans = [*_backward_spans(blocks, 0)]
    if straggler > 1:
        spans += _backward_spans(slowed(blocks, straggler), 1)
    spans += [
        Span(row=len(rows) - 1, start=each.start, end=each.end, label=as_is(number), kind="all-reduce")
        for number, each in enumerate(_joined(buckets))
    ]
    title = say("{count:,} buckets of {size:g} MiB beside backward", count=len(buckets), size=size)
    timeline = Timeline(title=title, unit="seconds", rows=tuple(rows), spans=tuple(spans))
    live = _live(subject, subject.run) if subject.run is not None else None
    total, backward = sum(each.gradient_bytes for each in blocks), sum(each.seconds for each in blocks)
    num = ring.num_ranks
    exposed = exposed_seconds(blocks, buckets)
    reducing = sum(each.end - each.start for each in buckets)
    whole, at_once = as_is(f"2 x {num - 1} / {num} x {total:,.0f} B"), float(all_reduce_seconds(total, ring))
    rate = ring.reduce_bandwidth / 1e9
    rates = say("N = {ranks}, {rate:.1f} GB/s on {link}", ranks=num, rate=rate, link=ring.link)
    chosen = say("buckets of {size:g} MiB, backward {backward}", size=size, backward=show_duration(backward))
    symbols = "2 (N - 1) x (latency + bytes / N / bandwidth)"
    formulas = (
        Formula(
            "sent and received by a rank", "2 (N - 1) / N x gradients", whole, 2 * (num - 1) / num * total, "bytes"
        ),
        Formula("all gradients at once", symbols, rates, at_once, "seconds"),
        Formula("exposed", "end of the last bucket - end of backward", chosen, exposed, "seconds"),
    )
    hidden = max(0.0, 1 - exposed / reducing) if reducing else 1.0
    said = say("A bucket is sent as soon as its gradients are there. Backward hides {hidden:.0%} of that.",
               hidden=hidden)  # fmt: skip
    return as_modes(
        Mode(sentences=(said,), formulas=formulas, figures=(timeline,)),
        _simulate(subject, blocks, size, ring, straggler, timeline),
        live,
    )


def slowed(blocks: Sequence[BackwardBlock], factor: float) -> list[BackwardBlock]:
    return [each._replace(seconds=factor * each.seconds) for each in blocks]


def _joined(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the buckets to draw: of very many, several that follow each other without a gap are one."""
    if len(buckets) <= MAX_DRAWN:
        return list(buckets)
    size = -(-len(buckets) // MAX_DRAWN)
    parts = [buckets[first : first + size] for first in range(0, len(buckets), size)]
    return [part[0]._replace(end=part[-1].end, num_bytes=sum(each.num_bytes for each in part)) for part in parts]


def _simulate(
    subject: Subject, blocks: Sequence[BackwardBlock], size: float, ring: Ring, straggler: float, timeline: Timeline
) -> Mode:
    late, backward = slowed(blocks, straggler), sum(each.seconds for each in blocks)
    sizes = tuple(sorted({*map(float, SIZES_MB), size}))
    lines = Lines(
        title="Exposed time by the size of a bucket",
        x_name="MiB in a bucket",
        x_unit="count",
        unit="seconds",
        x=sizes,
        series=(
            ValueSeries("exposed", tuple(max(0.0, reduced_at(late, each * MIB, ring) - backward) for each in sizes)),
        ),
        log_x=True,
    )
    chosen, equal = (max(0.0, reduced_at(each, size * MIB, ring) - backward) for each in (late, blocks))
    said: list[str] = []
    if straggler > 1:
        said.append(say("Of {exposed} exposed, every rank waits {waited} for the slowest one.",
                        exposed=show_duration(chosen), waited=show_duration(chosen - equal)))  # fmt: skip
    sent = {name: seconds for name, seconds in subject.prediction.exposed.items() if name.startswith("gradients")}
    template = "The cost model exposes {seconds} for {name} in the plan."
    for name, seconds in sent.items():
        payload, _, link = name.partition(" on ")
        what = say("{payload} on {link}", payload=say(payload), link=link)
        said.append(say(template, seconds=show_duration(seconds), name=what))
    if not sent:
        said.append(say("The plan exposes no gradients: its data ranks are {ranks}.", ranks=subject.plan.mesh.data))
    return Mode(sentences=tuple(said), figures=(timeline, lines))


def _backward_spans(blocks: Sequence[BackwardBlock], row: int) -> Iterator[Span]:
    now = 0.0
    for block in blocks:
        if block.seconds:
            yield Span(row=row, start=now, end=now + block.seconds, label=block.name, kind="backward")
        now += block.seconds


def _live(subject: Subject, run: RunMedians) -> Mode:
    if not run.comm_seconds:
        return Mode(sentences=("The run has a single rank: it waits for nobody. Start it with more, such as "
                               "`--set cluster=2xcpu`.",))  # fmt: skip
    expected = predicted_waits(subject)
    predicted, measured = sum(expected.values()), run.phases.get("comm", 0.0)
    said = say("A step waits {measured} for communication, {share:.1%} of its time; {predicted} is predicted.",
               measured=show_duration(measured), share=measured / run.step_seconds if run.step_seconds else 0.0,
               predicted=show_duration(predicted))  # fmt: skip
    lines = measured_lines("Exposed communication over the last steps", "seconds", run, run.last.comm, predicted)
    figures = [waits_table(subject, run), *lines, *late_ranks(run)]
    return Mode(sentences=(said,), figures=tuple(figures))
