"""One rank of a run, from the first line to the last."""

import json
import os
import platform
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from trimaran import __version__
from trimaran.checkpoint import save_network
from trimaran.core import EXIT_DONE, EXIT_USER, Plan, Recipe, UserError
from trimaran.models import model_folder
from trimaran.telemetry import Journal, RunDirectory, create_run
from trimaran.train.assemble import Crew, build_crew
from trimaran.train.generate import Voice, save_tokenizer, write
from trimaran.train.place import Place, join


def run_worker(run: RunDirectory, place: Place, *, cache: Path) -> int:
    """Train this rank's part of `run` and return its exit code. Every end, good or bad, is an event."""
    with Journal(run, place.rank) as journal:
        try:
            if not dist.is_initialized():
                join(place)
            _work(run, place, journal, cache)
        except UserError as error:
            journal.event("error", **error.as_dict())
            return EXIT_USER
        except Exception as error:
            journal.event("error", type=type(error).__name__, message=str(error))
            traceback.print_exc(file=sys.stderr)
            return 1
        dist.destroy_process_group()
    return EXIT_DONE


def run_in_torchrun(recipe: Recipe, plan: Plan, path: Path, place: Place, *, cache: Path) -> int:
    """Train as one of the ranks that an outside torchrun started; rank 0 makes the run directory for all."""
    join(place)
    answer: dict[str, str] = {}
    if place.rank == 0:
        try:
            answer = {"path": str(create_run(path, recipe, plan).path)}
        except UserError as error:
            answer = error.as_dict()
    answer = _tell_all(answer)
    if "code" in answer:
        raise UserError(answer["code"], answer["what"], where=answer["where"], fix=answer["fix"])
    return run_worker(RunDirectory(Path(answer["path"])), place, cache=cache)


def _tell_all(answer: dict[str, str]) -> dict[str, str]:
    """Return rank 0's `answer` on every rank. It travels as JSON: torch's object collectives would pickle it."""
    letter = torch.zeros(16384, dtype=torch.uint8)
    text = json.dumps(answer).encode()
    letter[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(letter, src=0)
    return json.loads(letter.numpy().tobytes().rstrip(b"\0"))


def _work(run: RunDirectory, place: Place, journal: Journal, cache: Path) -> None:
    began = time.monotonic()
    here = {"host": platform.node(), "pid": os.getpid(), "device": str(place.device)}
    journal.event("start", world_size=place.world_size, version=__version__, **here)
    crew = build_crew(run, place, journal, cache=cache)
    crew.trainer.stop.listen()
    journal.event("ready", seconds=time.monotonic() - began)
    with crew.trainer.loader:
        steps = crew.trainer.train()
    if crew.trainer.recipe.train.save:
        _save(crew, run, journal, place, steps)  # first of all: whatever fails from here on, the weights are there
    if steps < crew.trainer.recipe.train.steps:
        journal.event("stop", step=steps, reason="asked to stop")
    else:
        crew.trainer.evaluator.run(step=steps)
    _write_sample(crew, journal, place, steps)
    journal.event("done", step=steps, steps=steps, seconds=time.monotonic() - began)


def _save(crew: Crew, run: RunDirectory, journal: Journal, place: Place, step: int) -> None:
    saving, origin = time.monotonic(), crew.trainer.recipe.model.path
    save_network(
        crew.networks,
        run.model,
        rank=place.rank,
        stages=crew.stages,
        origin=model_folder(origin) if origin else None,
        beside=partial(save_tokenizer, crew.shards.tokenizer),
    )
    journal.event("saved", step=step, path=str(run.model), seconds=time.monotonic() - saving)


def _write_sample(crew: Crew, journal: Journal, place: Place, step: int) -> None:
    """Let the network write a few lines; every rank takes part, rank 0 files them."""
    ask = crew.trainer.recipe.train.sample
    if not ask.tokens:
        return
    stepper = crew.trainer.stepper
    stepper.set_training(False)
    text = write(
        Voice(stepper.scores, crew.networks[0].longest, place.device),
        crew.shards.tokenizer,
        ask.prompt,
        tokens=ask.tokens,
        temperature=ask.temperature,
        seed=crew.trainer.recipe.train.seed,
    )
    if place.rank == 0:
        journal.event("sample", step=step, prompt=ask.prompt, text=text)
