"""Runs rows whose ranks share one GPU, several rows at a time.

Every row forks its ranks anew: torch caches what it derived from a mesh, and a second mesh in the same process might
then use the groups of the first. Each row has a process of its own that computes the result. This process and those
never use the GPU: CUDA does not survive a fork.
"""

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing

from tests.ranks import run_ranks
from trimaran.launch import SHARE_GPUS, shared_gpu_environment
from trimaran.runs import RunDirectory
from trimaran.train import read_rank_info, run_worker

ROW_SECONDS = 240.0


@dataclass
class RowRunner(ABC):
    """Runs rows, several at a time, in run directories under `folder`; at most `max_ranks` ranks run at once."""

    folder: Path
    backend: str
    max_ranks: int
    until: float = float("inf")  # by the monotonic clock; no row is started later
    _running: dict[Connection, Any] = field(default_factory=dict)

    @abstractmethod
    def result_of(self, row: Any) -> dict[str, Any]:
        """Train a row and return its result; in a process of its own."""

    @abstractmethod
    def failure(self, row: Any) -> dict[str, Any]:
        """Return the result of a row that failed, without the error."""

    def run_all(self, rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """Yield the result of each row when it is known."""
        pending = list(rows)
        while pending or self._running:
            while pending and time.monotonic() < self.until:
                busy = sum(row.ranks for row, _ in self._running.values())
                if busy and busy + pending[0].ranks > self.max_ranks:
                    break
                self._start(pending.pop(0))
            if not self._running:
                return
            for pipe in wait(list(self._running)):
                assert isinstance(pipe, Connection)
                row, process = self._running.pop(pipe)
                try:
                    yield pipe.recv()
                except EOFError:
                    yield self.failure(row) | {"error": "the process of this row died"}
                process.join()

    def train(self, run: RunDirectory) -> RunDirectory:
        """Train a run in forked ranks."""
        ranks = run.read_plan().mesh.world_size
        codes = run_ranks(ranks, _train_rank, run.path, self.folder / "cache", self.backend, timeout=ROW_SECONDS)
        assert codes == [0] * ranks, [run.events(rank).read_text()[-2000:] for rank, code in enumerate(codes) if code]
        return run

    def _start(self, row: Any) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._send_result, args=(row, theirs))
        process.start()
        theirs.close()
        self._running[ours] = row, process

    def _send_result(self, row: Any, pipe: Connection) -> None:
        began = time.monotonic()
        try:
            pipe.send(self.result_of(row))
        except BaseException:
            facts = {"error": traceback.format_exc()[-3000:], "seconds": time.monotonic() - began}
            pipe.send(self.failure(row) | facts)


def _train_rank(path: Path, cache: Path, backend: str) -> int:
    """Train one rank of a run; on its GPU or, with gloo, on the CPU."""
    os.environ[SHARE_GPUS] = "1"
    os.environ.update(shared_gpu_environment(os.environ, int(os.environ["RANK"])))
    # Every rank would start its own pool of compiler processes.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    return run_worker(RunDirectory(path), read_rank_info(os.environ, on_cpu=backend == "gloo"), cache=cache)
