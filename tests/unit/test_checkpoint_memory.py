"""Copies in memory: sealed and whole, or not there; and how much memory they may take."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from trimaran.checkpoint.copier import Copier
from trimaran.checkpoint.load_state import fill
from trimaran.checkpoint.memory_budget import MemoryBudget, first_that_fits, rooms
from trimaran.checkpoint.memory_copies import Label, MemorySlot, MemorySource, RankMemory, pack_items
from trimaran.checkpoint.rank_share import RankShare, lay_out
from trimaran.checkpoint.tensor_shards import TensorShard
from trimaran.core import CheckpointSection, Seconds
from trimaran.train.checkpointing.save_interval import SaveCost, SavePace, copy_every, is_look, save_interval

GIB = 1 << 30


@pytest.fixture
def rank_memory() -> Iterator[RankMemory]:
    fd = os.memfd_create("test")
    yield RankMemory(fd)
    os.close(fd)


def pieces_of(*values: float) -> list[TensorShard]:
    """Return weights of 3 x 5, and a frozen one at the end."""
    made = [TensorShard(key=f"model/{index}", tensor=torch.full((3, 5), value), shape=(3, 5), start=(0, 0))
            for index, value in enumerate(values)]  # fmt: skip
    return [*made[:-1], replace(made[-1], frozen=True)]


def share_of(pieces: list[TensorShard]) -> RankShare:
    return lay_out(pieces, [(0, 3)] * len(pieces))


def label(step: int, *, rank: int = 0, world_size: int = 1) -> Label:
    return Label(step=step, incarnation=(0, 0), rank=rank, world_size=world_size, progress={"seed": 7})


def laid_out(rank_memory: RankMemory, share: RankShare, *, slots: int = 2) -> tuple[MemorySlot, ...]:
    rank_memory.lay_out(slots, num_bytes=share.num_bytes, items_bytes=len(pack_items(share.items)))
    return rank_memory.slots


def test_a_copy_is_found_again_by_whoever_opens_the_berth(rank_memory: RankMemory) -> None:
    pieces = pieces_of(1.5, 2.5, 3.5)
    share = share_of(pieces)
    Copier(share).copy(laid_out(rank_memory, share)[0], label(12), pieces)
    ((_, kept),) = RankMemory(rank_memory.fd).kept()
    assert kept.verify()
    assert kept.label == label(12)
    source = MemorySource({0: kept})
    found = pieces_of(0.0, 0.0, 0.0)
    fill(found, source)
    assert (source.step, source.progress) == (12, {"seed": 7})
    assert [float(piece.tensor.mean()) for piece in found] == [1.5, 2.5, 3.5]


def test_shares_of_two_ranks_make_one_source(rank_memory: RankMemory) -> None:
    whole = torch.arange(12.0).view(6, 2)
    parts = [TensorShard(key="model/w", tensor=whole[row : row + 3], shape=(6, 2), start=(row, 0)) for row in (0, 3)]
    shares = [lay_out([part], [(0, 3)]) for part in parts]
    slots = laid_out(rank_memory, shares[0])
    for rank, (part, share, slot) in enumerate(zip(parts, shares, slots, strict=True)):
        Copier(share).copy(slot, label(1, rank=rank, world_size=2), [part])
    source = MemorySource({kept.label.rank: kept for _, kept in rank_memory.kept()})
    loaded = TensorShard(key="model/w", tensor=torch.zeros(6, 1), shape=(6, 2), start=(0, 1))
    fill([loaded], source)
    assert torch.equal(loaded.tensor, whole[:, 1:])


def test_a_slot_that_was_opened_and_not_sealed_holds_nothing(rank_memory: RankMemory) -> None:
    pieces = pieces_of(1.0, 2.0)
    share = share_of(pieces)
    first, second = laid_out(rank_memory, share)
    Copier(share).copy(first, label(1), pieces)
    Copier(share).copy(second, label(2), pieces)
    first.open()
    first.data[:8] = 255  # killed in the middle of the next copy
    assert [kept.label.step for _, kept in rank_memory.kept()] == [2]


@pytest.mark.parametrize("where", [0, 8, 16, 24, 32, 60, 120])
def test_a_damaged_head_hides_the_slot(rank_memory: RankMemory, where: int) -> None:
    pieces = pieces_of(1.0, 2.0)
    share = share_of(pieces)
    (slot,) = laid_out(rank_memory, share, slots=1)
    Copier(share).copy(slot, label(1), pieces)
    slot.memory[where] ^= 4
    assert rank_memory.kept() == []


def test_a_flipped_bit_of_the_values_is_found(rank_memory: RankMemory) -> None:
    pieces = pieces_of(1.0, 2.0)
    share = share_of(pieces)
    (slot,) = laid_out(rank_memory, share, slots=1)
    Copier(share).copy(slot, label(1), pieces)
    ((_, kept),) = rank_memory.kept()
    assert kept.verify()
    slot.data[17] ^= 1
    assert not kept.verify()


def test_what_is_frozen_is_copied_once_to_each_slot(rank_memory: RankMemory) -> None:
    pieces = pieces_of(1.0, 2.0)
    share = share_of(pieces)
    slots, copier = laid_out(rank_memory, share), Copier(share)
    for step in range(4):
        pieces[0].tensor.fill_(step)
        if step == 2:
            pieces[1].tensor.fill_(9.0)  # which no step does; so that it shows
        copier.copy(slots[step % 2], label(step), pieces)
    found = {kept.label.step: MemorySource({0: kept}) for _, kept in rank_memory.kept()}
    for step, source in found.items():
        loaded = pieces_of(0.0, 0.0)
        fill(loaded, source)
        assert [float(each.tensor.mean()) for each in loaded] == [step, 2.0]


def test_the_same_cut_leaves_everything_in_its_place(rank_memory: RankMemory) -> None:
    pieces = pieces_of(1.0, 2.0)
    share = share_of(pieces)
    slots = laid_out(rank_memory, share)
    Copier(share).copy(slots[1], label(5), pieces)
    assert RankMemory(rank_memory.fd).lay_out(2, num_bytes=share.num_bytes, items_bytes=len(pack_items(share.items)))
    assert [kept.label.step for _, kept in RankMemory(rank_memory.fd).kept()] == [5]
    assert not RankMemory(rank_memory.fd).lay_out(
        3, num_bytes=share.num_bytes, items_bytes=len(pack_items(share.items))
    )
    assert RankMemory(rank_memory.fd).kept() == []


def test_a_berth_full_of_garbage_is_an_empty_one(rank_memory: RankMemory) -> None:
    os.pwrite(rank_memory.fd, os.urandom(20_000), 0)
    assert RankMemory(rank_memory.fd).slots == ()


def test_memory_is_divided_as_well_as_it_goes() -> None:
    options = rooms(CheckpointSection(), has_rank_memory=True, pairs=False)
    sizes, nodes = [GIB, GIB, GIB, GIB], [0, 0, 2, 2]

    def fit(free: float) -> MemoryBudget:
        return first_that_fits(options, sizes, nodes, [100 * GIB, 100 * GIB, *[int(free * GIB)] * 2])

    assert fit(12.0) == MemoryBudget(own=3)
    assert fit(11.9) == MemoryBudget(own=2)
    assert fit(7.9) == MemoryBudget(own=1, memory=False)
    assert fit(3.9) == MemoryBudget(own=0, memory=False)


def test_copies_that_nobody_wants_take_no_memory() -> None:
    staging = [MemoryBudget(own=1, memory=False), MemoryBudget(own=0, memory=False)]
    assert rooms(CheckpointSection(memory=0), has_rank_memory=True, pairs=True) == staging
    assert rooms(CheckpointSection(), has_rank_memory=False, pairs=True) == staging
    several = rooms(CheckpointSection(), has_rank_memory=True, pairs=True)
    assert several[0] == MemoryBudget(own=5, foreign=2)
    assert [room.num_slots for room in several] == sorted((room.num_slots for room in several), reverse=True)


def test_the_interval_is_dalys_between_its_bounds() -> None:
    hour = Seconds(3600.0)
    young = (2 * 1.0 * hour) ** 0.5
    assert save_interval(SaveCost(stall=Seconds(1.0), write=Seconds(5.0)), between=Seconds(16 * hour)) == pytest.approx(
        4 * young, rel=0.01
    )
    assert save_interval(SaveCost(stall=Seconds(1.0), write=Seconds(5.0)), between=Seconds(60.0)) == 100.0
    assert save_interval(SaveCost(stall=Seconds(0.1), write=Seconds(300.0)), between=hour) == 600.0
    assert save_interval(SaveCost(stall=Seconds(1.0), write=Seconds(5.0)), between=Seconds(1e9)) == 1800.0


def test_copies_in_memory_take_a_two_hundredth_of_the_time_at_most() -> None:
    assert copy_every(Seconds(0.0005), Seconds(0.1)) == 1
    assert copy_every(Seconds(0.0006), Seconds(0.1)) == 2
    assert copy_every(Seconds(0.05), Seconds(0.1)) == 100
    assert [count for count in range(400) if is_look(count)] == [3, 8, 32, 128, 256, 384]


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


GUESS = SaveCost(stall=Seconds(0.01), write=Seconds(1.0))


def saves(pace: SavePace, steps: range, *, stride: int = 1, busy: bool = False) -> list[int]:
    """Return the steps that would be kept: a wish holds for the last step before the one at which it is acted upon."""
    return [step + pace.lead for step in steps if step % stride == 0 and pace.wants(step, busy=busy)]


def test_a_fixed_interval_is_kept_to_the_step() -> None:
    pace = SavePace(CheckpointSection(every=5), world_size=2, guess=GUESS)
    assert saves(pace, range(20)) == [5, 10, 15, 20]
    pace = SavePace(CheckpointSection(every=6), world_size=2, guess=GUESS, stride=4)
    assert saves(pace, range(25), stride=4) == [8, 12, 20, 24]
    assert saves(SavePace(CheckpointSection(every=0), world_size=2, guess=GUESS), range(99)) == []


def test_a_busy_disk_is_left_alone_and_that_is_counted() -> None:
    pace = SavePace(CheckpointSection(every=5), world_size=2, guess=GUESS)
    assert saves(pace, range(10), busy=True) == []
    assert pace.num_skipped == 2


def test_a_disk_that_became_slow_is_asked_less_often() -> None:
    clock = Clock()
    pace = SavePace(CheckpointSection(), world_size=1000, guess=GUESS, now=clock)
    before = pace.interval
    clock.seconds = before + 1
    assert pace.wants(10, busy=False)
    assert not pace.wants(11, busy=False), "the first wish is still on its way"
    pace.started()
    clock.seconds += before + 1
    assert not pace.wants(20, busy=True)
    assert (pace.num_skipped, pace.interval) == (1, pytest.approx(2 * (before + 1)))
    assert not pace.wants(21, busy=True)
    assert pace.num_skipped == 1
    pace.ended(GUESS)
    assert pace.interval == before
