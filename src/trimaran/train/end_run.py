"""The end of a rank: the last checkpoint, the trained model, the last evaluation, and the exit code."""

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, UserError
from trimaran.runs import Journal, RunDirectory
from trimaran.train.after_training import evaluate_and_sample, planned_parts
from trimaran.train.agreement import LoopExit
from trimaran.train.build import WorkerParts
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.health.guard import too_many_bad_samples
from trimaran.train.process.rank_info import RankInfo

log = logging.getLogger(__name__)


def end_run(
    parts: WorkerParts,
    checkpointer: Checkpointer,
    loop_exit: LoopExit,
    started: float,
    report_saved: Callable[[], None],
) -> tuple[int, dict[str, str]]:
    """Save the end of training and do what follows it. `report_saved` is called once what must be saved is saved."""
    run, rank_info = parts.context.run, parts.context.rank_info
    journal, link = parts.context.journal, parts.context.link
    trainer, not_saved = parts.trainer, ""
    if loop_exit.weights_are_valid:
        not_saved = _save_last_checkpoint(parts, checkpointer, run, journal, rank_info, loop_exit)
    if loop_exit.reason != "done":
        checkpointer.wait_until_uploaded(loop_exit.step)
    if loop_exit.reason == "stop":
        report_saved()
        journal.event("stop", step=loop_exit.step, reason="asked to stop")
        return EXIT_AGAIN, {}
    if loop_exit.reason == "numeric":
        return fail_numeric(journal, checkpointer, loop_exit, not_saved), {}
    if loop_exit.reason == "data":
        raise too_many_bad_samples(trainer.check.guard.bad_samples, run, loop_exit.step)
    if trainer.recipe.train.save:
        _save_model(parts, run, journal, rank_info, loop_exit.step)
    # From here on nothing fails the run, and the supervisor does not restart it.
    journal.event("trained", step=loop_exit.step, next=planned_parts(parts))
    link.report_saved()
    report_saved()
    not_done = evaluate_and_sample(parts, journal, loop_exit.step)
    checkpointer.wait_until_uploaded(loop_exit.step)
    facts: dict[str, Any] = {"seconds": time.monotonic() - started, "kept": checkpointer.totals()}
    facts |= {"not_done": not_done} if not_done else {}
    journal.event("done", step=loop_exit.step, steps=loop_exit.step, **facts)
    return EXIT_DONE, not_done


def end_without_saving(journal: Journal, loop_exit: LoopExit, started: float) -> tuple[int, dict[str, str]]:
    """End a rank of an elastic replica: another replica has saved the end of the run, or goes on."""
    if loop_exit.reason in ("stop", "leave"):
        reason = "asked to stop" if loop_exit.reason == "stop" else "this replica was asked to leave"
        journal.event("stop", step=loop_exit.step, reason=reason)
        return EXIT_AGAIN, {}
    journal.event("done", step=loop_exit.step, steps=loop_exit.step, seconds=time.monotonic() - started)
    return EXIT_DONE, {}


def _save_last_checkpoint(
    parts: WorkerParts,
    checkpointer: Checkpointer,
    run: RunDirectory,
    journal: Journal,
    rank_info: RankInfo,
    loop_exit: LoopExit,
) -> str:
    """Save the last checkpoint. After a numeric failure, return why it could not be saved instead of raising.

    The numeric failure is then the error to report.
    """
    try:
        checkpointer.finish(loop_exit.step)
    except UserError as error:
        if loop_exit.reason == "numeric":
            return f"; {error.what}"
        if loop_exit.reason == "done" and parts.trainer.recipe.train.save:
            _try_save_model(parts, run, journal, rank_info, loop_exit.step)
        raise
    return ""


def fail_numeric(journal: Journal, checkpointer: Checkpointer, loop_exit: LoopExit, why: str = "") -> int:
    """Write the `error` event of a numeric failure and return the exit code."""
    assert loop_exit.refusal is not None
    if not loop_exit.weights_are_valid:
        checkpointer.refuse_later_checkpoints(loop_exit.refusal.good_step)
    facts = loop_exit.refusal.as_dict() | {"step": loop_exit.step, "action": "stop"}
    message = f"training failed: {loop_exit.refusal.reason}{why}"
    journal.event("error", **facts, cause="numeric", type="Refused", message=message)
    return EXIT_STUCK


def _try_save_model(parts: WorkerParts, run: RunDirectory, journal: Journal, rank_info: RankInfo, step: int) -> None:
    """Save the weights after the last checkpoint could not be written: they need less space than a checkpoint."""
    try:
        _save_model(parts, run, journal, rank_info, step)
    except UserError as error:
        log.warning("the weights could not be saved either: %s", error)


def _save_model(parts: WorkerParts, run: RunDirectory, journal: Journal, rank_info: RankInfo, step: int) -> None:
    """Save the trained weights; of a run with an adapter only the adapter, as a PEFT folder."""
    from trimaran.train.generation.generate import save_tokenizer  # noqa: PLC0415  only now is text generated

    started, section = time.monotonic(), parts.trainer.recipe.model
    with parts.trainer.link.section("export", step) as report_progress:
        parts.checkpoint.base.save_model(
            parts.networks,
            run.model,
            section,
            rank=rank_info.rank,
            stages=parts.stages,
            read=parts.trainer.stepper.full_tensor,
            add_files=partial(save_tokenizer, parts.training_data.tokenizer),
            report_progress=report_progress,
        )
    kind = {"adapter": section.adapter.kind} if section.adapter else {}
    journal.event("saved", step=step, path=str(run.model), seconds=time.monotonic() - started, **kind)
