"""Parses what `trimaran bench comm` measures: collectives, message sizes, and groups of ranks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trimaran.core import Mesh, UserError, did_you_mean
from trimaran.machine.comm_result import BUS_FACTORS

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "kb": 10**3, "mb": 10**6, "gb": 10**9,
         "k": 2**10, "m": 2**20, "g": 2**30}  # fmt: skip
SIZE = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([a-z]*)", re.IGNORECASE)
RANGE_FACTOR = 4  # between the sizes of a range, unless it ends with *2
MAX_SIZES, MAX_BYTES = 64, 1 << 40
DEFAULT_SIZES = {"cpu": "1KiB..16MiB", "cuda": "1KiB..256MiB"}
# Axes of a plan from the outermost to the innermost, as ranks are numbered, and the axes that join others.
MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
JOINED_AXES = {"dp": ("dp_replicate", "dp_shard"), "shards": ("dp_shard", "cp"),
               "data": ("dp_replicate", "dp_shard", "cp")}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGroups:
    """Disjoint groups of ranks of equal size, and how many nodes each spans."""

    name: str
    ranks: tuple[tuple[int, ...], ...]
    nodes: int


def parse_collectives(text: str) -> list[str]:
    """Return the collectives that `text` lists; `all` is every one."""
    words = [word.strip().replace("-", "_").lower() for word in text.split(",") if word.strip()]
    if words == ["all"] or not words:
        return list(BUS_FACTORS)
    for word in words:
        if word not in BUS_FACTORS:
            raise _wrong(f"'{word}' is not a collective{did_you_mean(word, BUS_FACTORS)}", "--collectives",
                         f"use some of {', '.join(BUS_FACTORS)}")  # fmt: skip
    return list(dict.fromkeys(words))


def parse_sizes(text: str) -> list[int]:
    """Return message sizes in bytes, ascending: `1KiB,1MiB`, or a range `1KiB..16MiB`, or `1KiB..16MiB*2`."""
    sizes: set[int] = set()
    for part in text.split(","):
        span, _, factor = part.partition("*")
        first, dots, last = span.partition("..")
        if not dots:
            if factor:
                raise _wrong(f"'{part.strip()}' has a factor but is not a range", "--sizes", "write 1KiB..16MiB*2")
            sizes.add(_size(first))
            continue
        step = int(factor) if factor.strip().isdigit() and len(factor) < 5 else (0 if factor else RANGE_FACTOR)
        low, high = _size(first), _size(last)
        if step < 2 or low > high:
            raise _wrong(f"'{part.strip()}' is not a range of sizes", "--sizes", "write 1KiB..16MiB or 1KiB..16MiB*2")
        while low <= high and len(sizes) <= MAX_SIZES:
            sizes.add(low)
            low *= step
    if len(sizes) > MAX_SIZES:
        raise _wrong(f"these are more than {MAX_SIZES} sizes", "--sizes", "use a larger factor: 1KiB..1GiB*4")
    return sorted(sizes)


def _size(text: str) -> int:
    match = SIZE.fullmatch(text.strip())
    if match is None or (unit := match[2].lower()) not in UNITS:
        raise _wrong(f"'{text.strip()}' is not a size", "--sizes", "write 4096, 1KiB, 16MiB or 1GiB")
    size = int(float(match[1]) * UNITS[unit])
    if not 1 <= size <= MAX_BYTES:
        raise _wrong(f"'{text.strip()}' is not from 1 byte to 1 TiB", "--sizes", "write 4096, 1KiB, 16MiB or 1GiB")
    return size


def parse_groups(text: str, *, world_size: int, ranks_per_node: int, mesh: Mesh | None) -> list[NamedGroups]:
    """Return the groups that `text` lists: `world`, `node`, a number of neighbouring ranks, or an axis of the plan."""
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    found = [_groups(word, world_size, ranks_per_node, mesh) for word in words]
    if not found:
        raise _wrong("no group is named", "--groups", "write world, node, a number of ranks, or an axis of a plan")
    return [
        NamedGroups(name=word, ranks=ranks, nodes=max(_num_nodes(each, ranks_per_node) for each in ranks))
        for word, ranks in zip(words, found, strict=True)
    ]


def default_groups(*, world_size: int, ranks_per_node: int, mesh: Mesh | None) -> str:
    """Return the world, a node where there are several with several ranks, and the axes of the plan."""
    several = 1 < ranks_per_node < world_size
    axes = [axis for axis in MESH_AXES if mesh is not None and 1 < getattr(mesh, axis) < world_size]
    return ",".join(["world", *(["node"] if several else []), *axes])


def _groups(word: str, world_size: int, ranks_per_node: int, mesh: Mesh | None) -> tuple[tuple[int, ...], ...]:
    axes = JOINED_AXES.get(word, (word,) if word in MESH_AXES else ())
    if axes:
        if mesh is None:
            raise _wrong(f"'{word}' is an axis of a plan, and no plan is named", "--groups",
                         "name its recipe with --recipe FILE, or a number of ranks such as 2")  # fmt: skip
        if mesh.world_size != world_size:
            raise _wrong(f"the plan has {mesh.world_size} ranks, and {world_size} are measured", "--groups",
                         f"measure with --ranks {mesh.world_size}, or set the recipe's cluster")  # fmt: skip
        groups = axis_groups(mesh, axes)
    elif word in ("world", "node") or word.isdigit():
        size = {"world": world_size, "node": ranks_per_node}.get(word) or int(word[:9])
        if not 2 <= size <= world_size or world_size % size:
            raise _wrong(f"groups of {size} do not split {world_size} ranks into equal groups of two or more",
                         "--groups", f"use a divisor of {world_size}, at least 2")  # fmt: skip
        groups = tuple(tuple(range(first, first + size)) for first in range(0, world_size, size))
    else:
        known = ["world", "node", *MESH_AXES, *JOINED_AXES]
        raise _wrong(f"'{word}' is not a group{did_you_mean(word, known)}", "--groups",
                     "write world, node, a number of neighbouring ranks, or an axis of a plan such as tp")  # fmt: skip
    if len(groups[0]) < 2:
        raise _wrong(f"a group of {word} has one rank in this plan", "--groups", "leave it out")
    return groups


def axis_groups(mesh: Mesh, axes: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that differ in these axes only, by group. Ranks are numbered as in training."""
    degrees = [getattr(mesh, axis) for axis in MESH_AXES]
    by_place: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        place, rest = [], rank
        for axis, degree in zip(reversed(MESH_AXES), reversed(degrees), strict=True):
            rest, index = divmod(rest, degree)
            place.append(0 if axis in axes else index)
        by_place.setdefault(tuple(place), []).append(rank)
    return tuple(tuple(ranks) for ranks in by_place.values())


def _num_nodes(ranks: Sequence[int], ranks_per_node: int) -> int:
    return len({rank // ranks_per_node for rank in ranks})


def _wrong(what: str, where: str, fix: str) -> UserError:
    return UserError("C010", what, where=f"trimaran bench comm {where}", fix=fix)
