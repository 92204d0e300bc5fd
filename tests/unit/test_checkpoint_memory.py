"""Copies in memory: valid and complete, or not there; and how much memory they may take."""

import math
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.checkpoints import plain_tensor
from trimaran.checkpoint import (
    Copier,
    CopyMetadata,
    MemoryBudget,
    MemorySlot,
    MemorySource,
    RankMemory,
    budget_options,
    encode_items,
    fill_shards,
    first_fitting_budget,
)
from trimaran.core import CheckpointSection, Seconds
from trimaran.parallel import RankShare, TensorShard, build_share
from trimaran.train import SaveCost, SaveSchedule, copy_every, is_review, max_repeated_steps, save_interval

GIB = 1 << 30


@pytest.fixture
def rank_memory() -> Iterator[RankMemory]:
    fd = os.memfd_create("test")
    yield RankMemory(fd)
    os.close(fd)


def shards_of(*values: float) -> list[TensorShard]:
    """Return weights of 3 x 5; the last one is frozen."""
    made = [TensorShard(key=f"model/{index}", tensor=torch.full((3, 5), value), shape=(3, 5), start=(0, 0))
            for index, value in enumerate(values)]  # fmt: skip
    return [*made[:-1], replace(made[-1], frozen=True)]


def share_of(shards: list[TensorShard]) -> RankShare:
    return build_share(shards, [(0, 3)] * len(shards))


def metadata(step: int, *, rank: int = 0, world_size: int = 1) -> CopyMetadata:
    return CopyMetadata(step=step, incarnation=(0, 0), rank=rank, world_size=world_size, progress={"seed": 7})


def create_slots(rank_memory: RankMemory, share: RankShare, *, slots: int = 2) -> tuple[MemorySlot, ...]:
    rank_memory.create_slots(slots, num_bytes=share.num_bytes, items_bytes=len(encode_items(share.items)))
    return rank_memory.slots


def test_a_copy_is_found_again_when_the_rank_memory_is_reopened(rank_memory: RankMemory) -> None:
    shards = shards_of(1.5, 2.5, 3.5)
    share = share_of(shards)
    Copier(share).copy(create_slots(rank_memory, share)[0], metadata(12), shards)
    ((_, contents),) = RankMemory(rank_memory.fd).valid_slots()
    assert contents.verify()
    assert contents.metadata == metadata(12)
    source = MemorySource({0: contents})
    found = shards_of(0.0, 0.0, 0.0)
    fill_shards(found, source)
    assert (source.step, source.progress) == (12, {"seed": 7})
    assert [float(plain_tensor(shard).mean()) for shard in found] == [1.5, 2.5, 3.5]


def test_shares_of_two_ranks_make_one_source(rank_memory: RankMemory) -> None:
    full = torch.arange(12.0).view(6, 2)
    shards = [TensorShard(key="model/w", tensor=full[row : row + 3], shape=(6, 2), start=(row, 0)) for row in (0, 3)]
    shares = [build_share([shard], [(0, 3)]) for shard in shards]
    slots = create_slots(rank_memory, shares[0])
    for rank, (shard, share, slot) in enumerate(zip(shards, shares, slots, strict=True)):
        Copier(share).copy(slot, metadata(1, rank=rank, world_size=2), [shard])
    source = MemorySource({contents.metadata.rank: contents for _, contents in rank_memory.valid_slots()})
    loaded = TensorShard(key="model/w", tensor=torch.zeros(6, 1), shape=(6, 2), start=(0, 1))
    fill_shards([loaded], source)
    assert torch.equal(plain_tensor(loaded), full[:, 1:])


def test_a_slot_that_was_invalidated_and_not_committed_is_empty(rank_memory: RankMemory) -> None:
    shards = shards_of(1.0, 2.0)
    share = share_of(shards)
    first, second = create_slots(rank_memory, share)
    Copier(share).copy(first, metadata(1), shards)
    Copier(share).copy(second, metadata(2), shards)
    first.invalidate()
    first.data[:8] = 255  # killed in the middle of the next copy
    assert [contents.metadata.step for _, contents in rank_memory.valid_slots()] == [2]


@pytest.mark.parametrize("where", [0, 8, 16, 24, 32, 60, 120])
def test_a_slot_with_a_damaged_header_is_ignored(rank_memory: RankMemory, where: int) -> None:
    shards = shards_of(1.0, 2.0)
    share = share_of(shards)
    (slot,) = create_slots(rank_memory, share, slots=1)
    Copier(share).copy(slot, metadata(1), shards)
    slot.memory[where] ^= 4
    assert rank_memory.valid_slots() == []


def test_a_flipped_bit_of_the_values_is_found(rank_memory: RankMemory) -> None:
    shards = shards_of(1.0, 2.0)
    share = share_of(shards)
    (slot,) = create_slots(rank_memory, share, slots=1)
    Copier(share).copy(slot, metadata(1), shards)
    ((_, contents),) = rank_memory.valid_slots()
    assert contents.verify()
    slot.data[17] ^= 1
    assert not contents.verify()


def test_frozen_tensors_are_copied_once_to_each_slot(rank_memory: RankMemory) -> None:
    shards = shards_of(1.0, 2.0)
    share = share_of(shards)
    slots, copier = create_slots(rank_memory, share), Copier(share)
    for step in range(4):
        plain_tensor(shards[0]).fill_(step)
        if step == 2:
            plain_tensor(shards[1]).fill_(9.0)  # no step changes it; this makes a second copy visible
        copier.copy(slots[step % 2], metadata(step), shards)
    found = {contents.metadata.step: MemorySource({0: contents}) for _, contents in rank_memory.valid_slots()}
    for step, source in found.items():
        loaded = shards_of(0.0, 0.0)
        fill_shards(loaded, source)
        assert [float(plain_tensor(each).mean()) for each in loaded] == [step, 2.0]


def test_the_same_slot_layout_keeps_the_contents(rank_memory: RankMemory) -> None:
    shards = shards_of(1.0, 2.0)
    share = share_of(shards)
    slots = create_slots(rank_memory, share)
    Copier(share).copy(slots[1], metadata(5), shards)
    assert RankMemory(rank_memory.fd).create_slots(
        2, num_bytes=share.num_bytes, items_bytes=len(encode_items(share.items))
    )
    assert [contents.metadata.step for _, contents in RankMemory(rank_memory.fd).valid_slots()] == [5]
    assert not RankMemory(rank_memory.fd).create_slots(
        3, num_bytes=share.num_bytes, items_bytes=len(encode_items(share.items))
    )
    assert RankMemory(rank_memory.fd).valid_slots() == []


def test_a_rank_memory_full_of_garbage_has_no_slots(rank_memory: RankMemory) -> None:
    os.pwrite(rank_memory.fd, os.urandom(20_000), 0)
    assert RankMemory(rank_memory.fd).slots == ()


def test_the_largest_budget_that_fits_is_chosen() -> None:
    options = budget_options(CheckpointSection(), has_rank_memory=True, pairs=False)
    sizes, nodes = [GIB, GIB, GIB, GIB], [0, 0, 2, 2]

    def fit(free: float) -> MemoryBudget:
        return first_fitting_budget(options, sizes, nodes, [100 * GIB, 100 * GIB, *[int(free * GIB)] * 2])

    assert fit(12.0) == MemoryBudget(own_slots=3)
    assert fit(11.9) == MemoryBudget(own_slots=2)
    assert fit(7.9) == MemoryBudget(own_slots=1, keeps_copies=False)
    assert fit(3.9) == MemoryBudget(own_slots=0, keeps_copies=False)


def test_copies_that_are_not_wanted_take_no_memory() -> None:
    staging = [MemoryBudget(own_slots=1, keeps_copies=False), MemoryBudget(own_slots=0, keeps_copies=False)]
    assert budget_options(CheckpointSection(memory=0), has_rank_memory=True, pairs=True) == staging
    assert budget_options(CheckpointSection(), has_rank_memory=False, pairs=True) == staging
    nothing = CheckpointSection.model_validate({"every": "off", "memory": 0})
    assert budget_options(nothing, has_rank_memory=True, pairs=True) == staging[-1:]
    several = budget_options(CheckpointSection(), has_rank_memory=True, pairs=True)
    assert several[0] == MemoryBudget(own_slots=5, peer_slots=2)
    assert [each.num_slots for each in several] == sorted((each.num_slots for each in several), reverse=True)


def test_the_save_interval_is_dalys_optimum_within_its_limits() -> None:
    hour = Seconds(3600.0)
    young = (2 * 1.0 * hour) ** 0.5
    assert save_interval(SaveCost(stall=Seconds(1.0), write=Seconds(5.0)), between=Seconds(16 * hour)) == pytest.approx(
        4 * young, rel=0.01
    )
    assert save_interval(SaveCost(stall=Seconds(1.0), write=Seconds(5.0)), between=Seconds(60.0)) == 100.0
    assert save_interval(SaveCost(stall=Seconds(0.1), write=Seconds(300.0)), between=hour) == 600.0
    assert save_interval(SaveCost(stall=Seconds(1.0), write=Seconds(5.0)), between=Seconds(1e9)) == 1800.0


def test_copies_in_memory_take_at_most_half_a_percent_of_the_time() -> None:
    assert copy_every(Seconds(0.0005), Seconds(0.1)) == 1
    assert copy_every(Seconds(0.0006), Seconds(0.1)) == 2
    assert copy_every(Seconds(0.05), Seconds(0.1)) == 100
    assert [count for count in range(400) if is_review(count, 6)] == [1, 2, 3, 4, 5, 6, 16, 64, 128, 256, 384]


def test_copies_are_as_frequent_as_the_bound_on_lost_time_needs_up_to_one_percent() -> None:
    bound = Seconds(5.0)
    assert copy_every(Seconds(0.0001), Seconds(0.1), lost_seconds=bound) == 1  # cheap: every step
    assert copy_every(Seconds(0.01), Seconds(0.1), lost_seconds=bound) == 20  # 0.5 % loses 2 s: no need for more
    assert copy_every(Seconds(0.04), Seconds(0.1), lost_seconds=bound) == 49  # not 80: (49 + 1) x 0.1 s
    assert copy_every(Seconds(1.0), Seconds(0.1), lost_seconds=bound) == 1000  # 1 % is the limit
    assert copy_every(Seconds(1.0), Seconds(20.0), lost_seconds=bound) == 5  # a step alone takes longer


def test_the_bound_is_one_interval_and_one_step_or_the_interval_of_checkpoints_on_disk() -> None:
    assert [max_repeated_steps(every) for every in (1, 10)] == [2, 11]
    assert max_repeated_steps(10, stride=4) == 16
    assert [max_repeated_steps(10, commit_steps=each) for each in (0.3, 2.5, 40.0)] == [11, 13, 20]
    assert max_repeated_steps(1, commit_steps=9.0) == 2, "the next copy waits until the last is committed"
    schedules = [SaveSchedule(CheckpointSection(every=every), world_size=1, guess=GUESS) for every in (0, 100, "auto")]
    never, fixed, timed = (each.max_repeated_steps(Seconds(0.1)) for each in schedules)
    assert (never, fixed) == (None, 100 + 1 + 2 + 10)
    assert timed == math.ceil(schedules[2].interval / 0.1) + 1 + 2 + 10


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


GUESS = SaveCost(stall=Seconds(0.01), write=Seconds(1.0))


def saved_steps(schedule: SaveSchedule, steps: range, *, stride: int = 1, busy: bool = False) -> list[int]:
    """Return the steps that would be saved: a decision takes effect `lead` steps later."""
    return [step + schedule.lead for step in steps if step % stride == 0 and schedule.wants(step, busy=busy)]


def test_a_fixed_interval_is_exact() -> None:
    schedule = SaveSchedule(CheckpointSection(every=5), world_size=2, guess=GUESS)
    assert saved_steps(schedule, range(20)) == [5, 10, 15, 20]
    schedule = SaveSchedule(CheckpointSection(every=6), world_size=2, guess=GUESS, stride=4)
    assert saved_steps(schedule, range(25), stride=4) == [8, 12, 20, 24]
    assert saved_steps(SaveSchedule(CheckpointSection(every=0), world_size=2, guess=GUESS), range(99)) == []


def test_a_save_is_skipped_and_counted_while_the_disk_is_busy() -> None:
    schedule = SaveSchedule(CheckpointSection(every=5), world_size=2, guess=GUESS)
    assert saved_steps(schedule, range(10), busy=True) == []
    assert schedule.num_skipped == 2


def test_saves_become_rarer_when_the_disk_becomes_slow() -> None:
    clock = Clock()
    schedule = SaveSchedule(CheckpointSection(), world_size=1000, guess=GUESS, now=clock)
    before = schedule.interval
    clock.seconds = before + 1
    assert schedule.wants(10, busy=False)
    assert not schedule.wants(11, busy=False), "the first decision has not taken effect yet"
    schedule.record_start()
    clock.seconds += before + 1
    assert not schedule.wants(20, busy=True)
    assert (schedule.num_skipped, schedule.interval) == (1, pytest.approx(2 * (before + 1)))
    assert not schedule.wants(21, busy=True)
    assert schedule.num_skipped == 1
    schedule.cost = GUESS
    assert schedule.interval == before
