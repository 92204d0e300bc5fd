"""What follows the last step once everything is saved: the last evaluation and a sample. Both are best effort."""

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch.distributed as dist

from trimaran.core import AUTO_PROMPT, EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, PYTHON_PROMPT, UserError
from trimaran.data import Loader, Tokenizer
from trimaran.parallel import map_stages
from trimaran.runs import Journal
from trimaran.train.agreement import FlagAllReduce, LoopExit, StopRequest
from trimaran.train.build import WorkerParts
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.evaluate import MAX_ANSWER_TOKENS, decode_answers, generate_answers
from trimaran.train.health.guard import too_many_bad_samples

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
    # The first words of a document in the row, or of the row. The last word may be cut, so it is left out.
    # A row may begin inside a document, and even inside a character.
    ids = row.cpu().tolist()
    half = ids[: len(ids) // 2]
    start = half.index(tokenizer.end_id) + 1 if tokenizer.end_id in half else 0
    text = tokenizer.decode(ids[start : start + MAX_PROMPT_TOKENS]).strip(UNDECODABLE)
    if not start and not tokenizer.begin_ids:
        text = text.partition(" ")[2] or text
    words = text.rpartition(" ")[0] or text
    return words.partition(UNDECODABLE)[0]


def planned_parts(parts: WorkerParts) -> list[str]:
    recipe, data = parts.trainer.recipe, parts.training_data
    has_answers = "answers" in data.objective.score_names
    can_sample = data.tokenizer is not None and (data.holdout is not None or not has_answers)
    planned = ["evaluation"] if recipe.train.evaluate.batches and data.holdout is not None else []
    return planned + (["sample"] if recipe.train.sample_tokens and can_sample else [])


def evaluate_and_sample(parts: WorkerParts, journal: Journal, step: int) -> dict[str, str]:
    """Evaluate and sample; return why each skipped part was skipped, by kind. Every rank takes part.

    Training is done and saved, so a failure does not fail the run. After one, ranks no longer make the same calls, so
    the parts that follow are skipped.
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
    """Decides after each token, the same on every rank, whether there is time for another.

    The clock of rank 0 decides; a stop request of any rank also ends the sampling.
    """

    def __init__(self, seconds: float, stop: StopRequest, report_progress: Callable[[], None], *, rank: int) -> None:
        self._seconds, self._stop, self._report_progress = seconds, stop, report_progress
        self._until = time.monotonic() + seconds if rank == 0 else float("inf")
        self.num_tokens = 1
        self._is_over = False

    def allows_next(self) -> bool:
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
    trainer, data, tokenizer = parts.trainer, parts.training_data, parts.training_data.tokenizer
    train = trainer.recipe.train
    assert tokenizer is not None
    if FlagAllReduce(bool(trainer.requests.stop)).wait():
        return STOPPED
    trainer.stepper.set_training(False)
    with trainer.link.section("sampling", step) as report_progress:
        limit = TokenLimit(train.sample.seconds, trainer.requests.stop, report_progress, rank=journal.rank)
        samples: list[dict[str, Any]] = []
        if "answers" in data.objective.score_names:
            assert data.holdout is not None
            with Loader(data.holdout, steps=1) as loader, trainer.link.section("data"):
                inputs = next(loader).to(trainer.device).micro(0)
            from trimaran.models.resolve import recipe_image_rules  # noqa: PLC0415  only samples have images

            rules, tokens = recipe_image_rules(trainer.recipe), MAX_ANSWER_TOKENS
            image, ask = rules.image_token if rules else None, limit.allows_next
            predicted = generate_answers(trainer.stepper.predict_tokens, inputs, image_token=image, allows_next=ask)
            if journal.rank == 0:
                answers = decode_answers(inputs, predicted, tokenizer, max_tokens=limit.num_tokens)
                samples = [
                    {"prompt": each.question, "text": each.generated, "expected": each.expected, "right": each.correct}
                    for each in islice(dict.fromkeys(answers), NUM_SAMPLE_ANSWERS)
                ]
        else:
            from trimaran.train.generation import generate  # noqa: PLC0415  only to sample

            prompt, tokens = sample_prompt(parts, tokenizer), train.sample_tokens
            generation = generate.Generation(
                generate.NextTokenModel(trainer.stepper.next_token_function(), parts.networks[0].max_seq_len),
                [*tokenizer.begin_ids, *tokenizer.encode(prompt).tolist()] or [tokenizer.end_id],
                generate.TokenSampler(generate.Sampling(temperature=train.sample.temperature, seed=train.seed)),
                max_tokens=tokens,
                allows_next=limit.allows_next,
            )
            for _ in generation:
                pass
            if journal.rank == 0:
                samples = [{"prompt": prompt, "text": tokenizer.decode(generation.ids)}]
        for fields in samples:
            journal.event("sample", step=step, **fields, **limit.fields(tokens))
    return ""


def end_run(
    parts: WorkerParts,
    checkpointer: Checkpointer,
    loop_exit: LoopExit,
    started: float,
    report_saved: Callable[[], None],
) -> tuple[int, dict[str, str]]:
    """Save the end of training and do what follows it. `report_saved` is called once what must be saved is saved."""
    journal, trainer, not_saved = parts.context.journal, parts.trainer, ""
    try:
        if loop_exit.weights_are_valid:
            checkpointer.finish(loop_exit.step)
    except UserError as error:
        if loop_exit.reason != "numeric":  # otherwise the numeric failure is the error to report
            if loop_exit.reason == "done" and trainer.recipe.train.save:
                try:
                    _save_model(parts, loop_exit.step)  # the weights need less space than a checkpoint
                except UserError as second:
                    log.warning("the weights could not be saved either: %s", second)
            raise
        not_saved = f"; {error.what}"
    if loop_exit.reason != "done":
        checkpointer.saves.wait_until_uploaded(loop_exit.step)
    if loop_exit.reason == "stop":
        report_saved()
        journal.event("stop", step=loop_exit.step, reason="asked to stop")
        return EXIT_AGAIN, {}
    if loop_exit.reason == "numeric":
        return fail_numeric(journal, checkpointer, loop_exit, not_saved), {}
    if loop_exit.reason == "data":
        raise too_many_bad_samples(trainer.check.guard.bad_samples, parts.context.run, loop_exit.step)
    if trainer.recipe.train.save:
        _save_model(parts, loop_exit.step)
    # From here on nothing fails the run, and the supervisor does not restart it.
    journal.event("trained", step=loop_exit.step, next=planned_parts(parts))
    parts.context.link.report_saved()
    report_saved()
    not_done = evaluate_and_sample(parts, journal, loop_exit.step)
    checkpointer.saves.wait_until_uploaded(loop_exit.step)
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


def fail_numeric(journal: Journal, checkpointer: Checkpointer, loop_exit: LoopExit, why: str = "") -> int:
    assert loop_exit.refusal is not None
    if not loop_exit.weights_are_valid:
        checkpointer.saves.refuse_later(loop_exit.refusal.good_step)
    facts = loop_exit.refusal.as_dict() | {"step": loop_exit.step, "action": "stop"}
    message = f"training failed: {loop_exit.refusal.reason}{why}"
    journal.event("error", **facts, cause="numeric", type="Refused", message=message)
    return EXIT_STUCK


def _save_model(parts: WorkerParts, step: int) -> None:
    """Save the trained weights; of a run with an adapter only the adapter, as a PEFT folder."""
    from trimaran.train.generation.generate import save_tokenizer  # noqa: PLC0415  only now is text generated

    started, section, folder = time.monotonic(), parts.trainer.recipe.model, parts.context.run.model
    with parts.trainer.link.section("export", step) as report_progress:
        write = parts.checkpoint.base.model_writer(section, parts.networks[0], report_progress)
        write(
            parts.networks,
            folder,
            rank=parts.context.rank_info.rank,
            stages=map_stages(parts.context.plan, parts.ranks),
            read=parts.trainer.stepper.full_tensor,
            add_files=partial(save_tokenizer, parts.training_data.tokenizer),
            report_progress=report_progress,
        )
    kind = {"adapter": section.adapter.kind} if section.adapter else {}
    parts.context.journal.event("saved", step=step, path=str(folder), seconds=time.monotonic() - started, **kind)
