"""Forked ranks that run into a fault, each with a heartbeat thread and a log, as a supervisor sees them."""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.ranks import _free_port
from tests.runs import new_run
from trimaran.launch.attribution import Attribution, attribute_fault
from trimaran.launch.collect_reports import ReportTarget, collect_reports
from trimaran.launch.node import RankEnded
from trimaran.launch.rank_report import RankReport, read_rank_reports
from trimaran.run import HeartbeatBoard, Journal, JsonlFollower
from trimaran.train.process.heartbeat_thread import HeartbeatThread
from trimaran.train.process.supervisor_link import SupervisorLink

Scenario = Callable[[int, SupervisorLink], Any]


class FaultyRanks:
    """`world_size` gloo ranks that run `scenario(rank, link)`, which enters section `save` before its fault."""

    def __init__(self, path: Path, world_size: int, scenario: Scenario) -> None:
        self.run = new_run(path / "run", world_size=world_size)
        self.world_size = world_size
        self.board = HeartbeatBoard.make(world_size)
        self.board.clear()
        context, port = multiprocessing.get_context("fork"), _free_port()
        args = [(self.run, rank, world_size, port, self.board, scenario) for rank in range(world_size)]
        self.processes = [context.Process(target=_rank, args=each) for each in args]

    def __enter__(self) -> Self:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, [self.board.read(local_rank) for local_rank in range(self.world_size)]
            time.sleep(0.02)

    def wait_for_fault(self) -> None:
        """Return when every rank is in section `save`, and has had time to run into its fault."""
        self.wait_until(
            lambda: all(self.board.read(local_rank).section == "save" for local_rank in range(self.world_size))
        )
        time.sleep(0.4)

    def collect(self, folder: Path | None = None) -> dict[int, RankReport]:
        """Return the reports of all ranks, as the supervisor collects them."""
        folder = folder or self.run.incident("i-0001")
        alive = [rank for rank in range(self.world_size) if self.processes[rank].is_alive()]
        collect_reports(
            self.run,
            self.board,
            [ReportTarget(rank, rank, self.pid(rank)) for rank in alive],
            folder,
            seconds=2.0,
            gently=False,
        )
        return read_rank_reports(self.run, folder, range(self.world_size))

    def attribute(self) -> Attribution:
        deaths = [
            RankEnded(rank=rank, code=process.exitcode, time=rank)
            for rank, process in enumerate(self.processes)
            if process.exitcode is not None
        ]
        events = [event for rank in range(self.world_size) for event in JsonlFollower(self.run.events(rank)).new()]
        return attribute_fault(self.collect(), deaths, events)


def _rank(run: Any, rank: int, world_size: int, port: int, board: HeartbeatBoard, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      GLOO_SOCKET_IFNAME="lo", TORCH_FR_BUFFER_SIZE="2000")  # fmt: skip
    log = os.open(run.log(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    assert sys.__stderr__ is not None
    faulthandler.enable(sys.__stderr__)
    link, code = SupervisorLink(board=board, local_rank=rank), 1
    with Journal(run, rank) as journal, HeartbeatThread(run, rank, link), contextlib.suppress(Exception):
        try:
            dist.init_process_group("gloo", timeout=timedelta(seconds=40))
            scenario(rank, link)
            code = 0
        except Exception as error:
            journal.event("error", type=type(error).__name__, message=str(error))
            traceback.print_exc(file=sys.__stderr__)
    os._exit(code)
