"""Evaluates a trained model on one process, and keeps the result in its run. Imports torch."""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trimaran.core import VERSION, Plan, UserError, did_you_mean
from trimaran.data import TokenShards, cache_folder, find_files, is_same_tokenizer, named_path, pack_files
from trimaran.serve.app.eval import EvalRequest
from trimaran.serve.app.trained_weights import saved_step
from trimaran.serve.trained_model import open_trained
from trimaran.train import EvaluatedNetwork, held_out_loss, text_loss

Progress = Callable[[str, float], None]
HELD_OUT = "held-out"


def evaluate_loss(request: EvalRequest, progress: Progress) -> dict[str, Any]:
    recipe, weights = request.weights.recipe, request.weights
    if recipe is None and request.data is None:
        raise UserError("A045.nothing-evaluate-weights", where=str(weights.path))
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
        section = request.section(request.data)
        options: dict[str, Any] = {"seq_len": min(request.seq_len or section.seq_len, trained.network.max_seq_len),
                                   "isolate": section.isolate_documents, "batches": request.batches,
                                   "progress": progress}  # fmt: skip
        if section.source == "shards":
            shards = TokenShards.open(named_path(section))
            if not is_same_tokenizer(shards.tokenizer, trained.tokenizer):
                raise UserError("T019.shards-packed-with-another-tokenizer", where=request.data)
            found = text_loss(subject, shards, **options)
        else:
            with TemporaryDirectory(prefix="trimaran-eval-") as folder:
                packed = Path(folder) / "shards"
                pack_files(section, find_files(section), trained.tokenizer, packed, progress)
                found = text_loss(subject, TokenShards.open(packed), **options)
    return about(request) | {"data": request.data or HELD_OUT, "precision": plan.precision} | found.as_dict()


def evaluate_tasks(
    request: EvalRequest, tasks: list[str], folder: Path | None, limit: int | None, progress: Progress
) -> dict[str, Any]:
    """Return the metrics of tasks of lm-eval, also of `folder`. UserError for an unknown one. Downloads nothing."""
    progress("loading the weights", 0.0)
    trained = open_trained(request.weights, "auto", cache=cache_folder(os.environ))
    progress("running the tasks", 0.2)
    if find_spec("lm_eval") is None:
        raise UserError("K071.tasks-need-package", where="--tasks")
    # pyrefly: ignore[missing-import]
    from lm_eval import simple_evaluate

    # pyrefly: ignore[missing-import]
    from lm_eval.tasks import TaskManager

    from trimaran.serve.harness_model import HarnessModel

    if folder is not None and not folder.is_dir():
        raise UserError("A046.no-such-folder", where=f"--task-folder {folder}")
    manager = TaskManager(include_path=str(folder) if folder else None)
    for name in tasks:
        if name not in manager.all_tasks:
            raise UserError("A046.lm-eval", where="--tasks", name=name, guess=did_you_mean(name, manager.all_tasks))
    answer: Any = simple_evaluate(
        model=HarnessModel(trained), tasks=list(tasks), task_manager=manager, limit=limit, log_samples=False,
        bootstrap_iters=0, verbosity="ERROR",
    )  # fmt: skip
    samples = sum(each.get("effective", 0) for each in answer.get("n-samples", {}).values())
    # Without the names of filters that change nothing, and without errors.
    numbers = {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and "_stderr" not in name and name.removesuffix(",none") != "sample_len"
        }
        for task, metrics in answer["results"].items()
    }
    return about(request) | {"data": None, "tasks": numbers, "samples": samples}


def about(request: EvalRequest) -> dict[str, Any]:
    weights = request.weights
    run_dir = str(weights.run.path) if weights.run else None
    step = weights.step
    if step is None and weights.run is not None:
        step = saved_step(weights.run)
    return {"run_dir": run_dir, "model": str(weights.path), "step": step, "time": time.time(), "version": VERSION}
