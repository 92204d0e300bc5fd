"""Which rank writes what, and that any sharding is read back as any other, bit for bit."""

from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import MANIFEST, UnsyncedDisk, copy_share, on_ranks, plain_tensor, rows_of, tensors_of
from trimaran.checkpoint import DiskSource, commit, fill_shards, refuse_unused_tensors, write_share
from trimaran.core import UserError
from trimaran.parallel import (
    DTYPE_NAMES,
    TORCH_DTYPES,
    VALUE_BYTES,
    TensorShard,
    assign_rows,
    build_share,
    copy_to_memory,
    item_view,
)


def shard(key: str, tensor: torch.Tensor, **kwargs: Any) -> TensorShard:
    return TensorShard(key=key, tensor=tensor, shape=tuple(tensor.shape), start=(0,) * tensor.ndim, **kwargs)


def save_shards(folder: Path, held: list[list[TensorShard]], **sizes: int) -> DiskSource:
    """Save the state that the ranks hold to disk, and return the checkpoint."""
    world_size = len(held)
    shares = on_ranks(world_size, lambda rank, gather: copy_share(held[rank], rank, world_size, gather, **sizes))
    reports = [
        write_share(folder / "draft", rank, *share, previous=None, disk=UnsyncedDisk())
        for rank, share in enumerate(shares)
    ]
    commit(folder / "draft", folder / "saved", reports, MANIFEST, UnsyncedDisk())
    return DiskSource(folder / "saved")


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the regions, as start and size, of a tensor that is split at random positions in each dimension."""
    spans = []
    for length in shape:
        cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=3))})
        spans.append(list(pairwise(cuts)))
    return [
        (tuple(begin for begin, _ in corner), tuple(end - begin for begin, end in corner)) for corner in product(*spans)
    ]


@st.composite
def held_shards(draw: st.DrawFn, tensors: dict[str, torch.Tensor], *, blank: bool) -> list[list[TensorShard]]:
    """Return the shards of each of some ranks: regions of every tensor, each on one rank or several."""
    ranks = range(draw(st.integers(1, 4)))
    held: list[list[TensorShard]] = [[] for _ in ranks]
    for key, full in tensors.items():
        for start, size in draw(grids(tuple(full.shape))):
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
                window = tuple(slice(low, low + n) for low, n in zip(start, size, strict=True))
                values = torch.zeros(size, dtype=full.dtype) if blank else full[window].clone()
                held[rank].append(TensorShard(key=key, tensor=values, shape=tuple(full.shape), start=start))
    return held


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[TensorShard]], list[list[TensorShard]]]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3))
    names = st.sampled_from(["F32", "BF16", "U8", "I64", "BOOL", "F16"])
    tensors = {}
    for number, shape in enumerate(shapes):
        dtype = TORCH_DTYPES[draw(names)]
        values = torch.randint(0, 200, shape).to(dtype)
        tensors[f"model/{number}"] = values
    return tensors, draw(held_shards(tensors, blank=False)), draw(held_shards(tensors, blank=True))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), min_rows_bytes=st.sampled_from([1, 16, 1 << 20]))
def test_any_sharding_is_loaded_as_any_other(
    tmp_path_factory: pytest.TempPathFactory, case: Any, min_rows_bytes: int
) -> None:
    tensors, before, after = case
    source = save_shards(tmp_path_factory.mktemp("sharding"), before, min_rows_bytes=min_rows_bytes)
    for held in after:
        fill_shards(held, source)
        for each in held:
            window = tuple(slice(low, low + n) for low, n in zip(each.start, each.tensor.shape, strict=True))
            assert torch.equal(each.tensor, tensors[each.key][window])


def test_replicated_tensors_are_written_once_and_evenly() -> None:
    shapes = {f"model/{number}": (number + 1, 1 << 16) for number in range(40)} | {
        f"model/b{n}": (9,) for n in range(40)
    }

    def share_of(rank: int, gather: Any) -> Any:
        shards = [shard(key, torch.empty(shape, device="meta")) for key, shape in shapes.items()]
        return build_share(shards, assign_rows(shards, rank=rank, world_size=8, gather=gather))

    shares = on_ranks(8, share_of)
    total = sum(prod(shape) * 4 for shape in shapes.values())
    written = [sum(item.num_bytes for item in share.items) for share in shares]
    assert sum(written) == total
    assert max(written) < 1.1 * total / 8
    assert min(item.num_bytes for share in shares for item in share.items if "b" not in item.key) >= 1 << 18


def test_a_rank_that_holds_a_shard_twice_writes_it_once() -> None:
    tied = torch.ones(3, 3)
    shares = on_ranks(1, lambda rank, gather: assign_rows([shard("model/a", tied), shard("model/a", tied.clone())],
                                                          rank=rank, world_size=1, gather=gather))  # fmt: skip
    assert shares == [[(0, 3), (0, 0)]]


def test_frozen_tensors_come_last_and_wide_values_first() -> None:
    shards = [shard("model/a", torch.ones(3, dtype=torch.uint8)), shard("model/b", torch.ones(5), frozen=True),
              shard("model/c", torch.ones(7)), shard("model/d", torch.tensor(2, dtype=torch.int64))]  # fmt: skip
    share = build_share(shards, [(0, 3), (0, 5), (0, 7), (0, 1)])
    assert [(item.key, item.offset) for item in share.items] == [
        ("model/d", 0), ("model/c", 8), ("model/a", 36), ("model/b", 64)]  # fmt: skip
    assert share.num_bytes == 128


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2
    tensor = raw.view(TORCH_DTYPES[name]).clone()
    source = save_shards(tmp_path, [[shard("model/x", tensor)]])
    back = torch.zeros(48, dtype=torch.uint8).view(tensor.dtype)
    fill_shards([shard("model/x", back)], source)
    assert torch.equal(back.view(torch.uint8), raw)
    assert VALUE_BYTES[DTYPE_NAMES[tensor.dtype]] == tensor.element_size()


def test_shards_need_not_be_contiguous(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    source = save_shards(tmp_path, [[shard("model/x", base.t())]])
    back = torch.zeros(4, 6).t()
    fill_shards([shard("model/x", back)], source)
    assert torch.equal(back, base.t())


def test_a_copy_does_not_follow_later_changes(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    share = build_share([shard("model/x", tensor)], [(1, 3)])
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_to_memory(share, [shard("model/x", tensor)], memory)
    tensor.zero_()
    assert item_view(memory, share.items[0]).tolist() == [1, 1]
    assert share.items[0].start == (1,)


@pytest.mark.parametrize(
    ("wanted", "code", "message"),
    [
        (shard("model/weigth", torch.ones(6, 5)), "K001", "did you mean 'model/weight'?"),
        (shard("model/weight", torch.ones(6, 5, dtype=torch.bfloat16)), "K002", "as F32, this run wants BF16"),
        (shard("model/weight", torch.ones(5, 6)), "K003", "as 6 x 5, this run wants 5 x 6"),
    ],
)
def test_a_tensor_that_does_not_match_is_named(tmp_path: Path, wanted: TensorShard, code: str, message: str) -> None:
    source = save_shards(tmp_path, [rows_of(tensors_of(1), 0, 1)])
    good = shard("model/frozen.bias", torch.zeros(8, dtype=torch.float16))
    with pytest.raises(UserError) as refusal:
        fill_shards([good, wanted], source)
    assert (refusal.value.code, refusal.value.where) == (code, wanted.key)
    assert message in refusal.value.what
    assert not plain_tensor(good).any()  # nothing was loaded


def test_a_source_with_missing_values_is_refused(tmp_path: Path) -> None:
    source = save_shards(tmp_path, [rows_of(tensors_of(1), rank, 2) for rank in range(2)])
    entry = source.index["model/weight"]
    source.index["model/weight"] = type(entry)(entry.meta, entry.regions[:1])
    with pytest.raises(UserError, match=r"K004.* 15 of the 30 values"):
        fill_shards([shard("model/weight", torch.ones(6, 5))], source)


def test_unused_tensors_are_refused_unless_they_are_allowed(tmp_path: Path) -> None:
    source = save_shards(tmp_path, [rows_of(tensors_of(1), 0, 1)])
    weights = [each for each in rows_of(tensors_of(1), 0, 1) if each.key.startswith("model/")]

    def work(rank: int, gather: Any) -> None:
        refuse_unused_tensors(weights[rank::2], source, gather=gather, allowed=["optimizer/"])
        refuse_unused_tensors(weights[rank::2], source, gather=gather)

    for error in on_ranks(2, work):
        assert isinstance(error, UserError)
        assert error.code == "K005"
        assert "has 3 tensors that this run does not use: optimizer/codes/weight, " in error.what
