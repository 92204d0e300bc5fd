"""Evaluates a trained model on one process, and keeps the result in its run. Imports torch."""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trimaran.core import VERSION, Plan, UserError, did_you_mean
from trimaran.data import TokenShards, cache_folder, is_same_tokenizer, named_path, pack_with
from trimaran.runs import append_line
from trimaran.serve.app.eval import EvalRequest
from trimaran.serve.app.trained_weights import saved_step
from trimaran.serve.trained_model import TrainedModel, open_trained
from trimaran.train import EvaluatedNetwork, HeldOutLoss, held_out_loss, text_loss

Progress = Callable[[str, float], None]
HELD_OUT = "held-out"


def evaluate_loss(request: EvalRequest, progress: Progress) -> dict[str, Any]:
    recipe, weights = request.weights.recipe, request.weights
    if recipe is None and request.data is None:
        raise UserError("A045", "there is nothing to evaluate on: these weights come without a run",
                        where=str(weights.path),
                        fix="name a text file or a data set: --data PATH")  # fmt: skip
    progress("loading the weights", 0.0)
    trained = open_trained(weights, "fp32", cache=cache_folder(os.environ))
    plan = weights.run.read_plan() if weights.run else Plan()
    tokenizer = trained.tokenizer if recipe is None or recipe.model.kind.reads != "scenes" else None
    subject = EvaluatedNetwork(network=trained.network, tokenizer=tokenizer, device=trained.device, plan=plan)
    if request.data is None:
        assert recipe is not None
        found = held_out_loss(
            subject, recipe, batches=request.batches, cache=cache_folder(os.environ), progress=progress
        )
    else:
        found = _loss_on(request, request.data, trained, subject, progress)
    return about(request) | {"data": request.data or HELD_OUT, "precision": plan.precision} | found.as_dict()


def _loss_on(
    request: EvalRequest, data: str, trained: TrainedModel, subject: EvaluatedNetwork, progress: Progress
) -> HeldOutLoss:
    section = request.section(data)
    seq_len = min(request.seq_len or section.seq_len, trained.network.max_seq_len)
    options: dict[str, Any] = {"seq_len": seq_len, "isolate": section.isolate_documents, "batches": request.batches,
                               "progress": progress}  # fmt: skip
    if section.source == "shards":
        shards = TokenShards.open(named_path(section))
        if not is_same_tokenizer(shards.tokenizer, trained.tokenizer):
            raise UserError("T019", "the shards were packed with another tokenizer than the model's", where=data,
                            fix="evaluate on the text, or pack it again with the model's tokenizer")  # fmt: skip
        return text_loss(subject, shards, **options)
    with TemporaryDirectory(prefix="trimaran-eval-") as folder:
        shards = TokenShards.open(pack_with(section, trained.tokenizer, Path(folder) / "shards", progress=progress))
        return text_loss(subject, shards, **options)


def evaluate_tasks(
    request: EvalRequest, tasks: list[str], folder: Path | None, limit: int | None, progress: Progress
) -> dict[str, Any]:
    """Return the metrics of tasks of lm-eval. Its data must be on this machine: nothing is downloaded.

    `folder` has task files of one's own. Raises UserError if lm-eval is missing or does not know a task.
    """
    progress("loading the weights", 0.0)
    trained = open_trained(request.weights, "auto", cache=cache_folder(os.environ))
    progress("running the tasks", 0.2)
    if find_spec("lm_eval") is None:
        raise UserError("K071", "tasks need the package 'lm_eval', which is not installed", where="--tasks",
                        fix="pip install 'trimaran[eval]'")  # fmt: skip
    # pyrefly: ignore[missing-import]
    from lm_eval import simple_evaluate

    # pyrefly: ignore[missing-import]
    from lm_eval.tasks import TaskManager

    from trimaran.serve.harness_model import HarnessModel

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
    numbers = {name: _numbers(metrics) for name, metrics in answer["results"].items()}
    return about(request) | {"data": None, "tasks": numbers, "samples": samples}


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the metrics by their names, without the names of filters that change nothing and without errors."""
    found = {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in found.items() if "_stderr" not in name and name != "sample_len"}


def about(request: EvalRequest) -> dict[str, Any]:
    weights = request.weights
    run_dir = str(weights.run.path) if weights.run else None
    step = weights.step
    if step is None and weights.run is not None:
        step = saved_step(weights.run)
    return {"run_dir": run_dir, "model": str(weights.path), "step": step, "time": time.time(), "version": VERSION}


def save_evaluation(request: EvalRequest, found: dict[str, Any]) -> None:
    """Append the result to the run's evaluations. Does nothing for weights without a run."""
    if request.weights.run is not None:
        append_line(request.weights.run.evaluations, {key: value for key, value in found.items() if key != "run_dir"})
