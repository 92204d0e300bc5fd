"""One rank of a run, from the first line to the last."""

import json
import logging
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trimaran import __version__
from trimaran.checkpoint.export_hf import save_network
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, EXIT_USER, UserError
from trimaran.data.feed import BatchFeed
from trimaran.data.loader import Loader, LoaderFault
from trimaran.data.tokenizer import Tokenizer
from trimaran.infer.generate import Voice, save_tokenizer, write
from trimaran.models import model_folder
from trimaran.models.recipe_images import recipe_image_rules
from trimaran.run import Journal, RunDirectory
from trimaran.run.lease import take
from trimaran.train.agreement import Ending
from trimaran.train.answers import answers, own_words
from trimaran.train.build import WorkerParts, build_worker_parts
from trimaran.train.checkpointing.checkpointer import Checkpointer
from trimaran.train.health.bad_sample_limit import too_many_bad
from trimaran.train.metrics.step_clock import Laps
from trimaran.train.process.heartbeat_thread import HeartbeatThread
from trimaran.train.process.rank_info import RankInfo, join
from trimaran.train.process.stop_request import StopRequest
from trimaran.train.process.supervisor_link import NO_SUPERVISOR, SupervisorLink
from trimaran.train.process.torchrun_preflight import look_together

log = logging.getLogger(__name__)

ANSWERS = 6  # to questions that were held out, shown at the end


def run_worker(run: RunDirectory, place: RankInfo, *, cache: Path, link: SupervisorLink = NO_SUPERVISOR) -> int:
    """Train this rank's part of `run` and return its exit code. Every end, good or bad, is an event."""
    stop = StopRequest(run.stop_request if place.rank == 0 else None)
    stop.listen()  # before anything else: a run may be asked to end while it is being built
    with Journal(run, place.rank, attempt=link.attempt) as journal, HeartbeatThread(run, place.rank, link):
        try:
            code = _work(run, place, journal, cache, link, stop)
        except UserError as error:
            journal.event("error", **error.as_dict())
            return EXIT_USER
        except Exception as error:
            journal.event("error", type=type(error).__name__, message=str(error), **_known_of(error))
            traceback.print_exc(file=sys.stderr)
            return 1
        dist.destroy_process_group()
    return code


@contextmanager
def in_torchrun(
    place: RankInfo, make: Callable[[], RunDirectory], *, look: Callable[[], None] | None = None
) -> Iterator[tuple[RunDirectory, SupervisorLink]]:
    """Join the ranks that an outside torchrun started, and lend the run that rank 0 makes or finds for all of them.

    Rank 0 holds its lease meanwhile: nobody supervises the run, but nobody else may run it either. `look` raises where
    the run could not work on this machine, see `look_together`.
    """
    store = look_together(place, look) if look else None
    join(place)
    del store
    answer: dict[str, Any] = {}
    with ExitStack() as held:
        if place.rank == 0:
            try:
                run = make()
                answer = {"path": str(run.path), "term": held.enter_context(take(run)).term}
            except UserError as error:
                answer = error.as_dict()
        answer = _tell_all(answer)
        if "code" in answer:
            raise UserError(answer["code"], answer["what"], where=answer["where"], fix=answer["fix"])
        yield RunDirectory(Path(answer["path"])), SupervisorLink(term=answer["term"])


def _tell_all(answer: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's `answer` on every rank. It travels as JSON: torch's object collectives would pickle it."""
    letter = torch.zeros(16384, dtype=torch.uint8)
    text = json.dumps(answer).encode()
    letter[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(letter, src=0)
    return json.loads(letter.numpy().tobytes().rstrip(b"\0"))


def _known_of(error: Exception) -> dict[str, Any]:
    """Return what else there is to say of an error to whoever decides what to do about it."""
    return {"cause": "data", "sample_ids": error.sample_ids} if isinstance(error, LoaderFault) else {}


def _work(
    run: RunDirectory, place: RankInfo, journal: Journal, cache: Path, link: SupervisorLink, stop: StopRequest
) -> int:
    began, laps = time.monotonic(), Laps()
    if not dist.is_initialized():
        join(place, link)
    laps.lap("join")
    here = {"host": platform.node(), "pid": os.getpid(), "device": str(place.device)}
    journal.event("start", world_size=place.world_size, version=__version__, **here)
    parts = build_worker_parts(run, place, journal, cache=cache, link=link, stop=stop)
    laps.lap("build")
    trainer, checkpointer = parts.trainer, parts.trainer.checkpointer
    start = checkpointer.resume()
    journal.resume(start)
    laps.lap("keep")
    phases = {"join": laps.seconds["join"], **parts.seconds, "keep": laps.seconds["keep"]}
    journal.event("ready", step=start, seconds=time.monotonic() - began, phases=phases, copies=checkpointer.room)
    while (ending := trainer.train(start)).reason == "rewind":
        if (back := checkpointer.rewind(ending)) is None:
            return _give_up(journal, checkpointer, ending, ", and there is no state from before it to go back to")
        start = back
        journal.event("rewind", step=ending.step, to_step=start)
        journal.resume(start)
    link.enter("finish", ending.step)
    unkept = _keep_last(parts, run, journal, place, ending) if ending.is_sound else ""
    if ending.reason == "stop":
        journal.event("stop", step=ending.step, reason="asked to stop")
        return EXIT_AGAIN
    if ending.reason == "numeric":
        return _give_up(journal, checkpointer, ending, unkept)
    if ending.reason == "data":
        raise too_many_bad(trainer.monitor.guard.tally, run, ending.step)
    if trainer.recipe.train.save:
        _save(parts, run, journal, place, ending.step)
    if trainer.evaluator.run(step=ending.step):
        journal.event("stop", step=ending.step, reason="asked to stop")
        return EXIT_AGAIN
    _write_sample(parts, journal, place, ending.step)
    seconds = time.monotonic() - began
    journal.event("done", step=ending.step, steps=ending.step, seconds=seconds, kept=checkpointer.totals())
    return EXIT_DONE


def _keep_last(parts: WorkerParts, run: RunDirectory, journal: Journal, place: RankInfo, ending: Ending) -> str:
    """Leave the last checkpoint. Returns why there is none where the numbers went wrong: they are what must be told."""
    try:
        parts.trainer.checkpointer.finish(ending.step)
    except UserError as error:
        if ending.reason == "numeric":
            return f"; {error.what}"
        if ending.reason == "done" and parts.trainer.recipe.train.save:
            _save_nevertheless(parts, run, journal, place, ending.step)
        raise
    return ""


def _give_up(journal: Journal, checkpointer: Checkpointer, ending: Ending, why: str = "") -> int:
    assert ending.refusal is not None
    if not ending.is_sound:
        checkpointer.disown(ending.refusal.good_step)
    known = ending.refusal.as_dict() | {"step": ending.step, "action": "stop"}
    message = f"the numbers went wrong: {ending.refusal.reason}{why}"
    journal.event("error", **known, cause="numeric", type="Refused", message=message)
    return EXIT_STUCK


def _save_nevertheless(parts: WorkerParts, run: RunDirectory, journal: Journal, place: RankInfo, step: int) -> None:
    """Save the weights where the last checkpoint could not be written: they take less, and hours went into them."""
    try:
        _save(parts, run, journal, place, step)
    except UserError as error:
        log.warning("the weights could not be saved either: %s", error)


def _save(parts: WorkerParts, run: RunDirectory, journal: Journal, place: RankInfo, step: int) -> None:
    saving, origin = time.monotonic(), parts.trainer.recipe.model.path
    save_network(
        parts.networks,
        run.model,
        rank=place.rank,
        stages=parts.stages,
        origin=model_folder(origin) if origin else None,
        beside=partial(save_tokenizer, parts.training_data.tokenizer),
    )
    journal.event("saved", step=step, path=str(run.model), seconds=time.monotonic() - saving)


def _write_sample(parts: WorkerParts, journal: Journal, place: RankInfo, step: int) -> None:
    """Let the network write a few lines, or answer a few questions; every rank takes part, rank 0 files them."""
    ask, stepper = parts.trainer.recipe.train.sample, parts.trainer.stepper
    tokenizer = parts.training_data.tokenizer
    if not ask.tokens or tokenizer is None:
        return
    stepper.set_training(False)
    if "answers" in parts.training_data.objective.scores:
        if parts.training_data.holdout is not None:
            _answer(parts, parts.training_data.holdout, tokenizer, journal, step)
        return
    text = write(
        Voice(stepper.scores, parts.networks[0].longest, place.device),
        tokenizer,
        ask.prompt,
        tokens=ask.tokens,
        temperature=ask.temperature,
        seed=parts.trainer.recipe.train.seed,
    )
    if place.rank == 0:
        journal.event("sample", step=step, prompt=ask.prompt, text=text)


def _answer(parts: WorkerParts, holdout: BatchFeed, tokenizer: Tokenizer, journal: Journal, step: int) -> None:
    """File the first few questions that were held out with their answers."""
    with Loader(holdout, steps=1) as loader:
        inputs = next(loader).to(parts.trainer.device).micro(0)
    rules = recipe_image_rules(parts.trainer.recipe)
    guesses = own_words(parts.trainer.stepper.guesses, inputs, image_token=rules.image_token if rules else None)
    if journal.rank == 0:
        for each in islice(dict.fromkeys(answers(inputs, guesses, tokenizer)), ANSWERS):
            told = {"prompt": each.question, "text": each.said, "expected": each.expected, "right": each.right}
            journal.event("sample", step=step, **told)
