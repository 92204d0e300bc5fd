"""The checkpointer: copies in memory and checkpoints on disk, through kills, slow and full disks, and damage."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity import plan_for, trajectory_of
from tests.ranks import run_ranks
from tests.special_files import put
from tests.toy_run import (
    DIED,
    SlowDisk,
    ToyAttempt,
    events,
    inject_faults,
    link_to,
    logged_steps,
    new_run,
    run_attempt,
    run_until_killed,
)
from trimaran.checkpoint import FIRST_INTERVAL_STEPS, RankMemory, complete_steps, read_manifest, step_path, verify
from trimaran.core import parse_recipe
from trimaran.runs import RunDirectory, create_run, take_lease
from trimaran.train import read_rank_info, run_worker


@pytest.fixture
def rank_memories() -> Iterator[tuple[int, ...]]:
    """Memory that outlives the ranks, as a supervisor owns it."""
    fds = tuple(os.memfd_create("test") for _ in range(2))
    yield fds
    for fd in fds:
        os.close(fd)


def test_a_rank_killed_during_a_copy_costs_one_step(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=1, die_committing=17))
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=20, number=1, rank_memories=rank_memories))
    assert [log.start for log in logs] == [16, 16]
    assert all(log.is_right for log in logs)
    (resume,) = events(run, "resume")
    assert (resume["tier"], resume["from_step"], resume["refused"]) == ("memory", 16, [])


def test_a_kill_before_a_step_is_logged_leaves_no_gap_in_the_metrics(
    tmp_path: Path, rank_memories: tuple[int, ...]
) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=0, die_after=17))
    assert logged_steps(run) == [*range(1, 17)]
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=20, number=1, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(16, True)] * 2, "17 is in memory, but was never logged"
    assert logged_steps(run) == [*range(1, 21)]


def test_memory_of_two_ranks_restores_one_rank_and_then_two_again(
    tmp_path: Path, rank_memories: tuple[int, ...]
) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=0, die_committing=9))
    (log,) = run_ranks(1, run_attempt, run.path, ToyAttempt(to=12, number=1, rank_memories=rank_memories, finish=False))
    assert (log.start, log.is_right) == (8, True)
    assert os.fstat(rank_memories[1]).st_size == 0, "the memory of the second rank is released"
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=15, number=2, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(12, True)] * 2


def test_a_kill_before_the_first_copy_of_a_new_plan_loses_nothing(
    tmp_path: Path, rank_memories: tuple[int, ...]
) -> None:
    """One rank needs other slots than two did; those of two are the only place that holds the state."""
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=0, die_committing=9))
    attempt = ToyAttempt(to=12, number=1, rank_memories=rank_memories, faulty_rank=0, die_committing=8)
    run_until_killed(run, attempt, ranks=1)
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=15, number=2, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(8, True)] * 2


def test_a_rank_killed_during_a_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    run_until_killed(run, ToyAttempt(to=50, faulty_rank=1, die_writing=10))
    assert complete_steps(run.checkpoints) == [5]
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, number=1))
    assert [(log.start, log.is_right) for log in logs] == [(5, True)] * 2
    assert complete_steps(run.checkpoints) == [10, 12], "two are kept"
    assert {path.name[:4] for path in run.checkpoints.iterdir()} == {"step"}, "drafts are removed"


def test_a_checkpoint_that_was_not_written_is_found_in_memory(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=5", "checkpoint.memory=0")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=1, die_writing=10))
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, number=1, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(10, True)] * 2


def test_damaged_memory_is_never_loaded(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=5", "checkpoint.memory=1")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, rank_memories=rank_memories))
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=14, number=1, rank_memories=rank_memories, finish=False))
    for _, contents in RankMemory(rank_memories[1]).valid_slots():
        contents.memory[40] ^= 1
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=15, number=2, rank_memories=rank_memories))
    assert [(log.start, log.is_right) for log in logs] == [(12, True)] * 2
    refused = events(run, "resume")[-1]["refused"]
    assert [(each["tier"], each["step"]) for each in refused][:1] == [("memory", 14)]


def test_all_ranks_skip_a_checkpoint_that_one_finds_damaged(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5", "checkpoint.keep=3")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=12))
    for step, name in ((12, "rank-00001.safetensors"), (10, "index.json")):
        file = step_path(run.checkpoints, step) / name
        data = bytearray(file.read_bytes())
        data[-9] ^= 16
        file.write_bytes(data)
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=13, number=1))
    assert [(log.start, log.is_right) for log in logs] == [(5, True)] * 2
    refused = events(run, "resume")[-1]["refused"]
    assert [(each["step"], each["why"].split()[0]) for each in refused] == [
        (12, "rank-00001.safetensors"), (10, "index.json")]  # fmt: skip
    assert (run.checkpoints / "refused-step-00000012" / "why.json").exists()


@pytest.mark.slow
def test_all_ranks_skip_a_checkpoint_with_a_damaged_part(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5", "checkpoint.keep=3")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, part_bytes=4096))
    for step, position in ((12, -9), (10, 5000)):
        file = step_path(run.checkpoints, step) / "rank-00001.safetensors"
        assert len(read_manifest(file.parent).files[file.name].part_sha256) > 2
        data = bytearray(file.read_bytes())
        data[position] ^= 16
        file.write_bytes(data)
    logs = run_ranks(3, run_attempt, run.path, ToyAttempt(to=13, number=1, part_bytes=4096))
    assert [(log.start, log.is_right) for log in logs] == [(5, True)] * 3
    refused = events(run, "resume")[-1]["refused"]
    why = "rank-00001.safetensors is not what was written: its checksum is wrong"
    assert [(each["step"], each["why"]) for each in refused] == [(12, why), (10, why)]
    assert (run.checkpoints / "refused-step-00000012" / "why.json").exists()
    logs = run_ranks(1, run_attempt, run.path, ToyAttempt(to=14, number=2, part_bytes=4096))
    assert [(log.start, log.is_right) for log in logs] == [(13, True)]


def test_a_run_without_checkpoints_writes_none_and_starts_again(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=off", "checkpoint.memory=1")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=6, rank_memories=rank_memories))
    assert not run.checkpoints.exists()
    assert events(run, "checkpoint") == []
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=8, number=1, rank_memories=rank_memories))
    assert [log.start for log in logs] == [6, 6], "copies in memory are kept"
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=3, number=2))
    assert [(log.start, log.is_right) for log in logs] == [(0, True)] * 2
    assert not run.checkpoints.exists()


def test_a_slow_disk_never_gets_two_checkpoints_at_once(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=3", "checkpoint.memory=1")
    logs = run_ranks(
        2, run_attempt, run.path, ToyAttempt(to=24, rank_memories=rank_memories, faulty_rank=1, slow_disk=7)
    )
    assert all(log.is_right for log in logs)
    saved = events(run, "checkpoint")
    assert saved[-1]["step"] == 24, "the run waits for the last one"
    assert saved[-1]["skipped"] > 0
    assert 1 < len(saved) < 24 // 3
    assert verify(step_path(run.checkpoints, 24)) == []
    assert complete_steps(run.checkpoints) == sorted(each["step"] for each in saved)[-2:]


def test_a_full_disk_costs_a_checkpoint_and_nothing_else(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    logs = run_ranks(
        2, run_attempt, run.path, ToyAttempt(to=18, rank_memories=rank_memories, faulty_rank=1, full_disk=10)
    )
    assert all(log.is_right and not log.error for log in logs)
    saved = events(run, "checkpoint")
    assert [(each["step"], "failed" in each) for each in saved] == [(5, False), (10, True), (15, False), (18, False)]
    assert "rank 1" in saved[1]["failed"]
    assert "No space left" in saved[1]["failed"]
    assert not [path for path in run.checkpoints.iterdir() if path.name.startswith(".")], "the draft is gone"


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=8, faulty_rank=0, full_disk=8))
    assert all(log.error.startswith("K043") and "No space left" in log.error for log in logs)
    assert complete_steps(run.checkpoints) == [5]


def test_a_nan_weight_reaches_no_checkpoint(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, faulty_rank=1, not_finite=8))
    assert complete_steps(run.checkpoints) == [5]
    assert all(log.error.startswith("K043") and "model/weight" in log.error for log in logs)
    assert ["NaN or Inf" in each.get("failed", "") for each in events(run, "checkpoint")] == [False, True, True]


@pytest.mark.parametrize("supervised", [True, False])
def test_a_rewind_discards_later_copies(tmp_path: Path, rank_memories: tuple[int, ...], supervised: bool) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1", "faults.not_finite=rewind")
    attempt = ToyAttempt(to=14, rank_memories=rank_memories if supervised else (), rewind=(11, 10), finish=False)
    logs = run_ranks(2, run_attempt, run.path, attempt)
    assert [(log.start, log.is_right) for log in logs] == [(0, True)] * 2
    if supervised:
        metadata = [contents.metadata for fd in rank_memories for _, contents in RankMemory(fd).valid_slots()]
        assert {each.incarnation for each in metadata} == {(0, 1)}
        assert max(each.step for each in metadata) == 14


def test_a_checkpoint_from_before_a_rewind_is_never_loaded(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, rewind=(12, 7), finish=False))
    assert all(log.is_right for log in logs)
    assert complete_steps(run.checkpoints) == [5, 10]
    assert (run.checkpoints / "refused-step-00000010" / "why.json").read_text() == (
        '{"why": "the last state known to be good is that of step 5"}\n'
    )
    assert [each["step"] for each in events(run, "checkpoint")] == [5, 10, 10]
    assert logged_steps(run) == [*range(1, 13)]


def test_a_rewind_may_find_no_state(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=8, rewind=(8, 3)))
    assert [log.error for log in logs] == ["no state"] * 2
    assert complete_steps(run.checkpoints) == [5], "the checkpoint stays, for the user to inspect"


def test_a_rank_of_a_replaced_supervisor_commits_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    take_lease(run).release()
    run_ranks(1, run_attempt, run.path, ToyAttempt(to=5, term=1))
    take_lease(run).release()
    (log,) = run_ranks(1, run_attempt, run.path, ToyAttempt(to=12, number=1, term=1))
    assert log.error.startswith("K043")
    assert "another supervisor has taken over this run" in log.error
    assert complete_steps(run.checkpoints) == [5]
    (log,) = run_ranks(1, run_attempt, run.path, ToyAttempt(to=12, number=1, term=2))
    assert (log.start, log.error) == (5, "")
    assert read_manifest(step_path(run.checkpoints, 12)).term == 2


def test_a_step_folder_without_a_manifest_is_renamed(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    run_ranks(1, run_attempt, run.path, ToyAttempt(to=5))
    (run.checkpoints / "step-00000010").mkdir()
    (run.checkpoints / "step-00000012").symlink_to(tmp_path)
    (log,) = run_ranks(1, run_attempt, run.path, ToyAttempt(to=12, number=1))
    assert (log.start, log.error) == (5, "")
    assert complete_steps(run.checkpoints) == [10, 12]
    assert [each["step"] for each in events(run, "resume")[-1]["refused"]] == [10, 12]


def test_a_fifo_in_a_checkpoint_is_refused_and_the_one_before_is_used(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    run_ranks(1, run_attempt, run.path, ToyAttempt(to=12))
    put("fifo", step_path(run.checkpoints, 12) / "rank-00000.safetensors")
    (log,) = run_ranks(1, run_attempt, run.path, ToyAttempt(to=13, number=1))  # it fails if the rank waits
    assert (log.start, log.is_right) == (10, True)
    (refused,) = events(run, "resume")[-1]["refused"]
    assert (refused["step"], "it is a FIFO" in refused["why"]) == (12, True)


def test_without_memory_a_checkpoint_is_written_synchronously(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=12, has_memory=False))
    assert all(log.is_right for log in logs)
    assert complete_steps(run.checkpoints) == [10, 12]
    logs = run_ranks(1, run_attempt, run.path, ToyAttempt(to=13, number=1, has_memory=False))
    assert [(log.start, log.is_right) for log in logs] == [(12, True)]
    assert all(each["stall_seconds"] > 0 for each in events(run, "checkpoint"))


def test_a_lack_of_demanded_memory_is_an_error(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.memory=1")
    with pytest.raises(AssertionError, match="K040"):
        run_ranks(2, run_attempt, run.path, ToyAttempt(to=3, rank_memories=rank_memories, has_memory=False))


def test_a_recipe_that_was_edited_by_hand_is_refused(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    run_ranks(1, run_attempt, run.path, ToyAttempt(to=5))
    text = run.recipe.read_text()
    run.recipe.write_text(text.replace("every: 5", "every: 4"))
    run_ranks(1, run_attempt, run.path, ToyAttempt(to=6, number=1))
    run.recipe.write_text(text.replace("lr: 0.001", "lr: 0.002"))
    assert run.recipe.read_text() != text
    with pytest.raises(
        AssertionError, match=r"K041: this checkpoint is from a run with train\.lr=0\.001, this run has 0\.002"
    ):
        run_ranks(1, run_attempt, run.path, ToyAttempt(to=7, number=2))
    assert complete_steps(run.checkpoints) == [5, 6]


def test_a_run_whose_checkpoints_are_all_damaged_or_removed_does_not_start_over(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=7))
    for step in complete_steps(run.checkpoints):
        (step_path(run.checkpoints, step) / "rank-00001.safetensors").write_bytes(b"")
    for number in (1, 2):  # also after they are renamed
        with pytest.raises(AssertionError, match=r"K047: .*step 7: rank-00001\.safetensors .*step 5: rank-00001"):
            run_ranks(2, run_attempt, run.path, ToyAttempt(to=8, number=number))
    assert [each["step"] for each in events(run, "resume")[0]["refused"]] == [7, 5]
    shutil.rmtree(run.checkpoints)
    with pytest.raises(AssertionError, match=r"K047: .*that of step 7 was written and has been removed"):
        run_ranks(1, run_attempt, run.path, ToyAttempt(to=8, number=3))


def test_frozen_weights_are_written_once(tmp_path: Path) -> None:
    run = new_run(tmp_path, "checkpoint.every=5")
    run_ranks(2, run_attempt, run.path, ToyAttempt(to=10))
    first, second = events(run, "checkpoint")
    assert first["saved_bytes"] == 0
    assert second["saved_bytes"] == first["bytes"] - second["written_bytes"] > 0


def test_a_lost_node_is_restored_from_the_memory_of_its_peer(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=1, die_committing=30, nodes=True))
    steps_here = {
        contents.metadata.step
        for _, contents in RankMemory(rank_memories[0]).valid_slots()
        if contents.metadata.rank == 1
    }
    assert max(steps_here) > FIRST_INTERVAL_STEPS, (
        "rank 0 has copies of its partner's share, and not the first ones alone"
    )
    # From now on the ranks compare what copies cost them, and must have made as many.
    run.recipe.write_text(run.recipe.read_text().replace("memory: 1", "memory: auto"))
    fresh = os.memfd_create("fresh")  # another machine, with empty memory
    logs = run_ranks(
        2,
        run_attempt,
        run.path,
        ToyAttempt(to=45, number=1, rank_memories=(rank_memories[0], fresh), nodes=True),
        timeout=30,
    )
    os.close(fresh)
    assert [(log.start, log.is_right) for log in logs] == [(max(steps_here), True)] * 2
    assert events(run, "resume")[0]["tier"] == "memory"


def test_nodes_that_change_their_order_restore_the_right_shards(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    """A checkpoint of the step found in memory has each rank's rows in the new order."""
    run = new_run(tmp_path, "checkpoint.every=0", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=1, die_committing=9, nodes=True))
    swapped = (rank_memories[1], rank_memories[0])
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=0, number=1, rank_memories=swapped, nodes=True))
    assert [(log.start, log.is_right, log.error) for log in logs] == [(8, True, "")] * 2
    logs = run_ranks(2, run_attempt, run.path, ToyAttempt(to=9, number=2))
    assert [(log.start, log.is_right) for log in logs] == [(8, True)] * 2, "restored from disk, with the right values"


def test_a_damaged_copy_on_a_peer_is_not_loaded(tmp_path: Path, rank_memories: tuple[int, ...]) -> None:
    run = new_run(tmp_path, "checkpoint.every=10", "checkpoint.memory=1")
    run_until_killed(run, ToyAttempt(to=50, rank_memories=rank_memories, faulty_rank=1, die_committing=19, nodes=True))
    for _, contents in RankMemory(rank_memories[0]).valid_slots():
        if contents.metadata.rank == 1:
            contents.memory[8] ^= 1
    fresh = os.memfd_create("fresh")
    logs = run_ranks(
        2, run_attempt, run.path, ToyAttempt(to=12, number=1, rank_memories=(rank_memories[0], fresh), nodes=True)
    )
    os.close(fresh)
    assert [(log.start, log.is_right) for log in logs] == [(10, True)] * 2
    assert events(run, "resume")[0]["tier"] == "disk"


def worker(path: Path, cache: Path, attempt: ToyAttempt) -> int:
    rank_info = read_rank_info(os.environ)
    if rank_info.rank == attempt.faulty_rank:
        inject_faults(attempt, SlowDisk(0))
    return run_worker(RunDirectory(path), rank_info, cache=cache, link=link_to(attempt, rank_info))


@pytest.mark.slow  # tests/fault/test_supervisor.py kills ranks of real runs
def test_a_killed_run_ends_with_the_same_weights_as_an_uninterrupted_one(
    tmp_path: Path, rank_memories: tuple[int, ...]
) -> None:
    recipe = parse_recipe(
        "name: toy",
        name="test",
        overrides=["train.steps=6", "train.global_batch=4", "data.seq_len=32", "train.sample.tokens=0",
                   "model.shape={layers: 1, hidden: 32, heads: 2, kv_heads: 2, ffn: 64}", "checkpoint.memory=1"],
    )  # fmt: skip
    plan = plan_for(recipe, grad_accum=1, dp_shard=2)
    cache = tmp_path / "cache"
    clean = create_run(tmp_path / "clean", recipe, plan)
    assert run_ranks(2, worker, clean.path, cache, ToyAttempt(to=0)) == [0, 0]
    run = create_run(tmp_path / "run", recipe, plan)
    with pytest.raises(AssertionError, match=DIED):
        run_ranks(
            2, worker, run.path, cache, ToyAttempt(to=0, rank_memories=rank_memories, faulty_rank=1, die_committing=4)
        )
    assert run_ranks(2, worker, run.path, cache, ToyAttempt(to=0, number=1, rank_memories=rank_memories)) == [0, 0]
    assert events(run, "resume")[0]["from_step"] == 3
    ours, theirs = trajectory_of(run), trajectory_of(clean)
    assert ours.losses == theirs.losses
    assert all(torch.equal(ours.weights[name], each) for name, each in theirs.weights.items())
