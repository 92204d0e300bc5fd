"""How tensor parallelism splits each linear layer, what is sent between the ranks, and what does not divide."""

from trimaran.core import show_bytes
from trimaran.cost.collective import all_gather_seconds, ring_of
from trimaran.cost.job import ELEMENT_BYTES
from trimaran.models import OutlineLayer
from trimaran.models.outline import linears_of
from trimaran.viz.figures import Bars, Formula, Mode, ModeName, Table, ValueSeries
from trimaran.viz.subject import Controls, Subject

NAME = "TensorParallelismVisualizer"
TITLE = "How each matrix is split"
QUESTION = "Which part of each linear layer does a rank hold, and where must the ranks exchange activations?"
SPLITS = {"outputs": "columns", "inputs": "rows", "nothing": "whole"}
DEGREES = (1, 2, 4, 8, 16)


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: the split of every linear of a block, and the traffic by degree."""
    plan = subject.plan
    tp = controls.whole("tp", "ranks that split each matrix", plan.mesh.tp if plan.mesh.tp > 1 else 2, least=1, most=64)
    return {"explain": _explain(subject, tp), "simulate": _simulate(subject)}


def layers_of(subject: Subject) -> list[tuple[str, OutlineLayer]]:
    """Return the kinds of blocks of the model, each with the name of its tower."""
    return [
        (tower.name, block)
        for tower in subject.job.outline.towers
        for block, _ in tower.runs
        if isinstance(block, OutlineLayer)
    ]


def divides(layer: OutlineLayer, tp: int) -> str:
    """Return why `tp` ranks cannot split a block; empty if they can."""
    if layer.heads % tp:
        return f"{layer.heads} heads do not divide by {tp}"
    if layer.kv_heads and layer.kv_heads % tp and tp % layer.kv_heads:
        return f"{layer.kv_heads} key heads do not divide by {tp}"
    if layer.ffn % tp:
        return f"a feed-forward of {layer.ffn} does not divide by {tp}"
    return ""


def _explain(subject: Subject, tp: int) -> Mode:
    rows, sentences = [], []
    for tower, layer in layers_of(subject):
        if why := divides(layer, tp):
            sentences.append(f"{tower}: {why}.")
        for linear in linears_of(layer):
            inputs, outputs = linear.on_rank(tp)
            rows.append((tower, linear.name, f"{linear.inputs:,} x {linear.outputs:,}", SPLITS[linear.tp_splits],
                         f"{inputs:,} x {outputs:,}"))  # fmt: skip
    main, plan = subject.job.outline.main, subject.plan
    element_bytes = ELEMENT_BYTES[plan.precision]
    num_bytes = element_bytes * subject.job.positions(main, plan) * main.hidden
    gathered = Formula(
        name="gathered by a block in forward",
        symbols="2 x bytes x tokens x width x (N - 1) / N",
        numbers=f"2 x {element_bytes} x {subject.job.positions(main, plan):,} x {main.hidden:,} x {tp - 1}/{tp}",
        value=2.0 * num_bytes * (tp - 1) / tp,
        unit="bytes",
    )
    scattered = Formula(
        name="reduced by a block in forward",
        symbols=gathered.symbols,
        numbers=gathered.numbers,
        value=gathered.value,
        unit="bytes",
    )
    where = "Attention and feed-forward each gather the sequence before their first matmuls, split by columns, and "
    sentences.insert(0, f"{where}reduce and scatter it after the last one, split by rows. Backward does the same.")
    table = Table(title="Linears of a block", columns=("tower", "linear", "whole", "split by", "on a rank"),
                  rows=tuple(rows))  # fmt: skip
    return Mode(sentences=tuple(sentences), formulas=(gathered, scattered), figures=(table,))


def _simulate(subject: Subject) -> Mode:
    main, plan, levels = subject.job.outline.main, subject.plan, subject.cluster.levels
    num_bytes = ELEMENT_BYTES[plan.precision] * subject.job.positions(main, plan) * main.hidden
    degrees = [each for each in DEGREES if 1 < each <= subject.cluster.world_size]
    if not degrees:
        return Mode(sentences=("The cluster has a single device: nothing can be split.",))
    seconds = [4 * float(all_gather_seconds(num_bytes, ring_of(levels, each, 1))) for each in degrees]
    bars = Bars(
        title="Communication of a block's forward, if nothing hides it",
        unit="seconds",
        categories=tuple(f"tp {each}" for each in degrees),
        series=(ValueSeries(name="gather and reduce", values=tuple(seconds)),),
    )
    sentence = f"A full activation is {show_bytes(num_bytes)}."
    return Mode(sentences=(sentence,), figures=(bars,))
