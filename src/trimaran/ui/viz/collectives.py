"""Collectives step by step: who holds which parts of the data after each step, what is sent, and how long it takes."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

from trimaran.cost import Ring, all_gather_seconds, all_reduce_seconds, ring_of
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import (
    Formula,
    GraphArrow,
    GraphNode,
    Lines,
    Matrix,
    Mode,
    ModeName,
    NodeGraph,
    ValueSeries,
    as_modes,
)
from trimaran.ui.viz.subject import Controls, Subject

NAME = "CollectiveCommunicationPrimitives"
TITLE = "Collectives, step by step"
QUESTION = "What does each rank send in each step of a collective, and how long does it take by size?"
OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
ALGORITHMS = ("ring", "tree", "hierarchical")
COLLECTIVES = {each: each.replace("-", "_") for each in OPERATIONS}  # as `trimaran bench comm` names them
MAX_RANKS = 16
MAX_WHOLE_RANKS = 8  # of more, only the steps around the chosen one are drawn
SIZES = tuple(2.0**power for power in range(10, 34, 2))

NOT_MEASURED = (
    "Nothing was measured. Write a file with `trimaran bench comm --out comm.json`, and show it with "
    "`trimaran viz collectives --comm comm.json`."
)

lines_by_size = partial(Lines, x_name="size on each rank", x_unit="bytes", log_x=True)
Parts = frozenset[int]
"""The ranks whose contributions a chunk has summed up."""


class CollectiveStep(NamedTuple):
    """Who sends which chunk to whom in one step, and what every rank holds of each chunk after it."""

    sends: tuple[tuple[int, int, int], ...]  # from, to, chunk
    held: tuple[tuple[Parts, ...], ...]  # by rank and chunk


def collective_steps(operation: str, algorithm: str, ranks: int) -> list[CollectiveStep]:
    """Return the steps of a collective over `ranks`, each of which contributes as many chunks as there are ranks.

    A ring sends one chunk from every rank to the next. A tree sends all chunks up to rank 0 and down again. A
    hierarchical all-reduce reduces and scatters inside each node, all-reduces its parts between nodes, and gathers.
    """
    has = {"all-gather": lambda rank, chunk: rank == chunk, "broadcast": lambda rank, chunk: rank == 0}
    begins = has.get(operation, lambda rank, chunk: True)
    every = range(ranks)
    held = tuple(tuple(frozenset({rank} if begins(rank, chunk) else ()) for chunk in every) for rank in every)
    steps = [CollectiveStep((), held)]
    for sends, adds in ROUNDS[algorithm](operation, ranks):
        new = [list(row) for row in held]
        for source, target, chunk in sends:
            new[target][chunk] = new[target][chunk] | held[source][chunk] if adds else held[source][chunk]
        held = tuple(map(tuple, new))
        steps.append(CollectiveStep(tuple(sends), held))
    return steps


Round = tuple[list[tuple[int, int, int]], bool]
"""What is sent in a step, and whether the receiver adds it to what it holds."""


def _ring_rounds(operation: str, ranks: int) -> list[Round]:
    reduces = [
        ([(rank, (rank + 1) % ranks, (rank - 1 - turn) % ranks) for rank in range(ranks)], True)
        for turn in range(ranks - 1)
    ]
    gathers = [
        ([(rank, (rank + 1) % ranks, (rank - turn) % ranks) for rank in range(ranks)], False)
        for turn in range(ranks - 1)
    ]
    if operation == "broadcast":  # the chunks follow each other along the ring
        return [
            ([(rank, rank + 1, turn - rank) for rank in range(ranks - 1) if 0 <= turn - rank < ranks], False)
            for turn in range(2 * ranks - 2)
        ]
    return {"all-reduce": reduces + gathers, "reduce-scatter": reduces, "all-gather": gathers}[operation]


def _tree_rounds(operation: str, ranks: int) -> list[Round]:
    levels = math.ceil(math.log2(ranks)) if ranks > 1 else 0
    every = range(ranks)
    up: list[Round] = [
        ([(rank, rank - 2**level, chunk) for rank in range(2**level, ranks, 2 ** (level + 1)) for chunk in every], True)
        for level in range(levels)
    ]
    down: list[Round] = [
        (
            [(rank - 2**level, rank, chunk) for rank in range(2**level, ranks, 2 ** (level + 1)) for chunk in every],
            False,
        )
        for level in reversed(range(levels))
    ]
    return down if operation == "broadcast" else up + down


def node_size(ranks: int) -> int:
    """Return how many ranks a node has in the hierarchical picture: a divisor near the root, 1 for a prime."""
    return max(each for each in range(1, math.isqrt(ranks) + 1) if ranks % each == 0)


def _hierarchical_rounds(operation: str, ranks: int) -> list[Round]:
    """Return a reduce-scatter inside each node, an all-reduce between equal ranks of the nodes, and an all-gather.

    A node has `node_size` ranks. Rank i of a node is responsible for the chunks i, i + n, i + 2n and so on.
    """
    size = node_size(ranks)
    nodes = ranks // size
    rounds: list[Round] = []

    def inside(turn: int, first: int) -> list[tuple[int, int, int]]:
        """Return what the ranks of every node send to the next in their node: the chunks of one of them."""
        return [
            (node * size + at, node * size + (at + 1) % size, part * size + (at - first - turn) % size)
            for node in range(nodes) for at in range(size) for part in range(nodes)
        ]  # fmt: skip

    def between(turn: int, first: int) -> list[tuple[int, int, int]]:
        """Return what equal ranks of the nodes send to the next node: one of the chunks of this rank."""
        return [
            (node * size + at, (node + 1) % nodes * size + at, (node - first - turn) % nodes * size + at)
            for node in range(nodes) for at in range(size)
        ]  # fmt: skip

    rounds += [(inside(turn, 1), True) for turn in range(size - 1)]
    rounds += [(between(turn, 1), True) for turn in range(nodes - 1)]
    rounds += [(between(turn, 0), False) for turn in range(nodes - 1)]
    rounds += [(inside(turn, 0), False) for turn in range(size - 1)]
    return rounds


ROUNDS = {"ring": _ring_rounds, "tree": _tree_rounds, "hierarchical": _hierarchical_rounds}


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    operation = controls.choice("operation", "operation", "all-reduce", OPERATIONS)
    algorithms = ALGORITHMS if operation == "all-reduce" else ALGORITHMS[:2] if operation == "broadcast" else ("ring",)
    algorithm = controls.choice("algorithm", "algorithm", "ring", algorithms)
    ranks = controls.whole("ranks", "ranks", 4, least=2, most=MAX_RANKS)
    size = controls.number("bytes", "bytes on each rank", 2**28, least=1, most=1e13, log=True)
    near = subject.cluster.levels[0]
    latency = controls.number("alpha", "latency of a message in microseconds", near.latency * 1e6, least=0.01, most=1e6,
                              log=True)  # fmt: skip
    rate = controls.number("beta", "GB/s of a link", near.bandwidth / 1e9, least=0.001, most=1e5, log=True)
    steps = collective_steps(operation, algorithm, ranks)
    at = min(controls.whole("step", "step to draw", 1, least=0, most=2 * MAX_RANKS), len(steps) - 1)
    seconds, bandwidth = latency * 1e-6, rate * 1e9  # of a message, of a link
    is_run = subject.run is not None or subject.life is not None or subject.comm is not None
    chunk_bytes = size / ranks
    sent = [sum(source == rank for step in steps for source, _, _ in step.sends) for rank in range(ranks)]
    total = 0.0
    for step in steps[1:]:
        counts = Counter(source for source, _, _ in step.sends), Counter(target for _, target, _ in step.sends)
        busiest = max((each for found in counts for each in found.values()), default=0)
        total += seconds + chunk_bytes * busiest / bandwidth
    symbols = {"all-reduce": "2 (N - 1) / N x M", "broadcast": "M"}.get(operation, "(N - 1) / N x M")
    step_counts = {
        "ring": "2 (N - 1)" if operation in ("all-reduce", "broadcast") else "N - 1",
        "tree": "2 log2 N" if operation == "all-reduce" else "log2 N",
        "hierarchical": "(n - 1) + 2 (N / n - 1) + (n - 1)",
    }
    if algorithm != "ring":
        symbols = "the chunks that it sends in all steps"
    numbers = as_is(f"N = {ranks}, M = {size:,.0f} B")
    per_step = as_is(f"{seconds * 1e6:.3g} us, {bandwidth / 1e9:.3g} GB/s")
    formulas = (
        Formula("sent by a rank, at most", symbols, numbers, max(sent) * chunk_bytes, "bytes"),
        Formula("steps", step_counts[algorithm], as_is(f"N = {ranks}"), len(steps) - 1, "count"),
        Formula("time", "steps x latency + bytes of the busiest rank / bandwidth", per_step, total, "seconds"),
    )
    shown = range(len(steps)) if ranks <= MAX_WHOLE_RANKS else sorted({0, max(0, at - 1), at, len(steps) - 1})
    pictures = []  # of the chunks of all ranks after a step: the ranks whose values each has summed up
    rows = tuple(say("rank {rank}", rank=rank) for rank in range(ranks))
    columns = tuple(say("chunk {chunk}", chunk=chunk) for chunk in range(ranks))
    for number in shown:
        title = say("before") if not number else say("after step {step}", step=number)
        received = {(target, chunk) for _, target, chunk in steps[number].sends}
        labels = tuple(tuple(as_is(_ranges(parts)) for parts in row) for row in steps[number].held)
        colors = tuple(tuple(int((rank, chunk) in received) for chunk in range(ranks)) for rank in range(ranks))
        pictures.append(Matrix(title=title, rows=rows, columns=columns, labels=labels, colors=colors))
    said = say("Each rank has {ranks} chunks. A cell lists the ranks whose values are summed up in it; what a rank has "
               "just received is marked.", ranks=ranks)  # fmt: skip
    explained = Mode(sentences=(said,), formulas=formulas, figures=(_graph(steps, at), *pictures))
    return as_modes(explained, _simulate(subject, operation), _live(subject, operation) if is_run else None)


def _graph(steps: Sequence[CollectiveStep], at: int) -> NodeGraph:
    step, ranks = steps[at], len(steps[0].held)
    places = [(0.5 + 0.4 * math.sin(2 * math.pi * rank / ranks), 0.5 - 0.4 * math.cos(2 * math.pi * rank / ranks))
              for rank in range(ranks)]  # fmt: skip
    pairs: dict[tuple[int, int], list[int]] = {}
    for source, target, chunk in step.sends:
        pairs.setdefault((source, target), []).append(chunk)
    arrows = [GraphArrow(source=source, target=target, text=as_is(_ranges(chunks)))
              for (source, target), chunks in pairs.items()]  # fmt: skip
    kinds = {target: "receives" for _, target in pairs}
    nodes = tuple(GraphNode(name=as_is(at), x=x, y=y, kind=kinds.get(at, "idle")) for at, (x, y) in enumerate(places))
    title = say("Step {step} of {steps}: which chunks each rank sends", step=at, steps=len(steps) - 1)
    return NodeGraph(title=title if at else say("Before the first step"), nodes=nodes, arrows=tuple(arrows))


def _ranges(numbers: Iterable[int]) -> str:
    """Return numbers as a short text: `3`, `0,2`, or `0-7` for a range."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts)


def _seconds_of(operation: str, size: float, ring: Ring) -> float:
    return float((all_reduce_seconds if operation == "all-reduce" else all_gather_seconds)(size, ring))


def _simulate(subject: Subject, operation: str) -> Mode:
    cluster = subject.cluster
    if cluster.world_size == 1:
        return Mode(sentences=("The cluster has a single device: nothing is sent.",))
    groups = {say("{count} devices of a node", count=cluster.devices_per_node): cluster.devices_per_node}
    if cluster.num_nodes > 1:
        groups[say("all {count} devices", count=cluster.world_size)] = cluster.world_size
    rings = {name: ring_of(cluster.levels, num, 1) for name, num in groups.items() if num > 1}
    series = tuple(
        ValueSeries(name, tuple(_seconds_of(operation, size, ring) for size in SIZES)) for name, ring in rings.items()
    )
    title = say("Time of {operation} by size", operation=say(operation))
    lines = lines_by_size(title=title, unit="seconds", x=SIZES, series=series, log_y=True)
    rates = []  # on the link of a rank
    for (name, ring), each in zip(rings.items(), series, strict=True):
        factor = (2 if operation == "all-reduce" else 1) * (ring.num_ranks - 1) / ring.num_ranks
        pairs = zip(SIZES, each.values, strict=True)
        rates.append(ValueSeries(name, tuple(factor * size / value if value else None for size, value in pairs)))
    bus = lines_by_size(title="Bus bandwidth", unit="bytes/second", x=SIZES, series=tuple(rates))
    measured = [link.name for link in cluster.levels if link.reached]
    said = say("The rates are those of the catalogue. Measure the real links with `trimaran bench comm`.")
    if measured:
        said = say("The rates of {links} were measured on these machines.", links=", ".join(measured))
    return Mode(sentences=(said,), figures=(lines, bus))


def _live(subject: Subject, operation: str) -> Mode:
    result = subject.comm
    if result is None:
        return Mode(sentences=(NOT_MEASURED,))
    curves = [each for each in result.curves if each.collective == COLLECTIVES[operation]]
    if not curves:
        return Mode(sentences=(say("The file has no {operation}.", operation=say(operation)),))
    figures, said, levels = [], [], subject.cluster.levels
    for curve in curves:
        sizes = tuple(float(point.num_bytes) for point in curve.points)
        stride = 1 if curve.nodes == 1 else max(1, subject.cluster.devices_per_node * curve.nodes // curve.ranks)
        series = [ValueSeries("measured", tuple(point.seconds for point in curve.points))]
        if curve.ranks <= subject.cluster.world_size:
            ring = ring_of(levels, curve.ranks, stride)
            series.insert(0, ValueSeries("cost model", tuple(_seconds_of(operation, size, ring) for size in sizes)))
        title = say("{operation} of {ranks} ranks, group {group}", operation=say(operation), ranks=curve.ranks,
                    group=curve.group)  # fmt: skip
        figures.append(lines_by_size(title=title, unit="seconds", x=sizes, series=tuple(series), log_y=True,
                                     dots=("measured",)))  # fmt: skip
        reached, planned = curve.best_bus_bandwidth / 1e9, curve.planned_gb_per_second
        text = "Group {group} reaches {reached:.3g} GB/s on the bus."
        if planned:
            text = (
                "Group {group} reaches {reached:.3g} GB/s on the bus; the planner expects {planned:.3g} ({error:+.0%})."
            )
        error = planned / reached - 1 if planned else 0.0
        said.append(say(text, group=curve.group, reached=reached, planned=planned, error=error))
    return Mode(sentences=tuple(said), figures=tuple(figures))
