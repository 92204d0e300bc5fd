"""The rows of the parity section: a case of `tests.matrix`, a precision, compiled or not, against one process."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.matrix import GLOBAL_BATCH, Case, cases, has_adapter, is_quick, recipe_for
from tests.nccl.row_runner import RowRunner
from tests.parity import Trajectory, differences, trajectory_of
from trimaran.core import Mesh, Plan
from trimaran.runs import RunDirectory, create_run

FP32_TOLERANCE = 1e-5  # of loss, gradient norm and weights, as in docs/parity.md
# Of the loss in bf16. In a mixture, a token between two experts may choose the other one after rounding.
BF16_TOLERANCE = {"dense": 1e-4, "mixture": 1e-3, "lora": 1e-4, "dora": 1e-4}
NORM_FACTOR = 10  # the gradient norm in bf16 may differ by this many times the tolerance of the loss
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


class ParityRunner(RowRunner):
    """Compares each row with the one process that it refers to."""

    def run(self, rows: Sequence[ParityRow]) -> Iterator[dict[str, Any]]:
        """Yield the result of each row when it is known; first run the single processes that rows refer to."""
        alone = {row.alone.name: row.alone for row in rows}
        yield from (result for result in self.run_all([*alone.values()]) if "error" in result)
        yield from self.run_all(rows)

    def path(self, row: ParityRow) -> Path:
        return self.folder / "runs" / row.name

    def result_of(self, row: ParityRow) -> dict[str, Any]:
        began, ours = time.monotonic(), self._train(row)
        theirs = ours if row == row.alone else trajectory_of(RunDirectory(self.path(row.alone)))
        loss, norm, weights = differences(ours, theirs)
        falls = ours.losses[-1] < 0.9 * ours.losses[0]  # or the comparison proves nothing
        facts = {"loss": loss, "norm": norm, "weights": weights, "seconds": time.monotonic() - began}
        return self.failure(row) | facts | {"passed": falls and row.verdict(loss, norm, weights)}

    def failure(self, row: ParityRow) -> dict[str, Any]:
        known = {"section": "parity", "name": row.name, "plan": str(row.case).removesuffix(f"-{row.case.model}")}
        known |= {"model": row.case.model, "ranks": row.ranks, "precision": row.precision, "compiled": row.compiled}
        return known | {"tolerance": row.tolerance, "passed": False}

    def _train(self, row: ParityRow) -> Trajectory:
        recipe = recipe_for(row.case.model, self.folder / "uneven.jsonl")
        return trajectory_of(self.train(create_run(self.path(row), recipe, row.plan)))
