"""What follows the last step once everything is saved: the last evaluation and a sample. Both are best effort."""

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist

from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, UserError
from trimaran.core.recipe import AUTO_PROMPT, PYTHON_PROMPT
from trimaran.data.feed import BatchFeed
from trimaran.data.loader import Loader
from trimaran.data.text.tokenizer import Tokenizer
from trimaran.runs import Journal, RunDirectory
from trimaran.train.agreement import FlagAllReduce, LoopExit, StopRequest
from trimaran.train.build import WorkerParts
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.evaluate import MAX_ANSWER_TOKENS, decode_answers, generate_answers
from trimaran.train.health.guard import too_many_bad_samples
from trimaran.train.process.rank_setup import RankInfo

log = logging.getLogger(__name__)

MAX_PROMPT_TOKENS = 24
UNDECODABLE = "\ufffd"
NUM_SAMPLE_ANSWERS = 6  # to held-out questions
STOPPED = "the run was asked to stop"


def sample_prompt(parts: WorkerParts, tokenizer: Tokenizer) -> str:
    """Return the text that the model continues, the same on every rank. Every rank must call it."""
    recipe, holdout = parts.trainer.recipe, parts.training_data.holdout
    if recipe.train.sample.prompt != AUTO_PROMPT:
        return recipe.train.sample.prompt
    if recipe.data.source == "python-stdlib":
        return PYTHON_PROMPT
    if holdout is None:
        return ""
    with Loader(holdout, steps=1) as loader, parts.trainer.link.section("data"):
        row = next(loader).to(parts.trainer.device).micro(0)["tokens"][0].long().contiguous()
    dist.broadcast(row, 0)  # data-parallel ranks hold different rows
    return document_beginning(row.cpu().tolist(), tokenizer)


def document_beginning(ids: list[int], tokenizer: Tokenizer) -> str:
    """Return the first words of a document in a row of tokens, or of the row if no document begins early in it.

    A row may begin inside a document, and even inside a character. The last word may be cut, so it is left out.
    """
    half = ids[: len(ids) // 2]
    start = half.index(tokenizer.end_id) + 1 if tokenizer.end_id in half else 0
    text = tokenizer.decode(ids[start : start + MAX_PROMPT_TOKENS]).strip(UNDECODABLE)
    if not start and not tokenizer.begin_ids:
        text = text.partition(" ")[2] or text
    words = text.rpartition(" ")[0] or text
    return words.partition(UNDECODABLE)[0]


def planned_parts(parts: WorkerParts) -> list[str]:
    """Return the kinds of the events that `evaluate_and_sample` will write."""
    recipe, data = parts.trainer.recipe, parts.training_data
    has_answers = "answers" in data.objective.score_names
    can_sample = data.tokenizer is not None and (data.holdout is not None or not has_answers)
    is_planned = {
        "evaluation": bool(recipe.train.evaluate.batches and data.holdout is not None),
        "sample": bool(recipe.train.sample_tokens and can_sample),
    }
    return [kind for kind, planned in is_planned.items() if planned]


def evaluate_and_sample(parts: WorkerParts, journal: Journal, step: int) -> dict[str, str]:
    """Evaluate and generate a sample. Return why each part that was not done was not, by the kind of its event.

    Every rank takes part. Training is done and saved, so that nothing that fails here fails the run. After a failure
    ranks no longer make the same calls, and the parts that follow are left out.
    """
    do: dict[str, Callable[[], str]] = {
        "evaluation": lambda: STOPPED if parts.trainer.evaluator.run(step=step) else "",
        "sample": lambda: _write_sample(parts, journal, step),
    }
    not_done: dict[str, str] = {}
    for kind in planned_parts(parts):
        if not_done:
            not_done[kind] = f"it would have followed the {next(iter(not_done))}"
            continue
        try:
            why = do[kind]()
        except Exception as error:
            log.exception("training is done and saved, but the %s failed", kind)
            why = f"{type(error).__name__}: {error}"
        if why:
            not_done[kind] = why
    for kind, why in not_done.items():
        journal.event("unfinished", step=step, what=kind, why=why)
    return not_done


class TokenLimit:
    """Decides after each generated token, the same on every rank, whether there is time for another.

    The clock of rank 0 decides; a stop request of any rank also ends the sampling.
    """

    def __init__(self, seconds: float, stop: StopRequest, report_progress: Callable[[], None], *, rank: int) -> None:
        self._seconds, self._stop, self._report_progress = seconds, stop, report_progress
        self._until = time.monotonic() + seconds if rank == 0 else float("inf")
        self.num_tokens = 1
        self._is_over = False

    def allows_next(self) -> bool:
        """Count a token, and return whether to generate the next one."""
        self._report_progress()
        self._is_over = FlagAllReduce(bool(self._stop) or time.monotonic() > self._until).wait()
        self.num_tokens += not self._is_over
        return not self._is_over

    def fields(self, tokens: int) -> dict[str, Any]:
        """Return the fields of a `sample` event that say that it is shorter than `tokens`; none if it is not."""
        if not self._is_over or self.num_tokens >= tokens:
            return {}
        why = STOPPED if self._stop else f"after {self._seconds:g} s (train.sample.seconds)"
        return {"cut_short": f"{self.num_tokens} of {tokens} tokens: {why}"}


def _write_sample(parts: WorkerParts, journal: Journal, step: int) -> str:
    """Generate a text sample, or answers to held-out questions; rank 0 writes the events. Returns why not, or ""."""
    trainer, data = parts.trainer, parts.training_data
    assert data.tokenizer is not None
    if FlagAllReduce(bool(trainer.requests.stop)).wait():
        return STOPPED
    trainer.stepper.set_training(False)
    with trainer.link.section("sampling", step) as report_progress:
        limit = TokenLimit(
            trainer.recipe.train.sample.seconds, trainer.requests.stop, report_progress, rank=journal.rank
        )
        if "answers" in data.objective.score_names:
            assert data.holdout is not None
            _write_answers(parts, data.holdout, data.tokenizer, journal, limit, step)
        else:
            _write_text(parts, data.tokenizer, journal, limit, step)
    return ""


def _write_text(parts: WorkerParts, tokenizer: Tokenizer, journal: Journal, limit: TokenLimit, step: int) -> None:
    from trimaran.train.generation.generate import Generation, prompt_ids  # noqa: PLC0415  only to sample
    from trimaran.train.generation.next_token import NextTokenModel  # noqa: PLC0415  only to sample
    from trimaran.train.generation.sampling import Sampling, TokenSampler  # noqa: PLC0415  only to sample

    trainer, sample = parts.trainer, parts.trainer.recipe.train.sample
    tokens = trainer.recipe.train.sample_tokens
    prompt = sample_prompt(parts, tokenizer)
    generation = Generation(
        NextTokenModel(trainer.stepper.next_token_function(), parts.networks[0].max_seq_len),
        prompt_ids(tokenizer, prompt),
        TokenSampler(Sampling(temperature=sample.temperature, seed=trainer.recipe.train.seed)),
        max_tokens=tokens,
        allows_next=limit.allows_next,
    )
    for _ in generation:
        pass
    if journal.rank == 0:
        text = tokenizer.decode(generation.ids)
        journal.event("sample", step=step, prompt=prompt, text=text, **limit.fields(tokens))


def _write_answers(
    parts: WorkerParts, holdout: BatchFeed, tokenizer: Tokenizer, journal: Journal, limit: TokenLimit, step: int
) -> None:
    """Write `sample` events for the first few held-out questions and their generated answers."""
    trainer = parts.trainer
    with Loader(holdout, steps=1) as loader, trainer.link.section("data"):
        inputs = next(loader).to(trainer.device).micro(0)
    from trimaran.models.resolve import recipe_image_rules  # noqa: PLC0415  only samples have images

    rules = recipe_image_rules(trainer.recipe)
    predicted = generate_answers(
        trainer.stepper.predict_tokens,
        inputs,
        image_token=rules.image_token if rules else None,
        allows_next=limit.allows_next,
    )
    if journal.rank != 0:
        return
    answers = decode_answers(inputs, predicted, tokenizer, max_tokens=limit.num_tokens)
    for each in islice(dict.fromkeys(answers), NUM_SAMPLE_ANSWERS):
        fields = {"prompt": each.question, "text": each.generated, "expected": each.expected, "right": each.correct}
        journal.event("sample", step=step, **fields, **limit.fields(MAX_ANSWER_TOKENS))


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
