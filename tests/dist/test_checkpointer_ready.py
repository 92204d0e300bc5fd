"""A run trains while the memory for copies is still allocated, and all ranks start to copy at the same step."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.toy_run import DIED, RankLog, ToyAttempt, events, new_run, run_attempt
from trimaran.checkpoint import Copier
from trimaran.runs import RunDirectory
from trimaran.train.checkpointing import state_copies


@pytest.fixture
def rank_memories() -> Iterator[tuple[int, ...]]:
    fds = tuple(os.memfd_create("test") for _ in range(2))
    yield fds
    for fd in fds:
        os.close(fd)


class LateMemory(Copier):
    """Allocates in the background, as on a GPU: rank 1 has the memory when `is_ready` is read the third time."""

    allocates_in_background = True
    num_reads = 0
    has_memory = True

    @property
    def is_ready(self) -> bool:
        self.num_reads += 1
        return dist.get_rank() == 0 or self.num_reads >= 3

    def wait_ready(self) -> bool:
        return self.has_memory or dist.get_rank() == 0


class NoMemory(LateMemory):
    has_memory = False


class SlowMemory(LateMemory):
    """Rank 1 never gets its memory."""

    @property
    def is_ready(self) -> bool:
        return dist.get_rank() == 0


def run_with(kind: type[Copier], path: Path, attempt: ToyAttempt) -> RankLog:
    state_copies.Copier = kind  # in this forked rank only
    return run_attempt(path, attempt)


def kill_with(kind: type[Copier], run: RunDirectory, attempt: ToyAttempt) -> None:
    with pytest.raises(AssertionError, match=DIED):
        run_ranks(2, run_with, kind, run.path, attempt)


def test_copies_start_when_every_rank_has_the_memory(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    logs = run_ranks(2, run_with, LateMemory, run.path, ToyAttempt(to=8, rank_memories=rank_memories, finish=False))
    assert [log.saves[1] for log in logs] == [6, 6], "after steps 3 to 8"
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=9, number=1, rank_memories=rank_memories, finish=False))
    assert [(log.start, log.is_right) for log in logs] == [(8, True)] * 2


def test_a_checkpoint_waits_for_the_memory(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    logs = run_ranks(2, run_with, LateMemory, run.path, ToyAttempt(to=2, rank_memories=rank_memories))
    assert [(log.is_right, log.error) for log in logs] == [(True, "")] * 2
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=3, number=1))
    assert [(log.start, log.is_right) for log in logs] == [(2, True)] * 2


def test_if_one_node_lacks_the_memory_no_rank_copies(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    logs = run_ranks(2, run_with, NoMemory, run.path, ToyAttempt(to=14, rank_memories=rank_memories))
    assert [(log.is_right, log.error, log.saves[1]) for log in logs] == [(True, "", 0)] * 2
    assert [os.fstat(fd).st_size for fd in rank_memories] == [0, 0]
    assert [each["step"] for each in events(run, "checkpoint")] == [14]


def test_a_state_that_only_memory_holds_is_copied_at_once(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=6, rank_memories=rank_memories, finish=False))
    (log,) = run_ranks(
        1, run_with, LateMemory, run.path, ToyAttempt(to=6, number=1, rank_memories=rank_memories, finish=False)
    )
    assert (log.start, log.is_right, log.saves[1]) == (6, True, 1), "one rank has another share than each of two"


def test_a_run_killed_before_its_first_copy_resumes_from_the_same_state_again(
    tmp_path: Path, rank_memories: tuple[int, ...]
) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    kill_with(SlowMemory, run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=1, die_after=3))
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=5, number=1, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(0, True)] * 2, "it had started at 0"
    for number in (2, 3):
        for fd in rank_memories:
            os.ftruncate(fd, 0)  # the machine was rebooted: only the disk has the state
        kill_with(
            SlowMemory, run, ToyAttempt(to=50, number=number, rank_memories=rank_memories, faulty_rank=1, die_after=8)
        )
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=9, number=4, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(5, True)] * 2
    assert [each["tier"] for each in events(run, "resume")] == ["disk"] * 3


def test_copies_many_steps_apart_start_with_the_first_state(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=5")
    logs = run_ranks(
        2, run_with, SlowMemory, run.path, ToyAttempt(to=4, rank_memories=rank_memories, rewind=(4, 2), finish=False)
    )
    assert [(log.is_right, log.error, log.saves[1]) for log in logs] == [(True, "", 1)] * 2, "it rewound to step 0"
