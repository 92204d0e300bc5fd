"""Forked ranks that run into a fault, each with a heartbeat thread and a log, as a supervisor sees them."""

import contextlib
import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from tests.forked import Forked, call
from tests.runs import new_run
from trimaran.launch import (
    Attribution,
    LocalRank,
    RankEnded,
    RankReport,
    attribute_fault,
    collect_reports,
    process_state,
    read_rank_reports,
)
from trimaran.runs import HeartbeatBoard, Journal, RunDirectory, read_json_lines
from trimaran.train import HeartbeatThread, SupervisorLink

Scenario = Callable[[int, SupervisorLink], Any]
QUIET_SECONDS, QUIET_TICKS = 0.3, 2
REPORT_SECONDS = 5.0


class FaultyRanks:
    """`world_size` gloo ranks that run `scenario(rank, link)`, which enters section `save` before its fault."""

    def __init__(self, path: Path, world_size: int, scenario: Scenario) -> None:
        self.run = new_run(path / "run", world_size=world_size)
        self.world_size, self._scenario = world_size, scenario
        self.board = HeartbeatBoard.make(world_size)
        self.board.clear()
        self.processes: list[Forked] = []

    def __enter__(self) -> Self:
        board = Path(f"/proc/{os.getpid()}/fd/{self.board.fd}")
        with open(os.devnull, "wb") as unused:  # no result and no native stacks: a rank has a log
            for rank in range(self.world_size):
                arguments = (self.run.path, rank, self.world_size, board, self._scenario)
                self.processes.append(call(run_rank, arguments, os.environ, unused.fileno(), unused.fileno()))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    @property
    def ended(self) -> dict[int, int]:
        """The exit codes of the ranks that have ended."""
        return {rank: code for rank, process in enumerate(self.processes) if (code := process.poll()) is not None}

    def wait_until(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, [self.board.read(local_rank) for local_rank in range(self.world_size)]
            time.sleep(0.02)

    def wait_until_saving(self) -> None:
        """Return when every rank is in section `save`."""
        self.wait_until(
            lambda: all(self.board.read(local_rank).section == "save" for local_rank in range(self.world_size))
        )

    def wait_for_fault(self) -> None:
        """Return when every rank is in section `save` and stays asleep: all wait, for each other or for nothing.

        A rank that waits polls now and then; one that goes on uses the CPU.
        """
        self.wait_until_saving()
        self.wait_until(self._is_quiet)

    def _is_quiet(self) -> bool:
        before = self._cpu_ticks()
        time.sleep(QUIET_SECONDS)
        return self._cpu_ticks() - before <= QUIET_TICKS and all(
            process_state(process.pid) in "STtZ" for process in self.processes
        )

    def _cpu_ticks(self) -> int:
        """Return how long the main threads of the ranks have used the CPU, in hundredths of a second."""
        total = 0
        for process in self.processes:
            with contextlib.suppress(OSError):  # it has ended
                fields = Path(f"/proc/{process.pid}/task/{process.pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total

    def collect(self, folder: Path | None = None, *, seconds: float = REPORT_SECONDS) -> dict[int, RankReport]:
        """Return the reports of all ranks, as the supervisor collects them. A rank that cannot answer takes `seconds`.

        That is longer than in a run: a rank that can answer must do so on a busy machine, too.
        """
        folder = folder or self.run.incident("i-0001")
        alive = [rank for rank in range(self.world_size) if rank not in self.ended]
        collect_reports(
            self.run,
            self.board,
            [LocalRank(rank, rank, self.processes[rank].pid) for rank in alive],
            folder,
            seconds=seconds,
            gently=False,
        )
        return read_rank_reports(self.run, folder, range(self.world_size))

    def attribute(self) -> Attribution:
        deaths = [RankEnded(rank=rank, code=code, time=rank) for rank, code in self.ended.items()]
        events = [event for rank in range(self.world_size) for event in read_json_lines(self.run.events(rank))]
        return attribute_fault(self.collect(), deaths, events)


def run_rank(path: Path, rank: int, world_size: int, board_file: Path, scenario: Scenario) -> None:
    """Run a scenario in this process, and exit."""
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TORCH_FR_BUFFER_SIZE="2000")
    run = RunDirectory(path)
    log = os.open(run.log(rank), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    assert sys.__stderr__ is not None
    faulthandler.enable(sys.__stderr__)
    board = HeartbeatBoard(os.open(board_file, os.O_RDWR))
    link, code = SupervisorLink(board=board, local_rank=rank), 1
    with Journal(run, rank) as journal, HeartbeatThread(run, rank, link), contextlib.suppress(Exception):
        try:
            dist.init_process_group("gloo", init_method=f"file://{path}/rendezvous", rank=rank, world_size=world_size,
                                    timeout=timedelta(seconds=300))  # fmt: skip
            scenario(rank, link)
            code = 0
        except Exception as error:
            journal.event("error", type=type(error).__name__, message=str(error))
            traceback.print_exc(file=sys.__stderr__)
    os._exit(code)
