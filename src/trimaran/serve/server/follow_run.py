"""Follows a training run: loads each new complete checkpoint into the engine."""

import asyncio
import logging
from collections.abc import Collection

from trimaran.checkpoint.manifest import DamagedError
from trimaran.checkpoint.step_dirs import complete_steps, looks_complete, step_path
from trimaran.checkpoint.verify_checkpoint import refuse_damaged_weights
from trimaran.core import UserError
from trimaran.runs import RunDirectory
from trimaran.serve.server.engine_client import EngineClient
from trimaran.serve.weights_location import TrainedWeights

LOG = logging.getLogger(__name__)


def newest_weights(run: RunDirectory, *, besides: Collection[int | None] = ()) -> TrainedWeights | None:
    """Return the newest complete checkpoint of a run, other than those of the steps `besides`; None if it has none."""
    step = max((each for each in complete_steps(run.checkpoints) if each not in besides), default=None)
    if step is None or not looks_complete(path := step_path(run.checkpoints, step)):
        return None
    return TrainedWeights(path=path, run=run, step=step)


def damage_of(weights: TrainedWeights) -> str:
    """Return what is wrong with the weights of a checkpoint, by their checksums; empty if nothing is.

    The files of the optimizer are not read.
    """
    try:
        refuse_damaged_weights(weights.path, num_threads=1)
    except DamagedError as error:
        return "; ".join(f"{each.file} {each.what}" for each in error.damages[:3])
    except (UserError, OSError) as error:
        return str(error)
    return ""


async def follow_run(run: RunDirectory, client: EngineClient, *, after: int, seconds: float = 1.0) -> None:
    """Load every checkpoint newer than step `after`, until this task is cancelled. One that fails is not tried again.

    If several came while one was loaded, only the newest of them is loaded.
    """
    while True:
        await asyncio.sleep(seconds)
        found = await asyncio.to_thread(newest_weights, run)
        if found is None or found.step is None or found.step <= max(after, client.weights.step or 0):
            continue
        after = found.step
        if damage := await asyncio.to_thread(damage_of, found):
            LOG.warning("the checkpoint of step %d is damaged and is not loaded: %s", after, damage)
        elif await client.load(found):
            LOG.info("the weights of step %d answer from now on", after)
        else:
            LOG.warning("the weights of step %d could not be loaded", after)
