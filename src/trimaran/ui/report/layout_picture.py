"""The parallel layout of a run as a picture: a table of ranks, by what they hold and what they compute."""

from collections.abc import Iterator, Sequence
from typing import Any

from trimaran.core import Mesh
from trimaran.ui.report.markup import Html, tag
from trimaran.ui.report.words import say

Tree = dict[str, Any]
COLORS = ("blue", "green", "orange", "purple", "sky", "brown", "red", "grey")
MAX_SHOWN = 8  # rows, columns, and ranks in a cell; of more, the first and the last are shown
MAX_SHOWN_SLICES = 4  # of a cell, if there are several stages
HELD = {"none": "nothing", "optimizer": "the optimizer state", "gradients": "gradients and optimizer state",
        "parameters": "the weights"}  # fmt: skip
MEANINGS = {
    "dp_replicate": "replicas, each with the whole model and other samples",
    "dp_shard": "shards: each rank holds a part of {held}, and has its own samples",
    "tp": "ranks that share every matmul (tensor parallel)",
    "pp": "pipeline stages, each with some of the layers",
    "cp": "parts of each sequence (context parallel)",
    "ep": "groups of experts (expert parallel)",
}


def rank_layout(facts: Tree) -> Html:
    """Return the ranks as a table: a column for each pipeline stage, a row for each part of the data.

    Ranks that hold the same part have the same colour. The ranks of a cell share each matmul.
    """
    mesh = Mesh.model_validate(facts["plan"]["mesh"])
    axes = [(name, degree) for name in MEANINGS if (degree := getattr(mesh, name)) > 1]
    held = say(HELD[facts["plan"]["sharding"]])
    meanings = [tag("li", None, tag("b", None, f"{degree}"), f" {say(MEANINGS[name], held=held)}")
                for name, degree in axes]  # fmt: skip
    words = tag("ul", {"class": "meanings"}, *meanings)
    if not axes:
        return tag("p", None, say("One rank holds the whole model."))
    stages = [_stage(facts, mesh, stage) for stage in range(mesh.pp)]
    head = tag("tr", None, tag("th", None, ""), *(tag("th", None, _skipped(each, stages)) for each in _shown(mesh.pp)))
    rows = [_row(mesh, data) for data in _shown(mesh.data)]
    picture = tag(
        "table", {"class": "ranks"}, tag("thead", None, head) if mesh.pp > 1 else "", tag("tbody", None, *rows)
    )
    return tag("div", {"class": "layout"}, tag("div", {"class": "scroll"}, picture), words)


def _stage(facts: Tree, mesh: Mesh, stage: int) -> str:
    layers = facts["plan"]["pipeline"]["stages"]
    if len(layers) == mesh.pp:
        return say("stage {stage}, {layers} layers", stage=stage, layers=layers[stage])
    return say("stage {stage}", stage=stage)


def _row(mesh: Mesh, data: int | None) -> Html:
    if data is None:
        left = mesh.data - MAX_SHOWN + 1
        return tag(
            "tr",
            None,
            tag("th", None, say("{count} more", count=left)),
            *(tag("td", None, "⋮") for _ in _shown(mesh.pp)),
        )
    replica, shard, part = data // mesh.shards, data % mesh.shards // mesh.cp, data % mesh.cp
    names = [("replica", replica, mesh.dp_replicate), ("shard", shard, mesh.dp_shard), ("part", part, mesh.cp)]
    label = ", ".join(f"{say(name)} {index}" for name, index, degree in names if degree > 1)
    cells = [tag("td", None, *_ranks(mesh, stage, data)) for stage in _shown(mesh.pp)]
    return tag("tr", None, tag("th", None, label), *cells)


def _ranks(mesh: Mesh, stage: int | None, data: int) -> Iterator[Html]:
    """Yield the ranks of a cell; of a stage that is not shown, dots."""
    if stage is None:
        yield tag("span", {"class": "more"}, "…")
        return
    for slice_ in _shown(mesh.tp, MAX_SHOWN if mesh.pp == 1 else MAX_SHOWN_SLICES):
        if slice_ is None:
            yield tag("span", {"class": "more"}, "…")
            continue
        rank = (stage * mesh.data + data) * mesh.tp + slice_
        held = (stage * mesh.shards + data % mesh.shards) * mesh.tp + slice_  # what of the model it holds
        yield tag("span", {"class": f"rank {COLORS[held % len(COLORS)]}"}, f"{rank}")


def _shown(count: int, most: int = MAX_SHOWN) -> list[int | None]:
    """Return the indices to show; None stands for those between."""
    return [*range(count)] if count <= most else [*range(most - 2), None, count - 1]


def _skipped(index: int | None, names: Sequence[str]) -> str:
    return "…" if index is None else names[index]
