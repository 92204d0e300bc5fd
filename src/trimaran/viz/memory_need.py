"""Why one device is not enough: what a model needs by term, what a device has, and the smallest cluster that fits."""

from trimaran.core import Plan, Prediction, show_bytes, show_count, show_seconds
from trimaran.planner.least_memory import fits_on, resized_cluster, smallest_cluster
from trimaran.viz.figures import Bars, Formula, Mode, ModeName, Table, ValueSeries, stacked_bars
from trimaran.viz.subject import Controls, Subject

NAME = "DistributedTrainingNeedVisualizer"
TITLE = "Does it fit?"
QUESTION = "How much memory does this model need, how much has a device, and what does training cost?"
# Terms that are a number of bytes for each parameter; the others depend on the batch.
PARAMETER_TERMS = ("weights", "masters", "gradients", "optimizer")
DAY_SECONDS = 86400.0


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: explained for one device, simulated for the plan, live for a run."""
    rows = controls.whole("micro_batch", "sequences at once on one device", 1, least=1, most=4096)
    tokens = controls.number(
        "tokens", "tokens to train on", 20 * subject.job.outline.num_parameters, least=1, most=1e16
    )
    price = controls.number("price", "price of a device for an hour", 2.5, least=0, most=1e4)
    alone = Plan(micro_batch=rows, precision=subject.plan.precision)
    one = subject.predict(alone, resized_cluster(subject.cluster, 1, 1))
    modes: dict[ModeName, Mode] = {
        "explain": _explain(subject, one, rows),
        "simulate": _simulate(subject, one, tokens, price),
    }
    if subject.run is not None:
        modes["live"] = _live(subject)
    return modes


def _explain(subject: Subject, one: Prediction, rows: int) -> Mode:
    outline, device = subject.job.outline, subject.cluster.device
    count = outline.num_parameters
    formulas = [
        Formula(
            name=term,
            symbols="parameters x bytes" if term in PARAMETER_TERMS else "grows with the batch and the sequence",
            numbers=(
                f"{show_count(count)} x {size / count:.3g} B"
                if term in PARAMETER_TERMS
                else f"{rows} x {subject.job.seq_len:,} tokens"
            ),
            value=float(size),
            unit="bytes",
        )
        for term, size in one.memory.items()
        if size
    ]
    total = Formula(
        name="peak",
        symbols=" + ".join(each.name for each in formulas),
        numbers=" + ".join(show_bytes(each.value) for each in formulas),
        value=float(one.peak_bytes),
        unit="bytes",
    )
    verdict = _verdict(one, float(device.memory_bytes))
    whole = (
        f"On one {device.name} with {show_bytes(device.memory_bytes)}, nothing split and nothing recomputed: {verdict}."
    )
    return Mode(sentences=(whole,), formulas=(*formulas, total), figures=(_bars(subject, {"one device": one}),))


def _simulate(subject: Subject, one: Prediction, tokens: float, price: float) -> Mode:
    prediction, cluster = subject.prediction, subject.cluster
    seconds = tokens / prediction.tokens_per_second
    cost = seconds / 3600 * cluster.world_size * price
    smallest = None if fits_on(subject.question, cluster) else smallest_cluster(subject.question)
    rows = (
        ("on one device", show_bytes(one.device_bytes), _verdict(one, float(cluster.device.memory_bytes))),
        (
            "with the plan",
            show_bytes(prediction.device_bytes),
            _verdict(prediction, float(cluster.device.memory_bytes)),
        ),
    )
    sentences = [f"{show_count(tokens)} tokens take {seconds / DAY_SECONDS:.3g} days on {cluster} and cost "
                 f"{cost:,.0f} at {price:g} an hour for a device ({show_seconds(prediction.step_seconds)} a step, "
                 f"give or take {prediction.error:.0%})."]  # fmt: skip
    if smallest is not None:
        sentences.append(f"The smallest cluster of these devices on which a plan fits is {smallest}.")
    table = Table(title="What a device needs", columns=("", "needs", "verdict"), rows=rows)
    bars = _bars(subject, {"one device": one, "with the plan": prediction})
    return Mode(sentences=tuple(sentences), figures=(bars, table))


def _live(subject: Subject) -> Mode:
    run, prediction = subject.run, subject.prediction
    assert run is not None
    error = prediction.peak_bytes / run.peak_bytes - 1 if run.peak_bytes else 0.0
    series = (ValueSeries(name="peak", values=(float(prediction.peak_bytes), run.peak_bytes)),)
    bars = Bars(
        title="Peak memory of a rank",
        unit="bytes",
        categories=("predicted", "measured"),
        series=series,
        limits={"device": float(subject.cluster.device.memory_bytes)},
    )
    said = (
        f"After {run.steps:,} steps the fullest rank has needed {show_bytes(run.peak_bytes)}; the prediction is off by "
    )
    return Mode(sentences=(f"{said}{error:+.1%}.",), figures=(bars,))


def _bars(subject: Subject, predictions: dict[str, Prediction]) -> Bars:
    """Return one stacked bar for each prediction; the terms of a bar add up to its peak."""
    memory = {name: each.memory for name, each in predictions.items()}
    limits = {subject.cluster.device.name: float(subject.cluster.device.memory_bytes)}
    return stacked_bars("Peak memory of a device", "bytes", memory, limits)


def _verdict(prediction: Prediction, memory: float) -> str:
    over = prediction.device_bytes - memory
    return f"{show_bytes(over)} too much" if over > 0 else f"fits, {show_bytes(-over)} stay free"
