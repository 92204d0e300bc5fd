"""Faults of elastic replicas, and a record of which samples each rank trains on. TRIMARAN_TEST_PLUGIN names it.

TRIMARAN_TEST_REPLICA_FAULTS is a list of `WHEN:RANK:STEP`, separated by commas: the rank kills itself during the
exchange after STEP steps (`exchange`), when it has all values but has not voted (`vote`), after the round (`after`),
while it receives the state of another replica (`receive`), or while it saves the end of the run (`end`). It does so in
its first start only; with `:START` after it, in that one. `hang` in place of a kill: `stop-exchange`.
"""

import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.fault import plugin as _plugin  # noqa: F401 - the pause of each step
from trimaran.train import ElasticLoop, ElasticOuter, Membership, PlainStepper, StepSaver, Trainer
from trimaran.train.features.elastic import elastic_loop

RANK, START = os.environ["RANK"], os.environ["TRIMARAN_REPLICA_START"]
FAULTS = [each.split(":") for each in os.environ.get("TRIMARAN_TEST_REPLICA_FAULTS", "").split(",") if each]
current = {"step": 0}


def fail(when: str, step: int) -> None:
    for name, rank, at, *start in FAULTS:
        if (name.removeprefix("stop-"), rank, at) == (when, RANK, str(step)) and (start or ["0"]) == [START]:
            os.kill(os.getpid(), signal.SIGSTOP if name.startswith("stop-") else signal.SIGKILL)


exchange, vote, train_steps = ElasticOuter.exchange, Membership.vote, Trainer.train
next_round, receive_state = Membership.next_round, elastic_loop.receive_state
train, saves_end = PlainStepper.step, ElasticLoop.saves_end


def noted_round(self: Membership, step: int, **options: Any) -> Any:
    current["step"] = step
    return next_round(self, step, **options)


def failing_exchange(self: ElasticOuter, group: Any) -> Any:
    fail("exchange", current["step"])
    return exchange(self, group)


def failing_vote(self: Membership, opened: Any, *, ok: bool) -> Any:
    fail("vote", opened.step)
    return vote(self, opened, ok=ok)


def failing_train(self: Trainer, saver: StepSaver, start: int, **options: Any) -> Any:
    fail("after", start)
    return train_steps(self, saver, start, **options)


def failing_receive(state: Any, group: Any) -> Any:
    fail("receive", 0)
    return receive_state(state, group)


def failing_end(self: ElasticLoop) -> bool:
    saves = saves_end(self)
    if saves:
        fail("end", self.recipe.train.steps)
    return saves


def recorded_step(self: PlainStepper, batch: Any, **options: Any) -> Any:
    if folder := os.environ.get("TRIMARAN_TEST_SAMPLES"):
        with Path(folder, f"{RANK}-{START}.jsonl").open("a") as file:
            file.write(json.dumps([batch.step + 1, list(batch.sample_ids)]) + "\n")
    return train(self, batch, **options)


Membership.next_round = noted_round  # type: ignore[method-assign]
ElasticOuter.exchange = failing_exchange  # type: ignore[method-assign]
Membership.vote = failing_vote  # type: ignore[method-assign]
Trainer.train = failing_train  # type: ignore[method-assign]
ElasticLoop.saves_end = failing_end  # type: ignore[method-assign]
elastic_loop.receive_state = failing_receive
PlainStepper.step = recorded_step  # type: ignore[method-assign]
