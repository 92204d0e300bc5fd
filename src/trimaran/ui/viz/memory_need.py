"""Why one device is not enough: what a model needs by term, what a device has, and the smallest cluster that fits."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from trimaran.core import Plan, Prediction, show_bytes, show_count
from trimaran.cost import STATE_BYTES, Job, predict
from trimaran.machine import DEVICES, Cluster
from trimaran.planner import cluster_sizes, first_that_fits, resized_cluster
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import (
    Bars,
    Formula,
    Mode,
    ModeName,
    Table,
    ValueSeries,
    as_modes,
    show_duration,
    stacked_bars,
)
from trimaran.ui.viz.subject import Controls, RunMedians, Subject, peak_lines

NAME = "DistributedTrainingNeedVisualizer"
TITLE = "Does it fit?"
QUESTION = "How much memory does this model need, how much has a device, and what does training cost?"
# Terms that are a number of bytes for each parameter; the others depend on the batch.
PARAMETER_TERMS = ("weights", "masters", "gradients", "optimizer")
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MAX_DEVICES = 1024  # of the smallest cluster that is looked for
DAY_SECONDS = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What is asked: a job on one device and with the plan, and the tokens and price of the whole training."""

    job: Job
    cluster: Cluster
    plan: Plan
    one: Prediction
    planned: Prediction
    rows: int
    tokens: float
    price: float

    @property
    def memory(self) -> float:
        return float(self.cluster.device.memory_bytes)


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    need = _asked(subject, controls)
    live = _live(subject, subject.run, need) if subject.run is not None else None
    return as_modes(_explain(need), _simulate(subject, need), live)


def _asked(subject: Subject, controls: Controls) -> _Need:
    job, plan, cluster = subject.job, subject.plan, subject.cluster
    names = tuple(dict.fromkeys([cluster.device.name, *DEVICES]))
    device = controls.choice("gpu", "device", cluster.device.name, names)
    rows = controls.whole("micro_batch", "sequences at once on one device", 1, least=1, most=4096, log=True)
    seq_len = controls.whole("seq_len", "tokens of a sequence", job.seq_len, least=1, most=1 << 24, log=True)
    chosen = controls.choice("precision", "precision", plan.precision, PRECISIONS)
    precision = next(each for each in PRECISIONS if each == chosen)
    usual = next(name for name, size in STATE_BYTES.items() if size == job.state_bytes)
    states = controls.choice("optimizer", "Adam's two moments in", usual, tuple(STATE_BYTES))
    tokens = controls.number("tokens", "tokens to train on", 20 * job.outline.num_parameters, least=1, most=1e16,
                             log=True)  # fmt: skip
    price = controls.number("price", "price of a device for an hour", 2.5, least=0, most=100)
    if device != cluster.device.name:
        cluster = replace(cluster, device=DEVICES[device], links=(), groups=())
    changed = replace(job, seq_len=seq_len, state_bytes=STATE_BYTES[states])
    same = (changed, cluster, precision) == (job, subject.cluster, plan.precision)
    other = plan.model_copy(update={"precision": precision, "prediction": None})
    alone = Plan(micro_batch=rows, precision=precision)
    return _Need(
        job=changed,
        cluster=cluster,
        plan=other,
        one=predict(changed, resized_cluster(cluster, 1, 1), alone),
        planned=subject.prediction if same else predict(changed, cluster, other),
        rows=rows,
        tokens=tokens,
        price=price,
    )


def _explain(need: _Need) -> Mode:
    outline, device = need.job.outline, need.cluster.device
    count = outline.num_parameters
    by_batch = say("{rows} x {tokens:,} tokens", rows=need.rows, tokens=need.job.seq_len)
    formulas = [
        Formula(
            name=term,
            symbols="parameters x bytes" if term in PARAMETER_TERMS else "grows with the batch and the sequence",
            numbers=as_is(f"{show_count(count)} x {size / count:.3g} B") if term in PARAMETER_TERMS else by_batch,
            value=float(size),
            unit="bytes",
        )
        for term, size in need.one.memory.items()
        if size
    ]
    total = Formula(
        name="peak",
        symbols="the sum of all terms",
        numbers=as_is(" + ".join(show_bytes(each.value) for each in formulas)),
        value=float(need.one.peak_bytes),
        unit="bytes",
    )
    whole = say("On one {device} with {memory}, nothing split and nothing recomputed: {verdict}.", device=device.name,
                memory=show_bytes(need.memory), verdict=_verdict(need.one, need.memory))  # fmt: skip
    bars = _bars(need, {"one device": need.one})
    return Mode(sentences=(whole,), formulas=(*formulas, total), figures=(bars,))


def _simulate(subject: Subject, need: _Need) -> Mode:
    planned, cluster = need.planned, need.cluster
    rows = (
        (say("on one device"), as_is(show_bytes(need.one.device_bytes)), _verdict(need.one, need.memory)),
        (say("with the plan"), as_is(show_bytes(planned.device_bytes)), _verdict(planned, need.memory)),
    )
    asked = ("smallest cluster", cluster.device.name)
    if asked not in subject.kept:
        question = replace(subject.question, cluster=cluster)
        subject.kept[asked] = first_that_fits(question, cluster_sizes(cluster, most=MAX_DEVICES))
    smallest = subject.kept[asked]
    if smallest is None:
        fits = say("No cluster of up to {count:,} of these devices fits it.", count=MAX_DEVICES)
    else:
        fits = say("The smallest cluster of these devices on which a plan fits is {smallest}.", smallest=smallest)
    table = Table("What a device needs", ("", "needs", "verdict"), rows)
    bars = _bars(need, {"one device": need.one, "with the plan": planned})
    return Mode(sentences=(_duration(need, planned.tokens_per_second, planned), fits), figures=(bars, table))


def _duration(need: _Need, tokens_per_second: float, planned: Prediction) -> str:
    seconds = need.tokens / tokens_per_second
    cost = seconds / 3600 * need.cluster.world_size * need.price
    return say(
        "{tokens} tokens take {days:.3g} days on {cluster} and cost {cost:,.0f} at {price:g} an hour for a device "
        "({step} a step, give or take {error:.0%}).",
        tokens=show_count(need.tokens), days=seconds / DAY_SECONDS, cluster=need.cluster, cost=cost, price=need.price,
        step=show_duration(planned.step_seconds), error=planned.error,
    )  # fmt: skip


def _live(subject: Subject, run: RunMedians, need: _Need) -> Mode:
    prediction = subject.prediction
    error = prediction.peak_bytes / run.peak_bytes - 1 if run.peak_bytes else 0.0
    limits = {as_is(subject.cluster.device.name): float(subject.cluster.device.memory_bytes)}
    bars = Bars(
        title="Peak memory of a rank",
        unit="bytes",
        categories=("predicted", "measured"),
        series=(ValueSeries("peak", (float(prediction.peak_bytes), run.peak_bytes)),),
        limits=limits,
    )
    said = [say("After {steps:,} steps the fullest rank has needed {peak}; the prediction is off by {error:+.1%}.",
                steps=run.steps, peak=show_bytes(run.peak_bytes), error=error)]  # fmt: skip
    if run.tokens_per_second:
        days = need.tokens / run.tokens_per_second / DAY_SECONDS
        off = prediction.tokens_per_second / run.tokens_per_second - 1
        said.append(say("At the measured {rate} tokens/s, {tokens} tokens take {days:.3g} days; the predicted rate is "
                        "off by {error:+.1%}.", rate=show_count(run.tokens_per_second), days=days, error=off,
                        tokens=show_count(need.tokens)))  # fmt: skip
    figures = [bars, *peak_lines(run, prediction.peak_bytes)]
    return Mode(sentences=tuple(said), figures=tuple(figures))


def _bars(need: _Need, predictions: dict[str, Prediction]) -> Bars:
    memory = {name: each.memory for name, each in predictions.items()}
    limits = {as_is(need.cluster.device.name): need.memory}
    return stacked_bars("Peak memory of a device", "bytes", memory, limits)


def _verdict(prediction: Prediction, memory: float) -> str:
    over = prediction.device_bytes - memory
    if over > 0:
        return say("{size} too much", size=show_bytes(over))
    return say("fits, {size} stay free", size=show_bytes(-over))
