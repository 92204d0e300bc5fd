"""Pictures of all ranks, also of a thousand: lag, memory and heartbeat as coloured cells, and who holds what."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

from trimaran.core import Mesh, show_bytes, show_seconds
from trimaran.ui.language import say
from trimaran.ui.report.figure_axis import SHOW
from trimaran.ui.report.markup import Html, known, note, table, tag

Tree = dict[str, Any]
LEVELS = ("level-0", "level-1", "level-2", "level-3", "level-4")  # classes in page.css, from harmless to bad
UNKNOWN = "level-none"
CELL, GAP = 20, 3  # in units of the picture
MAX_NUMBERED = 64  # ranks whose cells have their numbers inside
MAX_COLUMNS = 32
MAX_WORST = 8
HEARTBEAT_LIMITS = (5.0, 15.0, 30.0, 60.0)  # seconds
LAG_LIMITS = (0.02, 0.05, 0.1, 0.25)  # of a step
MEMORY_LIMITS = (0.5, 0.7, 0.85, 0.92)  # of the device
UNEVEN_LIMITS = (1.02, 1.05, 1.1, 1.25)  # of the median rank, if the memory of a device is not known
STATES = {
    "ok": ("good", "at work"),
    "late": ("fair", "late: the others wait for it"),
    "silent": ("bad", "silent: no heartbeat"),
    "failed": ("bad", "failed"),
    "ended": ("fair", "ended"),
    "missing": ("fair", "not started"),
}
TROUBLE = ("failed", "silent", "late", "missing")


def rank_matrix(facts: Tree) -> Html:
    ranks = facts["ranks_now"]
    if not ranks:
        return tag("p", None, say("No rank has started yet."))
    columns, ages = grid_columns(ranks["world_size"], ranks["per_node"]), _ages(ranks)
    step, known = ranks["step_seconds"], [each for each in ranks["memory_bytes"] if each]
    full = ranks["memory_total"] or (median(known) if known else 0.0)
    memory = say("Memory, of the device") if ranks["memory_total"] else say("Memory, of the median rank")
    shares = MEMORY_LIMITS if ranks["memory_total"] else UNEVEN_LIMITS
    draw, grids = partial(_draw, ranks), []
    if any(each is not None for each in ranks["lag_seconds"]) and step > 0:
        limits = [each * step for each in LAG_LIMITS]
        grids.append(draw(say("Lag, of a step"), ranks["lag_seconds"], limits, lambda each: f"{each / step:.0%}"))
    if full > 0:
        limits = [each * full for each in shares]
        grids.append(draw(memory, ranks["memory_bytes"], limits, lambda each: f"{each / full:.0%}"))
    grids.append(draw(say("Last heartbeat, seconds ago"), ages, HEARTBEAT_LIMITS, lambda each: f"{each:g}"))
    texts = json.dumps([_text(ranks, rank, ages) for rank in range(ranks["world_size"])], ensure_ascii=False,
                       separators=(",", ":"))  # fmt: skip
    inside = tag("div", {"class": "grids"}, *grids)
    figure = tag("figure", {"class": "rank-grids", "data-cells": texts}, inside, tag("output", None))
    states = [tag("li", None, tag("b", {"class": kind}, f"{ranks['state'].count(name):,}"), f" {say(meaning)}")
              for name, (kind, meaning) in STATES.items() if name in ranks["state"]]  # fmt: skip
    said = [say("Cells are ranks from left to right, {columns} in a row.", columns=columns)]
    if ranks["per_node"] and columns % ranks["per_node"] == 0 and columns > ranks["per_node"]:
        said.append(say("A node has {count} of them.", count=ranks["per_node"]))
    if ranks["measured_step"] is not None:
        lag = "Lag: how much later than the median rank of its stage a rank finished its own work of step {step}."
        said.append(say(lag, step=f"{ranks['measured_step']:,}"))
    summary = tag("ul", {"class": "legend states"}, *states)
    return tag("div", None, summary, figure, note(" ".join(said)), _worst(ranks))


def grid_columns(world_size: int, per_node: int) -> int:
    """Return the cells of a row: whole nodes if possible, and about as many rows as columns."""
    wanted = min(MAX_COLUMNS, max(8, round(world_size**0.5)))
    if world_size <= wanted:
        return world_size
    if per_node and per_node <= MAX_COLUMNS:
        return per_node * max(1, wanted // per_node)
    return wanted


def _ages(ranks: Tree) -> list[float | None]:
    """Return the age of each heartbeat: up to now of a live run, else up to the newest one of all ranks."""
    known = [each for each in ranks["heartbeat_time"] if each is not None]
    now = time.time() if ranks["is_live"] else max(known, default=0.0)
    return [None if each is None else max(0.0, now - each) for each in ranks["heartbeat_time"]]


def level_of(value: float | None, limits: Sequence[float]) -> str:
    return UNKNOWN if value is None else LEVELS[sum(value >= limit for limit in limits)]


def _draw(
    ranks: Tree, title: str, values: Sequence[float | None], limits: Sequence[float], show: Callable[[float], str]
) -> Html:
    """Return one quantity of all ranks as a grid. A value gets the level of the first of `limits` that it is below.

    The cells of a colour are one path, so that a thousand ranks take a few kilobytes.
    """
    columns = grid_columns(ranks["world_size"], ranks["per_node"])
    paths: dict[str, list[str]] = {}
    numbers = []
    for rank, value in enumerate(values):
        x, y = rank % columns * (CELL + GAP), rank // columns * (CELL + GAP)
        paths.setdefault(level_of(value, limits), []).append(f"M{x} {y}h{CELL}v{CELL}h-{CELL}z")
        if ranks["world_size"] <= MAX_NUMBERED:
            numbers.append(tag("text", {"x": x + CELL / 2, "y": y + CELL * 0.68, "text-anchor": "middle",
                                        "class": "cell-number"}, str(rank)))  # fmt: skip
    shapes = [tag("path", {"class": f"cells {kind}", "d": "".join(found)}) for kind, found in sorted(paths.items())]
    rows = -(-ranks["world_size"] // columns)
    width, height = (count * (CELL + GAP) - GAP for count in (columns, rows))
    bad = sum(level_of(each, limits) in LEVELS[3:] for each in values)
    counts = say("{bad} of {count} ranks in the two highest levels", bad=bad, count=len(values))
    about = {"role": "img", "data-columns": columns, "aria-label": f"{title}: {counts}"}
    size = {"viewBox": f"0 0 {width} {height}", "class": "rank-grid", "width": width * 1.5}
    svg = tag("svg", size | about, *shapes, *numbers)
    caption = tag("figcaption", None, tag("h3", None, title))
    names = [*(f"< {show(limit)}" for limit in limits), f"≥ {show(limits[-1])}"]
    items = [tag("li", None, tag("span", {"class": f"level-key {kind}"}, " "), name)
             for kind, name in zip(LEVELS, names, strict=True)]  # fmt: skip
    if any(each is None for each in values):
        items.append(tag("li", None, tag("span", {"class": f"level-key {UNKNOWN}"}, " "), say("not known")))
    return tag("div", {"class": "grid-box"}, caption, svg, tag("ul", {"class": "legend"}, *items))


def _text(ranks: Tree, rank: int, ages: Sequence[float | None]) -> str:
    age = ages[rank]
    lag, memory, section = ranks["lag_seconds"][rank], ranks["memory_bytes"][rank], ranks["section"][rank]
    parts = [say("rank {rank}", rank=rank), say(STATES[ranks["state"][rank]][1])]
    parts += [say("node {node}", node=ranks["node"][rank])] if ranks["node"][rank] is not None else []
    parts += [say("lag {time}", time=show_seconds(lag))] if lag is not None else []
    parts += [SHOW["bytes"](memory)] if memory is not None else []
    parts += [say("heartbeat {time} ago", time=show_seconds(age))] if age is not None else []
    parts += [say("in {section}, step {step}", section=section, step=ranks["step"][rank])] if section else []
    return "  ·  ".join(parts)


def _worst(ranks: Tree) -> Html:
    troubled = [rank for rank, state in enumerate(ranks["state"]) if state in TROUBLE]
    order = sorted(troubled, key=lambda rank: (TROUBLE.index(ranks["state"][rank]), -(ranks["lag_seconds"][rank] or 0)))
    if not order:
        return Html("")
    ages, lags, sizes = _ages(ranks), ranks["lag_seconds"], ranks["memory_bytes"]
    rows = [
        [say("rank {rank}", rank=rank), say(STATES[ranks["state"][rank]][1]), known(lags[rank], show_seconds),
         known(sizes[rank], show_bytes), known(ages[rank], show_seconds), ranks["section"][rank] or "-"]
        for rank in order[:MAX_WORST]
    ]  # fmt: skip
    columns = ["ranks to look at", "state", "lag", "memory", "last heartbeat", "it is in"]
    return table([say(each) for each in columns], rows)


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
    layers = facts["plan"]["pipeline"]["stages"]
    stages = [say("stage {stage}, {layers} layers", stage=stage, layers=layers[stage]) if len(layers) == mesh.pp
              else say("stage {stage}", stage=stage) for stage in range(mesh.pp)]  # fmt: skip
    titles = ["…" if each is None else stages[each] for each in _shown(mesh.pp)]
    head = tag("tr", None, tag("th", None, ""), *(tag("th", None, title) for title in titles))
    rows = [_row(mesh, data) for data in _shown(mesh.data)]
    picture = tag(
        "table", {"class": "ranks"}, tag("thead", None, head) if mesh.pp > 1 else "", tag("tbody", None, *rows)
    )
    return tag("div", {"class": "layout"}, tag("div", {"class": "scroll"}, picture), words)


def _row(mesh: Mesh, data: int | None) -> Html:
    if data is None:
        left = say("{count} more", count=mesh.data - MAX_SHOWN + 1)
        return tag("tr", None, tag("th", None, left), *(tag("td", None, "⋮") for _ in _shown(mesh.pp)))
    replica, shard, part = data // mesh.shards, data % mesh.shards // mesh.cp, data % mesh.cp
    names = [("replica", replica, mesh.dp_replicate), ("shard", shard, mesh.dp_shard), ("part", part, mesh.cp)]
    label = ", ".join(f"{say(name)} {index}" for name, index, degree in names if degree > 1)
    cells = [tag("td", None, *_ranks(mesh, stage, data)) for stage in _shown(mesh.pp)]
    return tag("tr", None, tag("th", None, label), *cells)


def _ranks(mesh: Mesh, stage: int | None, data: int) -> Iterator[Html]:
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
