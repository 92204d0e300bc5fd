"""Collectives step by step: who holds which parts of the data after each step, what is sent, and how long it takes."""

import math
from typing import NamedTuple

from trimaran.cost.collective import all_gather_seconds, all_reduce_seconds, ring_of
from trimaran.viz.figures import Formula, Lines, Matrix, Mode, ModeName, ValueSeries
from trimaran.viz.subject import Controls, Subject

NAME = "CollectiveCommunicationPrimitives"
TITLE = "Collectives, step by step"
QUESTION = "What does each rank send in each step of a collective, and how long does it take by size?"
OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "broadcast")
ALGORITHMS = ("ring", "tree")
MAX_RANKS = 16
SIZES = tuple(2.0**power for power in range(10, 34, 2))

Parts = frozenset[int]
"""The ranks whose contributions a chunk has summed up."""


class CollectiveStep(NamedTuple):
    """Who sends which chunk to whom in one step, and what every rank holds of each chunk after it."""

    sends: tuple[tuple[int, int, int], ...]  # from, to, chunk
    held: tuple[tuple[Parts, ...], ...]  # by rank and chunk


def collective_steps(operation: str, algorithm: str, ranks: int) -> list[CollectiveStep]:
    """Return the steps of a collective over `ranks`, each of which contributes as many chunks as there are ranks.

    A ring sends one chunk from every rank to the next. A tree sends all chunks up to rank 0 and down again.
    """
    held = _before(operation, ranks)
    steps = [CollectiveStep((), _frozen(held))]
    rounds = _tree_rounds(operation, ranks) if algorithm == "tree" else _ring_rounds(operation, ranks)
    for sends, adds in rounds:
        new = [list(row) for row in held]
        for source, target, chunk in sends:
            new[target][chunk] = new[target][chunk] | held[source][chunk] if adds else held[source][chunk]
        held = new
        steps.append(CollectiveStep(tuple(sends), _frozen(held)))
    return steps


def _frozen(held: list[list[Parts]]) -> tuple[tuple[Parts, ...], ...]:
    return tuple(map(tuple, held))


def _before(operation: str, ranks: int) -> list[list[Parts]]:
    """Return what the ranks hold at first."""
    nothing: Parts = frozenset()
    match operation:
        case "all-gather":
            return [
                [frozenset({rank}) if rank == chunk else nothing for chunk in range(ranks)] for rank in range(ranks)
            ]
        case "broadcast":
            return [[frozenset({0}) if rank == 0 else nothing for _ in range(ranks)] for rank in range(ranks)]
    return [[frozenset({rank}) for _ in range(ranks)] for rank in range(ranks)]


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


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: the steps of one collective, and its time by size on the subject's links."""
    operation = controls.choice("operation", "operation", "all-reduce", OPERATIONS)
    can_tree = operation in ("all-reduce", "broadcast")
    algorithm = controls.choice("algorithm", "algorithm", "ring", ALGORITHMS if can_tree else ("ring",))
    ranks = controls.whole("ranks", "ranks", 4, least=2, most=MAX_RANKS)
    size = controls.number("bytes", "bytes on each rank", 2**28, least=1, most=1e14)
    modes: dict[ModeName, Mode] = {
        "explain": _explain(operation, algorithm, ranks, size),
        "simulate": _simulate(subject, operation),
    }
    return modes


def _explain(operation: str, algorithm: str, ranks: int, size: float) -> Mode:
    steps = collective_steps(operation, algorithm, ranks)
    chunk = size / ranks
    sent = [sum(source == rank for step in steps for source, _, _ in step.sends) for rank in range(ranks)]
    symbols = {"all-reduce": "2 (N - 1) / N x M", "broadcast": "M"}.get(operation, "(N - 1) / N x M")
    formulas = [
        Formula(
            name="sent by a rank, at most",
            symbols=symbols if algorithm == "ring" else "M x its children and its parent",
            numbers=f"N = {ranks}, M = {size:,.0f} B",
            value=max(sent) * chunk,
            unit="bytes",
        ),
        Formula(
            name="steps", symbols=_step_count(operation, algorithm), numbers=f"N = {ranks}", value=len(steps) - 1,
            unit="count",
        ),
    ]  # fmt: skip
    pictures = [_picture(number, step, ranks) for number, step in enumerate(steps)]
    return Mode(formulas=tuple(formulas), figures=tuple(pictures))


def _step_count(operation: str, algorithm: str) -> str:
    if algorithm == "tree":
        return "2 log2 N" if operation == "all-reduce" else "log2 N"
    return "2 (N - 1)" if operation in ("all-reduce", "broadcast") else "N - 1"


def _picture(number: int, step: CollectiveStep, ranks: int) -> Matrix:
    """Return the chunks of all ranks after a step: the ranks whose values each has summed up."""
    labels = tuple(tuple("+".join(map(str, sorted(parts))) for parts in row) for row in step.held)
    received = {(target, chunk) for _, target, chunk in step.sends}
    colors = tuple(tuple(int((rank, chunk) in received) for chunk in range(ranks)) for rank in range(ranks))
    return Matrix(
        title="before" if not number else f"after step {number}",
        rows=tuple(f"rank {rank}" for rank in range(ranks)),
        columns=tuple(f"chunk {chunk}" for chunk in range(ranks)),
        labels=labels,
        colors=colors,
    )


def _simulate(subject: Subject, operation: str) -> Mode:
    cluster = subject.cluster
    if cluster.world_size == 1:
        return Mode(sentences=("The cluster has a single device: nothing is sent.",))
    seconds = all_reduce_seconds if operation == "all-reduce" else all_gather_seconds
    groups = {f"{cluster.devices_per_node} devices of a node": cluster.devices_per_node,
              f"all {cluster.world_size} devices": cluster.world_size}  # fmt: skip
    series = tuple(
        ValueSeries(name=name, values=tuple(float(seconds(size, ring_of(cluster.levels, num, 1))) for size in SIZES))
        for name, num in groups.items()
        if num > 1
    )
    lines = Lines(
        title=f"Time of an {operation} by size",
        x_name="bytes",
        x_unit="bytes",
        unit="seconds",
        x=SIZES,
        series=series,
        log_x=True,
        log_y=True,
    )
    bus = Lines(
        title="Bus bandwidth",
        x_name="bytes",
        x_unit="bytes",
        unit="bytes/second",
        x=SIZES,
        series=tuple(
            ValueSeries(
                name=each.name,
                values=tuple(
                    _bus_bytes(operation, size, num) / value if value else None
                    for size, value in zip(SIZES, each.values, strict=True)
                ),
            )
            for each, num in zip(series, [num for num in groups.values() if num > 1], strict=True)
        ),
        log_x=True,
    )
    measured = "Measure it on the real links with `trimaran bench comm`."
    return Mode(sentences=(measured,), figures=(lines, bus))


def _bus_bytes(operation: str, size: float, ranks: int) -> float:
    return (2 if operation == "all-reduce" else 1) * (ranks - 1) / ranks * size
