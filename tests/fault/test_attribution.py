"""Fault attribution with real ranks and real faults."""

import ctypes
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.fault.faulty_ranks import FaultyRanks, Scenario
from trimaran.launch import MAX_HEARTBEAT_AGE_SECONDS, Attribution
from trimaran.train import SupervisorLink


def attribution_of(tmp_path: Path, world_size: int, scenario: Scenario) -> Attribution:
    with FaultyRanks(tmp_path, world_size, scenario) as ranks:
        ranks.wait_for_fault()
        return ranks.attribute()


def ranks_of(attribution: Attribution) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return attribution.cause, attribution.suspects, attribution.victims


def warm_up(link: SupervisorLink) -> None:
    """Run a few steps without a fault, then enter section `save`."""
    for step in range(3):
        link.report_section("step", step)
        dist.all_reduce(torch.ones(4))
    link.report_section("save", 3)


def fall_behind(seconds: float = 600.0) -> None:
    time.sleep(seconds)


def miss_a_collective(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        fall_behind()
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_misses_a_collective_is_at_fault_and_its_line_is_in_the_evidence(tmp_path: Path) -> None:
    attribution = attribution_of(tmp_path, 3, miss_a_collective)
    assert ranks_of(attribution) == ("hang", (1,), (0, 2))
    assert "rank 1 is at tests/fault/test_attribution.py" in attribution.evidence["facts"][0]
    assert "in fall_behind: time.sleep(seconds)" in attribution.evidence["facts"][0]
    assert (
        "rank 0 waits for rank 1 in operation 4 of group 0, all_reduce of 4; it has begun 3"
        in attribution.evidence["facts"]
    )


def train_on(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    while True:
        dist.all_reduce(torch.ones(4))


def test_a_stopped_rank_is_at_fault(tmp_path: Path) -> None:
    with FaultyRanks(tmp_path, 3, train_on) as ranks:
        ranks.wait_until_saving()
        os.kill(ranks.processes[2].pid, signal.SIGSTOP)
        ranks.wait_for_fault()
        attribution = ranks.attribute()
        assert (ranks.run.incident("i-0001") / "rank-2.stacks.txt").read_text().count("File") > 0
    assert ranks_of(attribution) == ("hang", (2,), (0, 1))
    assert "rank 2 is stopped" in attribution.what


def silent_seconds(ranks: FaultyRanks, rank: int) -> float:
    """Return for how long the heartbeat thread of a rank has not run."""
    return time.monotonic() - ranks.board.read(rank).alive


def match_without_end(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 0:
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the GIL for years
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_holds_the_gil_is_at_fault_and_faulthandler_writes_its_stack(tmp_path: Path) -> None:
    with FaultyRanks(tmp_path, 2, match_without_end) as ranks:
        ranks.wait_until_saving()
        ranks.wait_until(
            lambda: silent_seconds(ranks, 0) > MAX_HEARTBEAT_AGE_SECONDS and silent_seconds(ranks, 1) < 0.5
        )
        attribution = ranks.attribute()
    assert ranks_of(attribution) == ("hang", (0,), (1,))
    assert "in match_without_end: re.match" in attribution.evidence["facts"][0]


def lock_twice(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        native, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)
    dist.all_reduce(torch.ones(4))


def test_a_rank_in_a_native_deadlock_is_at_fault(tmp_path: Path) -> None:
    attribution = attribution_of(tmp_path, 2, lock_twice)
    assert ranks_of(attribution) == ("hang", (1,), (0,))
    assert "native.pthread_mutex_lock(mutex)" in attribution.evidence["facts"][0]


def call_another_collective(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 2:
        dist.all_gather([torch.ones(4) for _ in range(3)], torch.ones(4))
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_calls_another_collective_is_at_fault_with_both_call_sites(tmp_path: Path) -> None:
    attribution = attribution_of(tmp_path, 3, call_another_collective)
    assert ranks_of(attribution) == ("mismatch", (2,), (0, 1))
    assert attribution.what == "ranks 0 and 1 called all_reduce of 4 (Float), but rank 2 called all_gather of 4 (Float)"
    assert "dist.all_gather([" in attribution.evidence["sites"]["2"]
    assert "dist.all_reduce(torch.ones(4))" in attribution.evidence["sites"]["0"]


def pass_another_shape(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    dist.all_reduce(torch.ones(400 if rank == 1 else 4))


def test_different_shapes_are_a_mismatch_although_gloo_aborts(tmp_path: Path) -> None:
    with FaultyRanks(tmp_path, 2, pass_another_shape) as ranks:
        ranks.wait_until(lambda: bool(ranks.ended))
        ranks.wait_for_fault()
        attribution = ranks.attribute()
    assert attribution.cause == "mismatch"
    assert "collective mismatch" in attribution.what
    assert sorted((*attribution.suspects, *attribution.victims)) == [0, 1]
    assert all(
        "dist.all_reduce(torch.ones(400 if rank == 1 else 4))" in attribution.evidence["sites"][rank] for rank in "01"
    )


def pipeline_of_pairs(rank: int, link: SupervisorLink) -> None:
    """Two stages of two ranks: pairs (0, 1) and (2, 3) all-reduce, 0 sends to 2 and 1 to 3, then back."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(4):
        link.report_section("save" if step == 3 else "step", step)
        if rank < 2:
            dist.all_reduce(torch.ones(4), group=pairs[0])
            dist.send(torch.ones(4), rank + 2)
            dist.recv(torch.ones(4), rank + 2)
        else:
            dist.recv(torch.ones(4), rank - 2)
            if rank == 3 and step == 3:
                fall_behind()
            dist.all_reduce(torch.ones(4), group=pairs[1])
            dist.send(torch.ones(4), rank - 2)


def test_the_rank_at_fault_is_found_through_groups_and_messages(tmp_path: Path) -> None:
    attribution = attribution_of(tmp_path, 4, pipeline_of_pairs)
    assert ranks_of(attribution) == ("hang", (3,), (0, 1, 2))
    assert "rank 1 waits for rank 3 in message 4 from it; it has begun to send 3" in attribution.evidence["facts"]


def receive_ahead(rank: int, link: SupervisorLink) -> None:
    """Rank 1 has posted its next receive when it falls behind, but does not wait for it yet."""
    warm_up(link)
    if rank == 1:
        ahead = dist.irecv(torch.ones(4), 0)
        fall_behind()
        assert ahead is not None
        ahead.wait()
    dist.recv(torch.ones(4), 1 - rank)


def test_a_rank_that_has_posted_a_receive_and_computes_is_at_fault(tmp_path: Path) -> None:
    assert ranks_of(attribution_of(tmp_path, 2, receive_ahead)) == ("hang", (1,), (0,))


def both_receive(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    dist.recv(torch.ones(4), 1 - rank)


def test_ranks_that_wait_for_each_other_are_a_mismatch(tmp_path: Path) -> None:
    attribution = attribution_of(tmp_path, 2, both_receive)
    assert ranks_of(attribution) == ("mismatch", (0, 1), ())
    assert "in a cycle" in attribution.what


class Slow(torch.autograd.Function):
    """The identity; its backward never returns."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        fall_behind()
        return gradient


def train_with_ddp(rank: int, link: SupervisorLink) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    replica = DistributedDataParallel(model, bucket_cap_mb=0.02)
    for step in range(4):
        link.report_section("save" if step == 3 else "step", step)
        hidden = replica(torch.ones(2, 64))
        if rank == 1 and step == 3:
            hidden = Slow.apply(hidden)
        hidden.sum().backward()


def test_a_rank_stuck_in_backward_is_distinguished_from_ranks_that_wait_for_its_gradients(tmp_path: Path) -> None:
    attribution = attribution_of(tmp_path, 2, train_with_ddp)
    assert ranks_of(attribution) == ("hang", (1,), (0,))
    assert "in fall_behind" in attribution.evidence["facts"][0]


def die(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        raise_something()
    dist.all_reduce(torch.ones(4))


def raise_something() -> None:
    raise ZeroDivisionError("a rank's own error")


def leave(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(4))


def crash(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(4))


def allocate_too_much(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        torch.empty(1 << 50)
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize(
    ("scenario", "cause", "text"),
    [
        (die, "crash", "rank 1 raised ZeroDivisionError: a rank's own error"),
        (leave, "exit", "rank 1 exited with code 0 before training was done"),
        (crash, "crash", "rank 1 crashed with SIGSEGV"),
        (allocate_too_much, "oom", "you tried to allocate"),
    ],
)
def test_a_rank_that_died_is_distinguished_from_ranks_that_lost_it(
    tmp_path: Path, scenario: Scenario, cause: str, text: str
) -> None:
    with FaultyRanks(tmp_path, 2, scenario) as ranks:
        ranks.wait_until(lambda: len(ranks.ended) == 2)
        attribution = ranks.attribute()
    assert ranks_of(attribution) == (cause, (1,), (0,))
    assert text in attribution.what
    assert any("rank 0 lost the connection to other ranks" in fact for fact in attribution.evidence["facts"])
