"""The rows of the parity section: a case of `tests.matrix`, a precision, compiled or not, against one process.

Every row forks its ranks anew: torch caches what it derived from a mesh, and a second mesh in the same process might
then use the groups of the first. Several rows run at a time, each below a process of its own that compares the
result. This process and those never use the GPU: CUDA does not survive a fork.
"""

import os
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.multiprocessing as multiprocessing

from tests.matrix import GLOBAL_BATCH, Case, cases, has_adapter, is_quick, recipe_for
from tests.parity import Trajectory, differences, trajectory_of
from tests.ranks import run_ranks
from trimaran.core import Mesh, Plan
from trimaran.launch.shared_gpu import SHARE_GPUS, shared_gpu_environment
from trimaran.run import RunDirectory, create_run
from trimaran.train.process.rank_info import read_rank_info
from trimaran.train.worker import run_worker

FP32_TOLERANCE = 1e-5  # of loss, gradient norm and weights, as in docs/parity.md
# Of the loss in bf16. In a mixture, a token between two experts may choose the other one after rounding.
BF16_TOLERANCE = {"dense": 1e-4, "mixture": 1e-3, "lora": 1e-4, "dora": 1e-4}
NORM_FACTOR = 10  # the gradient norm in bf16 may differ by this many times the tolerance of the loss
ROW_SECONDS = 240.0
EXPERTS_AND_TP = Mesh(dp_shard=2, tp=2, ep=2)  # failed with torch 2.11 until 2026-11-16


@dataclass(frozen=True, slots=True)
class ParityRow:
    """A plan to compare with one process; `compiled` and `precision` are set in both."""

    case: Case
    precision: str = "fp32"
    compiled: bool = False

    @property
    def variant(self) -> str:
        return f"{self.precision}-compiled" if self.compiled else self.precision

    @property
    def name(self) -> str:
        return f"{self.case}-{self.variant}"

    @property
    def ranks(self) -> int:
        return self.case.plan.mesh.world_size

    @property
    def plan(self) -> Plan:
        return self.case.plan.model_copy(update={"precision": self.precision, "compile": self.compiled})

    @property
    def alone(self) -> "ParityRow":
        """The one process that this row is compared with."""
        return ParityRow(Case(Plan(micro_batch=GLOBAL_BATCH), self.case.model), self.precision, self.compiled)

    @property
    def tolerance(self) -> float:
        return FP32_TOLERANCE if self.precision == "fp32" else BF16_TOLERANCE[self.case.model.partition("-")[0]]

    def verdict(self, loss: float, norm: float, weights: float) -> bool:
        """Return whether differences of these sizes are within the tolerance. In bf16 the weights are not compared."""
        if self.precision == "fp32":
            return max(loss, norm, weights) <= self.tolerance
        return loss <= self.tolerance and norm <= NORM_FACTOR * self.tolerance


def parity_rows() -> list[ParityRow]:
    """Return all cases in fp32, and those of `make test` in bf16 and compiled; first those that compile nothing.

    The planner refuses compiled blocks with a split backward (zero-bubble).
    """
    rows = [ParityRow(case) for case in cases()]
    for case in cases():
        if is_quick(case) or has_adapter(case) or case.plan.mesh == EXPERTS_AND_TP:
            rows.append(ParityRow(case, "bf16"))
            if case.plan.mesh.pp == 1 or case.plan.pipeline.schedule != "zero-bubble":
                rows += [ParityRow(case, precision, compiled=True) for precision in ("fp32", "bf16")]
    return sorted(rows, key=lambda row: (row.compiled, -row.ranks, row.precision))


@dataclass
class ParityRunner:
    """Runs rows, several at a time, in run directories under `folder`; at most `max_ranks` ranks run at once."""

    folder: Path
    backend: str
    max_ranks: int
    until: float = float("inf")  # by the monotonic clock; no row is started later
    _running: dict[Connection, Any] = field(default_factory=dict)

    def run(self, rows: Sequence[ParityRow]) -> Iterator[dict[str, Any]]:
        """Yield the result of each row when it is known; first run the single processes that rows refer to."""
        alone = {row.alone.name: row.alone for row in rows}
        yield from (result for result in self._run_all([*alone.values()]) if "error" in result)
        yield from self._run_all(rows)

    def path(self, row: ParityRow) -> Path:
        return self.folder / "runs" / row.name

    def _run_all(self, rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
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
                    yield self._died(row)
                process.join()

    def _died(self, row: Any) -> dict[str, Any]:
        return _result(row, error="the process of this row died")

    def _start(self, row: Any) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=self._run_row, args=(row, theirs))
        process.start()
        theirs.close()
        self._running[ours] = row, process

    def _run_row(self, row: ParityRow, pipe: Connection) -> None:
        began = time.monotonic()
        try:
            ours = self._train(row)
            theirs = ours if row == row.alone else trajectory_of(RunDirectory(self.path(row.alone)))
            loss, norm, weights = differences(ours, theirs)
            falls = ours.losses[-1] < 0.9 * ours.losses[0]  # or the comparison proves nothing
            facts = {"loss": loss, "norm": norm, "weights": weights}
            passed = falls and row.verdict(loss, norm, weights)
            pipe.send(_result(row, **facts, passed=passed, seconds=time.monotonic() - began))
        except BaseException:
            pipe.send(_result(row, error=traceback.format_exc()[-3000:], seconds=time.monotonic() - began))

    def _train(self, row: ParityRow) -> Trajectory:
        recipe = recipe_for(row.case.model, self.folder / "uneven.jsonl")
        run = create_run(self.path(row), recipe, row.plan)
        rank = partial(worker, run.path, self.folder / "cache", self.backend)
        codes = run_ranks(row.ranks, rank, timeout=ROW_SECONDS)
        assert codes == [0] * row.ranks, [
            run.events(rank).read_text()[-2000:] for rank, code in enumerate(codes) if code
        ]
        return trajectory_of(run)


def _result(row: ParityRow, **facts: Any) -> dict[str, Any]:
    known = {"section": "parity", "name": row.name, "plan": str(row.case).removesuffix(f"-{row.case.model}")}
    known |= {"model": row.case.model, "ranks": row.ranks, "precision": row.precision, "compiled": row.compiled}
    return known | {"tolerance": row.tolerance, "passed": False} | facts


def worker(path: Path, cache: Path, backend: str) -> int:
    """Train one rank of a run; on its GPU or, with gloo, on the CPU."""
    os.environ[SHARE_GPUS] = "1"
    os.environ.update(shared_gpu_environment(os.environ, int(os.environ["RANK"])))
    # Every rank would start its own pool of compiler processes.
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    return run_worker(RunDirectory(path), read_rank_info(os.environ, on_cpu=backend == "gloo"), cache=cache)
