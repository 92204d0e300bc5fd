"""Runs tasks of lm-eval, the LM Evaluation Harness, on a trained model. lm-eval is an extra."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trimaran.core import UserError, did_you_mean
from trimaran.serve.trained_model import TrainedModel

INSTALL = "pip install 'trimaran[eval]'"


def run_harness_tasks(
    trained: TrainedModel, tasks: list[str], *, folder: Path | None, limit: int | None
) -> dict[str, Any]:
    """Return `tasks`, the metrics of each task, and `samples`, how many samples all of them had.

    `folder` has task files of one's own. Raises UserError if lm-eval is missing or does not know a task.
    """
    if find_spec("lm_eval") is None:
        raise UserError(
            "K071", "tasks need the package 'lm_eval', which is not installed", where="--tasks", fix=INSTALL
        )
    # pyrefly: ignore[missing-import]
    from lm_eval import simple_evaluate  # noqa: PLC0415  it takes seconds to import

    # pyrefly: ignore[missing-import]
    from lm_eval.tasks import TaskManager  # noqa: PLC0415

    from trimaran.serve.harness_model import HarnessModel  # noqa: PLC0415

    if folder is not None and not folder.is_dir():
        raise UserError("A046", "there is no such folder", where=f"--task-folder {folder}",
                        fix="name a folder with task files (YAML) of lm-eval")  # fmt: skip
    manager = TaskManager(include_path=str(folder) if folder else None)
    for name in tasks:
        if name not in manager.all_tasks:
            raise UserError("A046", f"lm-eval has no task '{name}'{did_you_mean(name, manager.all_tasks)}",
                            where="--tasks", fix="see `lm-eval ls tasks`, or name --task-folder")  # fmt: skip
    answer: Any = simple_evaluate(
        model=HarnessModel(trained), tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False,
        bootstrap_iters=0, verbosity="ERROR",
    )  # fmt: skip
    samples = sum(each.get("effective", 0) for each in answer.get("n-samples", {}).values())
    return {"tasks": {name: _numbers(metrics) for name, metrics in answer["results"].items()}, "samples": samples}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics by their names, without the names of filters that change nothing and without errors."""
    found = {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in found.items() if "_stderr" not in name and name != "sample_len"}
