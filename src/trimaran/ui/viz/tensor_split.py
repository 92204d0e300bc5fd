"""How tensor parallelism splits each linear layer, what is sent between the ranks, and what does not divide."""

from dataclasses import replace

from trimaran.core import show_bytes
from trimaran.cost import ELEMENT_BYTES, all_gather_seconds, all_reduce_seconds, ring_of
from trimaran.models import OutlineLayer, linears_of
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Formula, Mode, ModeName, Table, as_modes, plain_bars, show_duration
from trimaran.ui.viz.subject import Controls, RunMedians, Subject, predicted_waits, waits_table

NAME = "TensorParallelismVisualizer"
TITLE = "How each matrix is split"
QUESTION = "Which part of each linear layer does a rank hold, and where must the ranks exchange activations?"
SPLITS = {"outputs": "columns", "inputs": "rows", "nothing": "whole"}
AFTER = {"outputs": "nothing: its output stays split", "inputs": "a reduction over the ranks", "nothing": "nothing"}
DEGREES = (1, 2, 4, 8, 16)
SPLIT_SEQUENCE = (
    "Attention and feed-forward each gather the sequence before their first matmuls, split by columns, and reduce and "
    "scatter it after the last one, split by rows. Backward does the same."
)
WHOLE_SEQUENCE = (
    "Attention and feed-forward each all-reduce their output after the last matmul, split by rows. Between blocks "
    "every rank holds all activations. Backward does the same before the first matmul."
)


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    plan = subject.plan
    tp = controls.whole("tp", "ranks that split each matrix", plan.mesh.tp if plan.mesh.tp > 1 else 2, least=1, most=64,
                        log=True)  # fmt: skip
    splits = controls.choice("sequence", "activations between blocks are split, too", "yes", ("yes", "no")) == "yes"
    live = _live(subject, subject.run) if subject.run is not None else None
    rows: list[tuple[str, ...]] = []
    sentences: list[str] = [SPLIT_SEQUENCE if splits else WHOLE_SEQUENCE]
    for tower, layer in layers_of(subject):
        if why := divides(layer, tp):
            sentences.append(say("{tower}: {why}.", tower=tower, why=why))
        for linear in linears_of(layer):
            inputs, outputs = linear.on_rank(tp)
            rows.append((as_is(tower), as_is(linear.name), as_is(f"{linear.inputs:,} x {linear.outputs:,}"),
                         SPLITS[linear.tp_splits], as_is(f"{inputs:,} x {outputs:,}"),
                         AFTER[linear.tp_splits]))  # fmt: skip
    main = subject.job.outline.main
    if vocabulary := main.outputs:
        rows.append((as_is(main.name), as_is("lm_head"), as_is(f"{main.hidden:,} x {vocabulary:,}"), SPLITS["outputs"],
                     as_is(f"{main.hidden:,} x {-(-vocabulary // tp):,}"), AFTER["outputs"]))  # fmt: skip
        if vocabulary % tp:
            sentences.append(say("A vocabulary of {size:,} does not divide by {tp}: the ranks hold unequal parts.",
                                 size=vocabulary, tp=tp))  # fmt: skip
    # What a rank sends in the forward of a block. An all-reduce sends as much as both others together.
    element_bytes, positions = ELEMENT_BYTES[plan.precision], subject.job.positions(main, plan)
    value = 2.0 * element_bytes * positions * main.hidden * (tp - 1) / tp
    numbers = f"2 x {element_bytes} x {positions:,} x {main.hidden:,} x {tp - 1}/{tp}"
    if splits:
        symbols = "2 x bytes x tokens x width x (N - 1) / N"
        names = ("gathered by a block in forward", "reduced by a block in forward")
        formulas = [Formula(name, symbols, as_is(numbers), value, "bytes") for name in names]
    else:
        name, symbols = "all-reduced by a block in forward", "4 x bytes x tokens x width x (N - 1) / N"
        formulas = [Formula(name, symbols, as_is(f"2 x {numbers}"), 2 * value, "bytes")]
    columns = ("tower", "linear", "whole", "split by", "on a rank", "then")
    table = Table("Linear layers of a block", columns, tuple(rows))
    return as_modes(
        Mode(sentences=tuple(sentences), formulas=tuple(formulas), figures=(table,)),
        _simulate(subject, splits=splits),
        live,
    )


def layers_of(subject: Subject) -> list[tuple[str, OutlineLayer]]:
    return [
        (tower.name, block)
        for tower in subject.job.outline.towers
        for block, _ in tower.runs
        if isinstance(block, OutlineLayer)
    ]


def divides(layer: OutlineLayer, tp: int) -> str:
    """Return why `tp` ranks cannot split a block; empty if they can."""
    if layer.heads % tp:
        return say("{heads} heads do not divide by {tp}", heads=layer.heads, tp=tp)
    if layer.kv_heads and layer.kv_heads % tp and tp % layer.kv_heads:
        return say("{heads} key heads do not divide by {tp}", heads=layer.kv_heads, tp=tp)
    if layer.ffn % tp:
        return say("a feed-forward of {width} does not divide by {tp}", width=layer.ffn, tp=tp)
    return ""


def _simulate(subject: Subject, *, splits: bool) -> Mode:
    main, plan, levels = subject.job.outline.main, subject.plan, subject.cluster.levels
    num_bytes = ELEMENT_BYTES[plan.precision] * subject.job.positions(main, plan) * main.hidden
    degrees = [each for each in DEGREES if 1 < each <= subject.cluster.world_size]
    if not degrees:
        return Mode(sentences=("The cluster has a single device: nothing can be split.",))
    layers, rings = layers_of(subject), [ring_of(levels, each, 1) for each in degrees]
    times, seconds_of = (4, all_gather_seconds) if splits else (2, all_reduce_seconds)
    seconds = [times * float(seconds_of(num_bytes, ring)) for ring in rings]
    names = [as_is(f"tp {each}") for each in degrees]
    bars = plain_bars("Communication of a block's forward, if nothing hides it", "seconds", "gather and reduce",
                      dict(zip(names, seconds, strict=True)))  # fmt: skip
    held = [num_bytes / (each if splits else 1) for each in degrees]
    activations = plain_bars("A full activation, and what a rank holds of it between blocks", "bytes", "on a rank",
                             dict(zip(names, held, strict=True)))  # fmt: skip
    activations = replace(activations, limits={"whole": float(num_bytes)})
    verdicts = [next((why for _, layer in layers if (why := divides(layer, each))), "yes") for each in degrees]
    links = Table(
        "The link that each degree uses",
        ("ranks", "link", "can split every block"),
        tuple((as_is(each), as_is(ring.link), why) for each, ring, why in zip(degrees, rings, verdicts, strict=True)),
    )
    sentence = say("A full activation is {size}.", size=show_bytes(num_bytes))
    return Mode(sentences=(sentence,), figures=(bars, activations, links))


def _live(subject: Subject, run: RunMedians) -> Mode:
    if subject.plan.mesh.tp == 1:
        return Mode(sentences=("This run splits no matrix. Start one that does with `--set plan.mesh.tp=2`.",))
    measured, expected = run.comm_seconds.get("tp", 0.0), predicted_waits(subject).get("tp", 0.0)
    said = say("A step waits {measured} for exchanges of activations; {predicted} is predicted.",
               measured=show_duration(measured), predicted=show_duration(expected))  # fmt: skip
    return Mode(sentences=(said,), figures=(waits_table(subject, run, ("tp",)),))
