"""Which rank is where: nodes and devices, the groups of every axis, and the links that each group uses."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from trimaran.core import Mesh, UserError
from trimaran.cost import all_reduce_seconds, ring_of
from trimaran.planner import check_plan
from trimaran.ui.language import as_is, say
from trimaran.ui.viz.figures import Matrix, Mode, ModeName, Table, plain_bars, show_duration
from trimaran.ui.viz.subject import Controls, RunMedians, Subject, late_ranks, predicted_waits

NAME = "ThreeDParallelismVisualizer"
TITLE = "Ranks, nodes and groups"
QUESTION = "Which ranks work together along each axis, and which links connect them?"
# From the outermost to the innermost, as the trainer numbers its ranks.
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ORDERS = {
    "pp-dp-cp-tp": ORDER,
    "dp-pp-cp-tp": ("dp_replicate", "dp_shard", "pp", "cp", "tp"),
    "tp-cp-dp-pp": ("tp", "cp", "dp_replicate", "dp_shard", "pp"),
}
MEANINGS = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas",
    "dp_shard": "shards",
    "cp": "parts of a sequence",
    "tp": "slices of each matmul",
}
MAX_SHOWN_NODES = 64
MAX_DRAWN_RANKS = 4096
MAX_SHOWN_GROUPS = 8
SCORED_BYTES = float(1 << 26)  # of the collective with which placements are compared


def coordinates_of(rank: int, mesh: Mesh, order: Sequence[str] = ORDER) -> dict[str, int]:
    found = {}
    for axis in reversed(order):
        rank, found[axis] = divmod(rank, getattr(mesh, axis))
    return found


def groups_of(mesh: Mesh, axis: str, order: Sequence[str] = ORDER) -> list[list[int]]:
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        others = tuple(at for name, at in coordinates_of(rank, mesh, order).items() if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    mesh = subject.plan.mesh
    degrees = {
        axis: controls.whole(axis, MEANINGS[axis], getattr(mesh, axis), least=1, most=1024, log=True) for axis in ORDER
    }
    used = [axis for axis in ORDER if degrees[axis] > 1] or ["dp_replicate"]
    colored = controls.choice("color", "axis that is coloured", used[-1], tuple(used))
    order = ORDERS[controls.choice("order", "axes from the outermost to the innermost", "pp-dp-cp-tp", tuple(ORDERS))]
    drawn = Mesh(**degrees)
    live: dict[ModeName, Mode] = {"live": _live(subject, subject.run)} if subject.run is not None else {}
    if drawn.world_size > MAX_DRAWN_RANKS:
        many = Mode(sentences=(say("{ranks:,} ranks are too many to draw.", ranks=drawn.world_size),))
        return {"explain": many, "simulate": many, **live}
    product = " x ".join(f"{getattr(drawn, axis)} {axis}" for axis in ORDER if getattr(drawn, axis) > 1) or "1"
    sentences = [say("{product} = {ranks:,} ranks on {cluster}.", product=product, ranks=drawn.world_size,
                     cluster=subject.cluster)]  # fmt: skip
    if drawn.world_size > subject.cluster.world_size:
        sentences.append(say("The cluster has only {count:,} devices.", count=subject.cluster.world_size))
    elif drawn.world_size < subject.cluster.world_size:
        idle = subject.cluster.world_size - drawn.world_size
        sentences.append(say("{count:,} devices are idle.", count=idle))
    if tuple(order) != ORDER:
        sentences.append(say("The trainer numbers its ranks as pp-dp-cp-tp; this is another order."))
    columns = ("axis", "meaning", "groups", "ranks in each", "link", "all-reduce of 64 MiB", "the first groups")
    table = Table("Groups", columns, tuple(_rows(subject, drawn, order)))
    # A row for each node and a column for each of its devices; equal colours are equal coordinates.
    cells = _cells(subject, drawn)
    split = [axis for axis in order if getattr(drawn, axis) > 1]

    def label(rank: int) -> str:
        position = coordinates_of(rank, drawn, order)
        return as_is(f"{rank}: " + " ".join(f"{axis}{position[axis]}" for axis in split))

    labels = [["" if rank is None else label(rank) for rank in row] for row in cells]
    colors = [[0 if rank is None else 1 + coordinates_of(rank, drawn, order)[colored] for rank in row] for row in cells]
    figures = (
        Matrix(
            title=say("Ranks by node, coloured by {axis}", axis=say(MEANINGS[colored])),
            labels=tuple(map(tuple, labels)),
            colors=tuple(map(tuple, colors)),
            **_names_of(cells),
        ),
        table,
    )
    explained = Mode(sentences=tuple(sentences), figures=figures)
    return {"explain": explained, "simulate": _simulate(subject, drawn), **live}


def _cells(subject: Subject, mesh: Mesh) -> list[list[int | None]]:
    width = subject.cluster.devices_per_node
    nodes = range(min(MAX_SHOWN_NODES, -(-mesh.world_size // width)))
    return [[rank if rank < mesh.world_size else None for rank in range(node * width, (node + 1) * width)]
            for node in nodes]  # fmt: skip


def _names_of(cells: list[list[int | None]]) -> dict[str, Any]:
    """Return the names of the rows and columns of `_cells`."""
    rows = tuple(say("node {node}", node=node) for node in range(len(cells)))
    return {"rows": rows, "columns": tuple(say("device {device}", device=at) for at in range(len(cells[0])))}


def _rows(subject: Subject, mesh: Mesh, order: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for axis in reversed(order):
        if (degree := getattr(mesh, axis)) == 1:
            continue
        groups = groups_of(mesh, axis, order)
        stride = math.prod(getattr(mesh, inner) for inner in order[order.index(axis) + 1 :])  # between neighbours
        ring = ring_of(subject.cluster.levels, degree, stride)
        shown = "; ".join(", ".join(map(str, each[:MAX_SHOWN_GROUPS])) for each in groups[:2])
        yield (as_is(axis), MEANINGS[axis], as_is(f"{len(groups):,}"), as_is(degree), as_is(ring.link),
               as_is(show_duration(float(all_reduce_seconds(SCORED_BYTES, ring)))), as_is(shown))  # fmt: skip


def _simulate(subject: Subject, mesh: Mesh) -> Mode:
    plan, question = subject.plan, subject.question
    if mesh != plan.mesh:
        batch = plan.global_batch // max(1, mesh.dp * plan.micro_batch) or 1
        sharding = plan.sharding if mesh.dp_shard > 1 else "none"
        fields = {"mesh": mesh, "grad_accum": batch, "sharding": sharding, "prediction": None}
        fields |= {"pipeline": plan.pipeline.model_copy(update={"stages": ()})}
        plan = plan.model_copy(update=fields)
        try:
            check_plan(plan, question.recipe, question.spec, subject.cluster, question.outline)
        except UserError as error:
            return Mode(sentences=(say("The planner refuses this mesh: {why}.", why=error.what),))
    changed = replace(subject, plan=plan)
    prediction, waits = changed.prediction, predicted_waits(changed)
    comm = show_duration(prediction.time.get("comm", 0.0))
    said = say("A step is predicted to take {step}, of which {comm} is exposed communication.",
               step=show_duration(prediction.step_seconds), comm=comm)  # fmt: skip
    if not waits:
        return Mode(sentences=(said, say("A single rank waits for nobody.")))
    named = {say("all ranks") if axis == "world" else as_is(axis): value for axis, value in waits.items()}
    bars = plain_bars("Exposed communication of a step, by axis", "seconds", "predicted", named)
    return Mode(sentences=(said,), figures=(bars,))


def _live(subject: Subject, run: RunMedians) -> Mode:
    total = sum(run.slowest.values())
    if not total:
        return Mode(sentences=("The run has one rank, or has not compared its ranks yet.",))
    mesh = subject.plan.mesh
    cells = _cells(subject, mesh)
    shares = {rank: count / total for rank, count in run.slowest.items()}
    busy = run.ranks.get("busy_seconds")
    heat = Matrix(
        title="Ranks by node, shaded by how often each was the slowest",
        labels=tuple(tuple("" if rank is None else as_is(f"{rank}: {shares.get(rank, 0.0):.0%}") for rank in row)
                     for row in cells),
        heat=tuple(tuple(None if rank is None else shares.get(rank, 0.0) for rank in row) for row in cells),
        **_names_of(cells),
    )  # fmt: skip
    worst = max(shares, key=shares.__getitem__)
    template = "Rank {rank} was the slowest in {share:.0%} of {count:,} compared steps; an equal share is {equal:.0%}."
    said = [say(template, rank=worst, share=shares[worst], count=total, equal=1 / mesh.world_size)]
    if busy is not None:
        said.append(say("The slowest rank computes {lag} longer than the median in a step.",
                        lag=show_duration(max(0.0, busy.most - busy.median))))  # fmt: skip
    return Mode(sentences=tuple(said), figures=(heat, *late_ranks(run)))
