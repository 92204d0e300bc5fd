"""Which rank is where: nodes and devices, the groups of every axis, and the links that each group uses."""

from collections.abc import Iterator

from trimaran.core import Mesh
from trimaran.cost.collective import ring_of
from trimaran.viz.figures import Matrix, Mode, ModeName, Table
from trimaran.viz.subject import Controls, Subject

NAME = "ThreeDParallelismVisualizer"
TITLE = "Ranks, nodes and groups"
QUESTION = "Which ranks work together along each axis, and which links connect them?"
# From the outermost to the innermost, as the trainer numbers its ranks.
ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
MEANINGS = {
    "pp": "pipeline stages",
    "dp_replicate": "replicas",
    "dp_shard": "shards",
    "cp": "parts of a sequence",
    "tp": "slices of each matmul",
}
MAX_SHOWN_NODES = 64
MAX_SHOWN_GROUPS = 8


def coordinates_of(rank: int, mesh: Mesh) -> dict[str, int]:
    """Return the position of a rank along each axis."""
    found = {}
    for axis in reversed(ORDER):
        rank, found[axis] = divmod(rank, getattr(mesh, axis))
    return found


def groups_of(mesh: Mesh, axis: str) -> list[list[int]]:
    """Return the groups of ranks that differ along `axis` only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        others = tuple(at for name, at in coordinates_of(rank, mesh).items() if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def modes_of(subject: Subject, controls: Controls) -> dict[ModeName, Mode]:
    """Return the modes: which rank is where, coloured by one axis."""
    mesh = subject.plan.mesh
    degrees = {axis: controls.whole(axis, MEANINGS[axis], getattr(mesh, axis), least=1, most=1024) for axis in ORDER}
    used = [axis for axis in ORDER if degrees[axis] > 1] or ["dp_replicate"]
    colored = controls.choice("color", "axis that is coloured", used[-1], tuple(used))
    drawn = Mesh(**degrees)
    return {"explain": _explain(subject, drawn, colored)}


def _explain(subject: Subject, mesh: Mesh, colored: str) -> Mode:
    product = " x ".join(f"{getattr(mesh, axis)} {axis}" for axis in ORDER if getattr(mesh, axis) > 1) or "1"
    sentences = [f"{product} = {mesh.world_size:,} ranks on {subject.cluster}."]
    if mesh.world_size > subject.cluster.world_size:
        sentences.append(f"The cluster has only {subject.cluster.world_size:,} devices.")
    elif mesh.world_size < subject.cluster.world_size:
        sentences.append(f"{subject.cluster.world_size - mesh.world_size:,} devices are idle.")
    return Mode(sentences=tuple(sentences), figures=(_matrix(subject, mesh, colored), _table(subject, mesh)))


def _matrix(subject: Subject, mesh: Mesh, colored: str) -> Matrix:
    """Return a row for each node and a column for each of its devices; equal colours are equal coordinates."""
    width = subject.cluster.devices_per_node
    nodes = range(min(MAX_SHOWN_NODES, -(-mesh.world_size // width)))
    ranks = [[rank for rank in range(node * width, (node + 1) * width) if rank < mesh.world_size] for node in nodes]
    used = [axis for axis in ORDER if getattr(mesh, axis) > 1]
    labels = [[_label(rank, mesh, used) for rank in row] + [""] * (width - len(row)) for row in ranks]
    colors = [[1 + coordinates_of(rank, mesh)[colored] for rank in row] + [0] * (width - len(row)) for row in ranks]
    return Matrix(
        title=f"Ranks by node, coloured by {MEANINGS[colored]}",
        rows=tuple(f"node {node}" for node in nodes),
        columns=tuple(f"device {device}" for device in range(width)),
        labels=tuple(map(tuple, labels)),
        colors=tuple(map(tuple, colors)),
    )


def _label(rank: int, mesh: Mesh, used: list[str]) -> str:
    position = coordinates_of(rank, mesh)
    return f"{rank}: " + " ".join(f"{axis}{position[axis]}" for axis in used)


def _table(subject: Subject, mesh: Mesh) -> Table:
    return Table(
        title="Groups",
        columns=("axis", "meaning", "groups", "ranks in each", "link", "the first groups"),
        rows=tuple(_rows(subject, mesh)),
    )


def _rows(subject: Subject, mesh: Mesh) -> Iterator[tuple[str, ...]]:
    for axis in reversed(ORDER):
        if (degree := getattr(mesh, axis)) == 1:
            continue
        groups = groups_of(mesh, axis)
        stride = groups[0][1] - groups[0][0]
        link = ring_of(subject.cluster.levels, degree, stride).link if mesh.world_size > 1 else ""
        shown = "; ".join(", ".join(map(str, each[:MAX_SHOWN_GROUPS])) for each in groups[:2])
        yield axis, MEANINGS[axis], f"{len(groups):,}", str(degree), link, shown
