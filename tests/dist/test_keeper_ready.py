"""A run trains before the memory for copies of its state is there, and all ranks begin to copy at the same step."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.keeping import DIED, Leg, Log, events, new_run, sail
from tests.ranks import run_ranks
from trimaran.checkpoint.copier import Copier
from trimaran.run import RunDirectory
from trimaran.train.checkpointing import checkpoint_backend


@pytest.fixture
def rank_memories() -> Iterator[tuple[int, ...]]:
    made = tuple(os.memfd_create("test") for _ in range(2))
    yield made
    for fd in made:
        os.close(fd)


class Late(Copier):
    """What takes its memory in the background, as on a GPU: rank 1 has it when it is asked for the third time."""

    prepares = True
    asked = 0
    has_memory = True

    @property
    def is_ready(self) -> bool:
        self.asked += 1
        return dist.get_rank() == 0 or self.asked >= 3

    def wait_ready(self) -> bool:
        return self.has_memory or dist.get_rank() == 0


class Lacking(Late):
    has_memory = False


class Slow(Late):
    """Rank 1 has no memory for as long as this takes."""

    @property
    def is_ready(self) -> bool:
        return dist.get_rank() == 0


def sail_with(kind: type[Copier], path: Path, leg: Leg) -> Log:
    checkpoint_backend.Copier = kind  # in this forked rank only
    return sail(path, leg)


def killed_with(kind: type[Copier], run: RunDirectory, leg: Leg) -> None:
    with pytest.raises(AssertionError, match=DIED):
        run_ranks(2, sail_with, kind, run.path, leg)


def test_copies_begin_when_every_rank_has_the_memory(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    logs = run_ranks(2, sail_with, Late, run.path, Leg(to=8, rank_memories=rank_memories, finish=False))
    assert [log.saves[1] for log in logs] == [6, 6], "after steps 3 to 8"
    logs = run_ranks(2, sail, run.path, Leg(to=9, attempt=1, rank_memories=rank_memories, finish=False))
    assert [(log.start, log.is_right) for log in logs] == [(8, True)] * 2


def test_a_checkpoint_waits_for_the_memory(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    logs = run_ranks(2, sail_with, Late, run.path, Leg(to=2, rank_memories=rank_memories))
    assert [(log.is_right, log.error) for log in logs] == [(True, "")] * 2
    logs = run_ranks(2, sail, run.path, Leg(to=3, attempt=1))
    assert [(log.start, log.is_right) for log in logs] == [(2, True)] * 2


def test_where_one_node_lacks_the_memory_all_do_without(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    logs = run_ranks(2, sail_with, Lacking, run.path, Leg(to=14, rank_memories=rank_memories))
    assert [(log.is_right, log.error, log.saves[1]) for log in logs] == [(True, "", 0)] * 2
    assert [os.fstat(fd).st_size for fd in rank_memories] == [0, 0]
    assert [each["step"] for each in events(run, "checkpoint")] == [14]


def test_what_only_memory_has_is_copied_at_once(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_ranks(2, sail, run.path, Leg(to=6, rank_memories=rank_memories, finish=False))
    (log,) = run_ranks(1, sail_with, Late, run.path, Leg(to=6, attempt=1, rank_memories=rank_memories, finish=False))
    assert (log.start, log.is_right, log.saves[1]) == (6, True, 1), "one rank has another share than two had"


def test_a_run_that_is_killed_before_its_first_copy_goes_on_from_where_it_had_gone_on(
    tmp_path: Path, rank_memories: tuple[int, ...]
) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    killed_with(Slow, run, Leg(to=50, rank_memories=rank_memories, who=1, die_after=3))
    logs = run_ranks(2, sail, run.path, Leg(to=5, attempt=1, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(0, True)] * 2, "it had begun at 0"
    for attempt in (2, 3):
        for fd in rank_memories:
            os.ftruncate(fd, 0)  # the machine was started anew: what there is is on disk
        killed_with(Slow, run, Leg(to=50, attempt=attempt, rank_memories=rank_memories, who=1, die_after=8))
    logs = run_ranks(2, sail, run.path, Leg(to=9, attempt=4, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(5, True)] * 2
    assert [each["tier"] for each in events(run, "resume")] == ["disk"] * 3


def test_copies_that_are_far_apart_begin_with_the_first_state(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=5")
    logs = run_ranks(2, sail_with, Slow, run.path, Leg(to=4, rank_memories=rank_memories, rewind=(4, 2), finish=False))
    assert [(log.is_right, log.error, log.saves[1]) for log in logs] == [(True, "", 1)] * 2, "it went back to step 0"
