"""Who did it: real ranks in real trouble, and the judgement that a supervisor comes to."""

import ctypes
import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.fault.dock import Dock, Scenario
from trimaran.core import Incident
from trimaran.launch.attribution import Attribution
from trimaran.launch.node import Orders
from trimaran.launch.slow_rank_check import SlowRankCheck
from trimaran.run import Heartbeat, IncidentLog, read_incidents
from trimaran.train.process.supervisor_link import SupervisorLink


def judgement_of(tmp_path: Path, world_size: int, scenario: Scenario) -> Attribution:
    with Dock(tmp_path, world_size, scenario) as dock:
        dock.in_trouble()
        return dock.judge()


def blames(judgement: Attribution) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return judgement.cause, judgement.suspects, judgement.victims


def warm_up(link: SupervisorLink) -> None:
    """A few steps in which all is well."""
    for step in range(3):
        link.enter("step", step)
        dist.all_reduce(torch.ones(4))
    link.enter("save", 3)


def fall_behind(seconds: float = 60.0) -> None:
    time.sleep(seconds)


def miss_a_collective(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        fall_behind()
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_misses_a_collective_is_named_and_so_is_the_line_where_it_stands(tmp_path: Path) -> None:
    judgement = judgement_of(tmp_path, 3, miss_a_collective)
    assert blames(judgement) == ("hang", (1,), (0, 2))
    assert "rank 1 stands at tests/fault/test_blame.py" in judgement.evidence["facts"][0]
    assert "in fall_behind: time.sleep(seconds)" in judgement.evidence["facts"][0]
    assert (
        "rank 0 waits for rank 1 in operation 4 of group 0, all_reduce of 4; it has begun 3"
        in judgement.evidence["facts"]
    )


def train_on(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    while True:
        dist.all_reduce(torch.ones(4))


def test_a_stopped_rank_is_named(tmp_path: Path) -> None:
    with Dock(tmp_path, 3, train_on) as dock:
        dock.in_trouble()
        os.kill(dock.pid(2), signal.SIGSTOP)
        time.sleep(0.3)
        judgement = dock.judge()
        assert (dock.run.incident("i-0001") / "rank-2.stacks.txt").read_text().count("File") > 0
    assert blames(judgement) == ("hang", (2,), (0, 1))
    assert "rank 2 is stopped" in judgement.what


def match_for_ever(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 0:
        re.match(r"(a+)+$", "a" * 60 + "b")  # holds the interpreter for years
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_holds_the_interpreter_is_named_and_its_stack_comes_from_below(tmp_path: Path) -> None:
    with Dock(tmp_path, 2, match_for_ever) as dock:
        dock.in_trouble()
        dock.until(lambda: dock.board.read(0).alive < time.monotonic() - 1.6)
        judgement = dock.judge()
    assert blames(judgement) == ("hang", (0,), (1,))
    assert "in match_for_ever: re.match" in judgement.evidence["facts"][0]


def lock_twice(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        native, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        native.pthread_mutex_lock(mutex)
        native.pthread_mutex_lock(mutex)
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_has_locked_itself_out_in_native_code_is_named(tmp_path: Path) -> None:
    judgement = judgement_of(tmp_path, 2, lock_twice)
    assert blames(judgement) == ("hang", (1,), (0,))
    assert "native.pthread_mutex_lock(mutex)" in judgement.evidence["facts"][0]


def call_something_else(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 2:
        dist.all_gather([torch.ones(4) for _ in range(3)], torch.ones(4))
    dist.all_reduce(torch.ones(4))


def test_a_rank_that_calls_another_collective_is_named_with_both_call_sites(tmp_path: Path) -> None:
    judgement = judgement_of(tmp_path, 3, call_something_else)
    assert blames(judgement) == ("mismatch", (2,), (0, 1))
    assert judgement.what == "ranks 0 and 1 called all_reduce of 4 (Float), but rank 2 called all_gather of 4 (Float)"
    assert "dist.all_gather([" in judgement.evidence["sites"]["2"]
    assert "dist.all_reduce(torch.ones(4))" in judgement.evidence["sites"]["0"]


def bring_another_shape(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    dist.all_reduce(torch.ones(400 if rank == 1 else 4))


def test_ranks_that_bring_different_shapes_are_a_mismatch_though_gloo_aborts(tmp_path: Path) -> None:
    with Dock(tmp_path, 2, bring_another_shape) as dock:
        dock.until(lambda: any(process.exitcode is not None for process in dock.processes))
        time.sleep(0.3)
        judgement = dock.judge()
    assert judgement.cause == "mismatch"
    assert "collective mismatch" in judgement.what
    assert sorted((*judgement.suspects, *judgement.victims)) == [0, 1]
    assert all(
        "dist.all_reduce(torch.ones(400 if rank == 1 else 4))" in judgement.evidence["sites"][rank] for rank in "01"
    )


def pipeline_of_pairs(rank: int, link: SupervisorLink) -> None:
    """Two stages of two ranks: pairs (0, 1) and (2, 3) sum, 0 sends to 2 and 1 to 3, gradients go back."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for step in range(4):
        link.enter("save" if step == 3 else "step", step)
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


def test_the_culprit_is_found_through_groups_and_messages(tmp_path: Path) -> None:
    judgement = judgement_of(tmp_path, 4, pipeline_of_pairs)
    assert blames(judgement) == ("hang", (3,), (0, 1, 2))
    assert "rank 1 waits for rank 3 in message 4 from it; it has begun to send 3" in judgement.evidence["facts"]


def receive_ahead(rank: int, link: SupervisorLink) -> None:
    """Rank 1 has asked for its next message already when it falls behind: it waits for nobody, for all that."""
    warm_up(link)
    if rank == 1:
        ahead = dist.irecv(torch.ones(4), 0)
        fall_behind()
        assert ahead is not None
        ahead.wait()
    dist.recv(torch.ones(4), 1 - rank)


def test_a_rank_that_has_begun_an_operation_and_computes_is_not_taken_for_a_victim(tmp_path: Path) -> None:
    assert blames(judgement_of(tmp_path, 2, receive_ahead)) == ("hang", (1,), (0,))


def both_receive(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    dist.recv(torch.ones(4), 1 - rank)


def test_ranks_that_wait_for_each_other_are_a_mismatch(tmp_path: Path) -> None:
    judgement = judgement_of(tmp_path, 2, both_receive)
    assert blames(judgement) == ("mismatch", (0, 1), ())
    assert "in a circle" in judgement.what


class Slow(torch.autograd.Function):
    """Leaves its input alone; its gradient never comes."""

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
        link.enter("save" if step == 3 else "step", step)
        hidden = replica(torch.ones(2, 64))
        if rank == 1 and step == 3:
            hidden = Slow.apply(hidden)
        hidden.sum().backward()


def test_a_rank_stuck_in_backward_is_told_from_those_that_wait_there_for_its_gradients(tmp_path: Path) -> None:
    judgement = judgement_of(tmp_path, 2, train_with_ddp)
    assert blames(judgement) == ("hang", (1,), (0,))
    assert "in fall_behind" in judgement.evidence["facts"][0]


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


def swell(rank: int, link: SupervisorLink) -> None:
    warm_up(link)
    if rank == 1:
        torch.empty(1 << 50)
    dist.all_reduce(torch.ones(4))


@pytest.mark.parametrize(
    ("scenario", "cause", "words"),
    [
        (die, "crash", "rank 1 raised ZeroDivisionError: a rank's own error"),
        (leave, "exit", "rank 1 left early"),
        (crash, "crash", "rank 1 died of SIGSEGV"),
        (swell, "oom", "can't allocate memory"),
    ],
)
def test_the_first_to_die_is_told_from_those_who_lost_it(
    tmp_path: Path, scenario: Scenario, cause: str, words: str
) -> None:
    with Dock(tmp_path, 2, scenario) as dock:
        dock.until(lambda: all(process.exitcode is not None for process in dock.processes))
        judgement = dock.judge()
    assert blames(judgement) == (cause, (1,), (0,))
    assert words in judgement.what
    assert any("rank 0 lost the others" in fact for fact in judgement.evidence["facts"])


def train_in_step(rank: int, link: SupervisorLink) -> None:
    """Steps of 30 ms that sleep instead of computing, so that a busy machine does not make them slow."""
    buckets = [torch.ones(100 + each) for each in range(3)]
    for step in range(10_000):
        link.enter("step", step)
        works = []
        for bucket in buckets:
            for _ in range(5):
                time.sleep(0.002)
            works.append(dist.all_reduce(bucket, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        dist.all_reduce(torch.ones(()))


def hamper(pid: int, over: threading.Event) -> None:
    """Let a process run for 40 % of the time."""
    while not over.is_set():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.04)


@dataclass(frozen=True)
class Attempt:
    """What a roll call sees of a dock: it is its only node."""

    dock: Dock
    orders: Orders

    @property
    def nodes(self) -> list["Attempt"]:
        return [self]

    def heartbeats(self) -> dict[int, Heartbeat]:
        return {rank: self.dock.board.read(rank) for rank in range(self.dock.world_size)}

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None:
        self.dock.ask(folder)


def watch_for(seconds: float, attempt: Attempt, roll_call: SlowRankCheck) -> list[Incident]:
    """Take the roll call as the supervisor does, until it finds something."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not read_incidents(attempt.dock.run):
        roll_call.take(attempt)
        time.sleep(0.05)
    return read_incidents(attempt.dock.run)


@pytest.mark.chaos  # how soon it is seen depends on what else the cores do
def test_a_rank_that_is_held_up_is_called_slow_and_nobody_else_is(tmp_path: Path) -> None:
    with Dock(tmp_path, 2, train_in_step) as dock:
        dock.until(lambda: dock.board.read(0).step > 5)
        orders = Orders(attempt=0, first_rank=0, num_ranks=2, world_size=2, store="", token="")
        attempt, over = Attempt(dock, orders), threading.Event()
        roll_call = SlowRankCheck(dock.run, IncidentLog(dock.run))
        assert watch_for(2.0, attempt, roll_call) == []
        onset = dock.board.read(0).step
        thread = threading.Thread(target=hamper, args=(dock.pid(1), over))
        thread.start()
        try:
            (incident,) = watch_for(15.0, attempt, roll_call)
        finally:
            over.set()
            thread.join()
    assert (incident.cause, incident.suspects, incident.action) == ("straggler", (1,), "continued")
    assert incident.cost["slowdown"] > 1.3
    assert incident.step - onset <= 60  # 20 on a quiet machine
