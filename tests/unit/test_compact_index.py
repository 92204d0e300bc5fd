"""The compact form of a checkpoint's index describes the same parts as the older one."""

import json
import random
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimaran.checkpoint import (
    COMPACT_FORMAT,
    FORMAT,
    Column,
    CompactRegions,
    FileRecord,
    Manifest,
    ShardLayout,
    index_bytes,
    layout_of,
    manifest_bytes,
    overlaps,
    parse_index,
    read_manifest,
    runs_of,
)
from trimaran.parallel import overlap


def layouts_of(shards: int, tp: int) -> tuple[tuple[ShardLayout, ...], dict[str, int]]:
    """Return rows of tensors split in one and two dimensions, unevenly; a scalar; and one that is no grid."""
    layouts, sizes = [], {}
    for rank in range(shards * tp):
        shard, part = divmod(rank, tp)
        file, offset, rows = f"rank-{rank:05d}.safetensors", 64, list[Any]()
        tensors = [("even", [shards * 2, 6], shard * 2, 2), ("uneven", [shards * 3 - 1, 6], shard * 3, 3)]
        for key, shape, first, num in tensors:
            size = [min(num, shape[0] - first), shape[1] // tp]
            rows.append([f"model/{key}", "F32", shape, [first, part * size[1]], size, file, offset])
            offset += 4 * prod(size)
        if rank == 0:
            rows.append(["optimizer/step", "I64", [], [], [], file, offset])
            offset += 8
        # Two rows above, split at 3; one row below, split at 5.
        corners = {0: ([0, 0], [2, 3]), 1: ([0, 3], [2, 5]), 2: ([2, 0], [1, 5]), 3: ([2, 5], [1, 3])}
        if rank in corners:
            start, size = corners[rank]
            rows.append(["model/not-a-grid", "BF16", [3, 8], start, size, file, offset])
            offset += 2 * prod(size)
        layouts.append(layout_of(rows))
        sizes[file] = offset
    return tuple(layouts), sizes


def both_forms(layouts: tuple[ShardLayout, ...]) -> tuple[bytes, bytes]:
    return index_bytes(layouts, 1 << 62), index_bytes(layouts, 0)


@pytest.mark.parametrize(("shards", "tp"), [(1, 1), (5, 1), (7, 2), (16, 3)])
def test_both_forms_describe_the_same_parts(shards: int, tp: int) -> None:
    layouts, sizes = layouts_of(shards, tp)
    if shards * tp < 4:  # too few ranks for the four parts
        layouts = tuple(layout_of([row for row in each.rows if "grid" not in row[0]]) for each in layouts)
    plain, compact = (parse_index(text, sizes) for text in both_forms(layouts))
    assert plain.keys() == compact.keys()
    for key, entry in plain.items():
        found = compact[key]
        assert isinstance(found.regions, CompactRegions)
        assert (found.meta, tuple(found.regions)) == (entry.meta, tuple(entry.regions))
        assert (found.regions[0], found.regions[-1]) == (entry.regions[0], entry.regions[-1])
        for region in entry.regions:
            wider = tuple(each + 1 for each in region.size)
            theirs = [each for each in entry.regions if overlap(region.start, wider, each.start, each.size)]
            assert [each for each, _, _ in overlaps(found.regions, region.start, wider)] == theirs


def test_columns_keep_any_numbers() -> None:
    draw = random.Random(3)
    for _ in range(300):
        numbers = [draw.choice([0, 1, 5, draw.randrange(1 << 61)]) for _ in range(draw.randrange(1, 20))]
        numbers += range(draw.randrange(9)) if draw.random() < 0.5 else []
        assert Column(np.array(runs_of(np.array(numbers))).reshape(-1, 3)).numbers().tolist() == numbers


def test_thousands_of_ranks_make_a_small_index() -> None:
    layouts, sizes = layouts_of(1024, 1)
    plain, compact = both_forms(layouts)
    assert len(compact) - len(json.dumps([*sizes])) < len(plain) / 20
    assert len(parse_index(compact, sizes)["model/even"].regions) == 1024


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index["columns"][0].__setitem__(2, 1 << 40), "numbers"),
        (lambda index: index["columns"][0].__setitem__(0, -1), "counts"),
        (lambda index: index["columns"][0].__setitem__(0, 1 << 70), "counts"),
        (lambda index: index["columns"][0].__setitem__(1, 1 << 61), "counts"),
        (lambda index: index["columns"][0].append(1), "runs"),
        (lambda index: index["columns"].__setitem__(0, [1.5, 0, 7]), "runs"),
        (lambda index: index["tensors"]["model/even"]["parts"].pop(), "columns"),
        (lambda index: index["tensors"]["model/even"]["parts"].__setitem__(2, -1), "count"),
        (lambda index: index["tensors"]["model/even"]["parts"].__setitem__(2, 10**6), "IndexError"),
        (lambda index: index["tensors"]["model/even"].update(shape=[15, 6]), "model/even"),
        (lambda index: index["tensors"]["model/uneven"].update(dtype="F64"), "outside"),
        (lambda index: index["tensors"].update({"../x": index["tensors"]["model/even"]}), "path"),
        (lambda index: index["files"].pop(), "not listed"),
        (lambda index: index["files"].__setitem__(0, "/etc/passwd"), "outside"),
        (lambda index: index.pop("columns"), "KeyError"),
    ],
)
def test_a_wrong_compact_index_is_refused(change: Any, message: str) -> None:
    layouts, sizes = layouts_of(7, 2)
    index = json.loads(both_forms(layouts)[1])
    change(index)
    with pytest.raises(ValueError, match=message):
        parse_index(json.dumps(index).encode(), sizes)


def test_parts_that_do_not_cover_a_tensor_are_never_written() -> None:
    layouts, _ = layouts_of(7, 2)
    with pytest.raises(AssertionError, match=r"model/even: 78 of 84 values"):
        both_forms(layouts[:-1])


def test_only_a_checkpoint_with_a_compact_index_has_a_new_format(tmp_path: Path) -> None:
    """Versions that do not know it must refuse it by its format, and not rename it as damaged."""
    record = {"index.json": FileRecord(3, "0" * 64)}
    for compact, version in ((False, FORMAT), (True, COMPACT_FORMAT)):
        folder = tmp_path / f"{compact}"
        folder.mkdir()
        text = manifest_bytes(Manifest(step=3, files=record, compact_index=compact))
        (folder / "manifest.json").write_bytes(text)
        assert json.loads(text)["format"] == version
        assert ("compact_index" in json.loads(text)) == compact
        assert read_manifest(folder).compact_index == compact
