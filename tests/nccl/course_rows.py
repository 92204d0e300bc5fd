"""The rows of the section `course`: what changes the course of training (`tests.course`), over NCCL."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tests.course import LEARNED, METHODS, SEEDS, SYNCHRONOUS, Method, held_out_loss
from tests.nccl.row_runner import RowRunner
from trimaran.runs import create_run


@dataclass(frozen=True, slots=True)
class CourseRow:
    name: str

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    @property
    def ranks(self) -> int:
        return self.method.plan().mesh.world_size


@dataclass(frozen=True, slots=True)
class Training:
    """One seed of a method; `synchronous-TASK` is what methods of this task are compared with."""

    name: str
    seed: int
    method: Method

    @property
    def ranks(self) -> int:
        return self.method.plan().mesh.world_size


def course_rows() -> list[CourseRow]:
    return [CourseRow(name) for name in METHODS]


class CourseRunner(RowRunner):
    """Trains every seed of every row, several at a time, and then compares the means."""

    def run(self, rows: Sequence[CourseRow]) -> Iterator[dict[str, Any]]:
        tasks = {row.method.task for row in rows}
        methods = {f"synchronous-{task}": SYNCHRONOUS[task] for task in tasks} | {row.name: row.method for row in rows}
        trainings = [Training(name, seed, method) for name, method in methods.items() for seed in SEEDS]
        results = list(self.run_all(trainings))
        for row in rows:
            names = (row.name, f"synchronous-{row.method.task}")
            ours, exact = ([each for each in results if each["name"] == name] for name in names)
            yield _compare(row, ours, exact)

    def result_of(self, row: Training) -> dict[str, Any]:
        path = self.folder / "runs" / f"{row.name}-{row.seed}"
        run = self.train(create_run(path, row.method.recipe(row.seed), row.method.plan()))
        return {"name": row.name, "loss": held_out_loss(run)}

    def failure(self, row: Training) -> dict[str, Any]:
        return {"name": row.name}


def _compare(row: CourseRow, ours: list[dict[str, Any]], exact: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"section": "course", "name": row.name, "ranks": row.ranks, "passed": False}
    if errors := [each["error"] for each in (*ours, *exact) if "error" in each]:
        return result | {"error": errors[0]}
    if min(len(ours), len(exact)) < len(SEEDS):
        return result | {"error": "not all seeds were trained in time"}
    found, synchronous = ([each["loss"] for each in seeds] for seeds in (ours, exact))
    limit = row.method.limit(synchronous)
    passed = mean(found) <= limit and max(synchronous) < LEARNED
    return result | {"loss": mean(found), "synchronous": mean(synchronous), "limit": limit, "passed": passed}
