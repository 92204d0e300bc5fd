"""Why one device is not enough: what a model needs by term, what a device has, and the smallest cluster that fits."""

from dataclasses import replace
from typing import Literal, get_args

from trimaran.core import Plan, Prediction, show_bytes, show_count
from trimaran.cost import STATE_BYTES, predict
from trimaran.machine import DEVICES
from trimaran.planner import cluster_sizes, first_that_fits, resized_cluster
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import (
    Formula,
    Mode,
    ModeName,
    Table,
    as_modes,
    plain_bars,
    show_duration,
    stacked_bars,
)
from trimaran.ui.viz.subject import PEAK_TITLE, Controls, RunMedians, Subject, measured_lines

NAME = "DistributedTrainingNeedVisualizer"
TITLE = "Does it fit?"
QUESTION = "How much memory does this model need, how much has a device, and what does training cost?"
# Terms that are a number of bytes for each parameter; the others depend on the batch.
PARAMETER_TERMS = ("weights", "masters", "gradients", "optimizer")
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MAX_DEVICES = 1024  # of the smallest cluster that is looked for
DAY_SECONDS = 86400.0


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
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
    one = predict(changed, resized_cluster(cluster, 1, 1), Plan(micro_batch=rows, precision=precision))
    planned = subject.prediction if same else predict(changed, cluster, other)
    # Explained: the plan's terms on one device.
    device, memory, count = cluster.device.name, float(cluster.device.memory_bytes), job.outline.num_parameters
    limits = {as_is(device): memory}
    formulas = []
    for term, size in one.memory.items():
        if size and term in PARAMETER_TERMS:
            numbers = as_is(f"{show_count(count)} x {size / count:.3g} B")
            formulas.append(Formula(term, "parameters x bytes", numbers, float(size), "bytes"))
        elif size:
            numbers = say("{rows} x {tokens:,} tokens", rows=rows, tokens=seq_len)
            formulas.append(Formula(term, "grows with the batch and the sequence", numbers, float(size), "bytes"))
    numbers = as_is(" + ".join(show_bytes(each.value) for each in formulas))
    formulas.append(Formula("peak", "the sum of all terms", numbers, float(one.peak_bytes), "bytes"))
    whole = say("On one {device} with {memory}, nothing split and nothing recomputed: {verdict}.", device=device,
                memory=show_bytes(memory), verdict=_verdict(one, memory))  # fmt: skip
    bars = stacked_bars("Peak memory of a device", "bytes", {"one device": one.memory}, limits)
    explained = Mode(sentences=(whole,), formulas=tuple(formulas), figures=(bars,))
    # Simulated: beside it the plan, what training costs, and the smallest cluster that fits.
    table = Table("What a device needs", ("", "needs", "verdict"), (
        (say("on one device"), as_is(show_bytes(one.device_bytes)), _verdict(one, memory)),
        (say("with the plan"), as_is(show_bytes(planned.device_bytes)), _verdict(planned, memory)),
    ))  # fmt: skip
    asked = ("smallest cluster", device)
    if asked not in subject.kept:
        question = replace(subject.question, cluster=cluster)
        subject.kept[asked] = first_that_fits(question, cluster_sizes(cluster, most=MAX_DEVICES))
    smallest = subject.kept[asked]
    if smallest is None:
        fits = say("No cluster of up to {count:,} of these devices fits it.", count=MAX_DEVICES)
    else:
        fits = say("The smallest cluster of these devices on which a plan fits is {smallest}.", smallest=smallest)
    both = {"one device": one.memory, "with the plan": planned.memory}
    bars = stacked_bars("Peak memory of a device", "bytes", both, limits)
    seconds = tokens / planned.tokens_per_second
    duration = say(
        "{tokens} tokens take {days:.3g} days on {cluster} and cost {cost:,.0f} at {price:g} an hour for a device "
        "({step} a step, give or take {error:.0%}).",
        tokens=show_count(tokens), days=seconds / DAY_SECONDS, cluster=cluster, price=price,
        cost=seconds / 3600 * cluster.world_size * price, step=show_duration(planned.step_seconds),
        error=planned.error,
    )  # fmt: skip
    simulated = Mode(sentences=(duration, fits), figures=(bars, table))
    live = _live(subject, subject.run, tokens) if subject.run is not None else None
    return as_modes(explained, simulated, live)


def _live(subject: Subject, run: RunMedians, tokens: float) -> Mode:
    prediction = subject.prediction
    error = prediction.peak_bytes / run.peak_bytes - 1 if run.peak_bytes else 0.0
    peaks = {"predicted": float(prediction.peak_bytes), "measured": run.peak_bytes}
    limits = {as_is(subject.cluster.device.name): float(subject.cluster.device.memory_bytes)}
    bars = replace(plain_bars("Peak memory of a rank", "bytes", "peak", peaks), limits=limits)
    said = [say("After {steps:,} steps the fullest rank has needed {peak}; the prediction is off by {error:+.1%}.",
                steps=run.steps, peak=show_bytes(run.peak_bytes), error=error)]  # fmt: skip
    if run.tokens_per_second:
        days = tokens / run.tokens_per_second / DAY_SECONDS
        off = prediction.tokens_per_second / run.tokens_per_second - 1
        said.append(say("At the measured {rate} tokens/s, {tokens} tokens take {days:.3g} days; the predicted rate is "
                        "off by {error:+.1%}.", rate=show_count(run.tokens_per_second), days=days, error=off,
                        tokens=show_count(tokens)))  # fmt: skip
    lines = measured_lines(PEAK_TITLE, "bytes", run, run.last.peak_bytes, prediction.peak_bytes)
    return Mode(sentences=tuple(said), figures=(bars, *lines))


def _verdict(prediction: Prediction, memory: float) -> str:
    over = prediction.device_bytes - memory
    if over > 0:
        return say("{size} too much", size=show_bytes(over))
    return say("fits, {size} stay free", size=show_bytes(-over))
