"""Who writes what, and that any cut is read back as any other, bit by bit."""

from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoints import ABOUT, Quick, on_ranks, rows_of, staged, tensors_of
from trimaran.checkpoint import ownership
from trimaran.checkpoint.disk_source import DiskSource
from trimaran.checkpoint.load_state import fill, refuse_leftovers
from trimaran.checkpoint.ownership import own
from trimaran.checkpoint.rank_share import DTYPE_NAMES, TORCH_DTYPES, copy_in, lay_out, view_of
from trimaran.checkpoint.tensor_regions import VALUE_BYTES
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.checkpoint.write_checkpoint import commit, write_share
from trimaran.core import UserError


def piece(key: str, tensor: torch.Tensor, **kwargs: Any) -> TensorShard:
    return TensorShard(key=key, tensor=tensor, shape=tuple(tensor.shape), start=(0,) * tensor.ndim, **kwargs)


def keep_pieces(folder: Path, held: list[list[TensorShard]]) -> DiskSource:
    """Return the state that the ranks hold, after it has been to the disk."""
    world_size = len(held)
    shares = on_ranks(world_size, lambda rank, gather: staged(held[rank], rank, world_size, gather))
    receipts = [
        write_share(folder / "draft", rank, *share, previous=None, disk=Quick()) for rank, share in enumerate(shares)
    ]
    commit(folder / "draft", folder / "kept", receipts, ABOUT, Quick())
    return DiskSource(folder / "kept")


@st.composite
def grids(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return rectangles, as start and size, that a tensor falls into when each dimension is cut at random places."""
    spans = []
    for room in shape:
        cuts = sorted({0, room, *draw(st.lists(st.integers(0, room), max_size=3))})
        spans.append(list(pairwise(cuts)))
    return [
        (tuple(begin for begin, _ in corner), tuple(end - begin for begin, end in corner)) for corner in product(*spans)
    ]


@st.composite
def holdings(draw: st.DrawFn, wholes: dict[str, torch.Tensor], *, blank: bool) -> list[list[TensorShard]]:
    """Return what each of some ranks holds: rectangles of every tensor, each on one rank or on several of them."""
    ranks = range(draw(st.integers(1, 4)))
    held: list[list[TensorShard]] = [[] for _ in ranks]
    for key, whole in wholes.items():
        for start, size in draw(grids(tuple(whole.shape))):
            for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
                window = tuple(slice(low, low + n) for low, n in zip(start, size, strict=True))
                values = torch.zeros(size, dtype=whole.dtype) if blank else whole[window].clone()
                held[rank].append(TensorShard(key=key, tensor=values, shape=tuple(whole.shape), start=start))
    return held


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], list[list[TensorShard]], list[list[TensorShard]]]:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), max_size=3), min_size=1, max_size=3))
    names = st.sampled_from(["F32", "BF16", "U8", "I64", "BOOL", "F16"])
    wholes = {}
    for number, shape in enumerate(shapes):
        dtype = TORCH_DTYPES[draw(names)]
        values = torch.randint(0, 200, shape).to(dtype)
        wholes[f"model/{number}"] = values
    return wholes, draw(holdings(wholes, blank=False)), draw(holdings(wholes, blank=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(), split_bytes=st.sampled_from([1, 16, 1 << 20]))
def test_any_cut_on_any_ranks_is_read_as_any_other(
    tmp_path_factory: pytest.TempPathFactory, case: Any, split_bytes: int
) -> None:
    wholes, before, after = case
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "SPLIT_BYTES", split_bytes)
        source = keep_pieces(tmp_path_factory.mktemp("cut"), before)
    for held in after:
        fill(held, source)
        for each in held:
            window = tuple(slice(low, low + n) for low, n in zip(each.start, each.tensor.shape, strict=True))
            assert torch.equal(each.tensor, wholes[each.key][window])


def test_what_all_hold_is_written_once_and_evenly() -> None:
    shapes = {f"model/{number}": (number + 1, 1 << 16) for number in range(40)} | {
        f"model/b{n}": (9,) for n in range(40)
    }

    def share_of(rank: int, gather: Any) -> Any:
        pieces = [piece(key, torch.empty(shape, device="meta")) for key, shape in shapes.items()]
        return lay_out(pieces, own(pieces, rank=rank, world_size=8, gather=gather))

    shares = on_ranks(8, share_of)
    total = sum(prod(shape) * 4 for shape in shapes.values())
    written = [sum(item.num_bytes for item in share.items) for share in shares]
    assert sum(written) == total
    assert max(written) < 1.1 * total / 8
    assert min(item.num_bytes for share in shares for item in share.items if "b" not in item.key) >= 1 << 18


def test_a_rank_that_holds_the_same_twice_writes_it_once() -> None:
    tied = torch.ones(3, 3)
    shares = on_ranks(1, lambda rank, gather: own([piece("model/a", tied), piece("model/a", tied.clone())],
                                                  rank=rank, world_size=1, gather=gather))  # fmt: skip
    assert shares == [[(0, 3), (0, 0)]]


def test_what_is_frozen_comes_last_and_wide_values_first() -> None:
    pieces = [piece("model/a", torch.ones(3, dtype=torch.uint8)), piece("model/b", torch.ones(5), frozen=True),
              piece("model/c", torch.ones(7)), piece("model/d", torch.tensor(2, dtype=torch.int64))]  # fmt: skip
    share = lay_out(pieces, [(0, 3), (0, 5), (0, 7), (0, 1)])
    assert [(item.key, item.offset) for item in share.items] == [
        ("model/d", 0), ("model/c", 8), ("model/a", 36), ("model/b", 64)]  # fmt: skip
    assert share.num_bytes == 128


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_kind_of_value_survives(tmp_path: Path, name: str) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2
    tensor = raw.view(TORCH_DTYPES[name]).clone()
    source = keep_pieces(tmp_path, [[piece("model/x", tensor)]])
    back = torch.zeros(48, dtype=torch.uint8).view(tensor.dtype)
    fill([piece("model/x", back)], source)
    assert torch.equal(back.view(torch.uint8), raw)
    assert VALUE_BYTES[DTYPE_NAMES[tensor.dtype]] == tensor.element_size()


def test_pieces_need_not_be_contiguous(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    source = keep_pieces(tmp_path, [[piece("model/x", base.t())]])
    back = torch.zeros(4, 6).t()
    fill([piece("model/x", back)], source)
    assert torch.equal(back, base.t())


def test_a_copy_is_of_the_moment(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    share = lay_out([piece("model/x", tensor)], [(1, 3)])
    memory = torch.zeros(share.num_bytes, dtype=torch.uint8)
    copy_in(share, [piece("model/x", tensor)], memory)
    tensor.zero_()
    assert view_of(memory, share.items[0]).tolist() == [1, 1]
    assert share.items[0].start == (1,)


@pytest.mark.parametrize(
    ("wanted", "code", "words"),
    [
        (piece("model/weigth", torch.ones(6, 5)), "K001", "did you mean 'model/weight'?"),
        (piece("model/weight", torch.ones(6, 5, dtype=torch.bfloat16)), "K002", "as F32, this run wants BF16"),
        (piece("model/weight", torch.ones(5, 6)), "K003", "as 6 x 5, this run wants 5 x 6"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, wanted: TensorShard, code: str, words: str) -> None:
    source = keep_pieces(tmp_path, [rows_of(tensors_of(1), 0, 1)])
    good = piece("model/frozen.bias", torch.zeros(8, dtype=torch.float16))
    with pytest.raises(UserError) as refusal:
        fill([good, wanted], source)
    assert (refusal.value.code, refusal.value.where) == (code, wanted.key)
    assert words in refusal.value.what
    assert not good.tensor.any()  # nothing is half loaded


def test_a_source_with_holes_is_refused(tmp_path: Path) -> None:
    source = keep_pieces(tmp_path, [rows_of(tensors_of(1), rank, 2) for rank in range(2)])
    entry = source.index["model/weight"]
    source.index["model/weight"] = type(entry)(entry.whole, entry.parts[:1])
    with pytest.raises(UserError, match=r"K004.* 15 of the 30 values"):
        fill([piece("model/weight", torch.ones(6, 5))], source)


def test_tensors_without_a_place_are_refused_unless_they_are_listed(tmp_path: Path) -> None:
    source = keep_pieces(tmp_path, [rows_of(tensors_of(1), 0, 1)])
    weights = [each for each in rows_of(tensors_of(1), 0, 1) if each.key.startswith("model/")]

    def work(rank: int, gather: Any) -> None:
        refuse_leftovers(weights[rank::2], source, gather=gather, allowed=["optimizer/"])
        refuse_leftovers(weights[rank::2], source, gather=gather)

    for error in on_ranks(2, work):
        assert isinstance(error, UserError)
        assert error.code == "K005"
        assert "has 3 tensors that this run has no place for: optimizer/codes/weight, " in error.what
