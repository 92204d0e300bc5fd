"""A server follows a run that saves, prunes and damages checkpoints, and whose trainer is killed."""

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.fault_run import kill_supervisor, resume_run, start_run
from tests.fault.harness import Supervised
from tests.serving import RunningServer, greedy_text, running_server, wait_for
from trimaran.app import damage_checkpoint
from trimaran.checkpoint import complete_steps, step_path
from trimaran.core import UserError
from trimaran.runs import RunDirectory

pytestmark = pytest.mark.chaos

PROMPT = "def "
TOKENS = 40
NUM_CLIENTS = 3


class Clients:
    """Ask the server all the time, and keep a link to every checkpoint, pruned ones included."""

    def __init__(self, server: RunningServer, run: RunDirectory, kept: Path) -> None:
        self._server, self._run, self._kept = server, run, kept
        self._over = threading.Event()
        self.answers: list[tuple[int, str]] = []
        self.errors: list[Any] = []
        kept.mkdir()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(NUM_CLIENTS)]
        self._threads.append(threading.Thread(target=self._keep, daemon=True))
        for each in self._threads:
            each.start()

    def _ask(self) -> None:
        while not self._over.is_set():
            body = {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            answer = self._server.client.post("/v1/completions", json=body)
            if answer.status_code != 200:
                self.errors.append((answer.status_code, answer.text))
                continue
            tree = answer.json()
            step = int(tree["system_fingerprint"].rpartition("-")[2])
            self.answers.append((step, tree["choices"][0]["text"]))

    def _keep(self) -> None:
        while not self._over.wait(0.02):
            for step in complete_steps(self._run.checkpoints):
                if not (target := self._kept / str(step)).exists():
                    draft = self._kept / "draft"
                    shutil.rmtree(draft, ignore_errors=True)
                    with suppress(OSError, shutil.Error):  # it is pruned right now
                        shutil.copytree(step_path(self._run.checkpoints, step), draft, copy_function=os.link)
                        draft.rename(target)

    def steps(self) -> set[int]:
        return {step for step, _ in [*self.answers]}

    def wait_for_newer(self, what: str) -> None:
        """Wait until a checkpoint answers that is newer than all that have answered."""
        before = max(self.steps(), default=0)
        wait_for(lambda: max(self.steps(), default=0) > before or self.errors, what, seconds=120)

    def end(self) -> None:
        self._over.set()
        for each in self._threads:
            each.join()

    def wrong_answers(self) -> list[tuple[int, str]]:
        """Return the answers that no kept checkpoint gives; those of lost checkpoints are not compared."""
        known = {step: greedy_text(self._kept / str(step), PROMPT, TOKENS, run=self._run, step=step)
                 for step in self.steps() if (self._kept / str(step)).exists()}  # fmt: skip
        assert len(known) >= 4, (sorted(known), sorted(self.steps()))
        return [(step, text) for step, text in self.answers if known.get(step, text) != text]


def damage_newest(run: RunDirectory) -> None:
    with suppress(OSError, UserError):  # it is pruned right now
        damage_checkpoint(run)


def test_answers_are_of_one_checkpoint_each_while_the_run_prunes_damages_and_dies(tmp_path: Path) -> None:
    settings = ("train.steps=100000", "checkpoint.every=100", "checkpoint.keep=2")
    with start_run(tmp_path / "run", *settings) as training:
        training.wait_for_step(101)
        run = training.run
        with running_server(run.path, "--follow", log=tmp_path / "log") as server:
            clients = Clients(server, run, tmp_path / "kept")
            clients.wait_for_newer("the first checkpoint answers")
            clients.wait_for_newer("the next one does")
            for _ in range(3):
                damage_newest(run)
                clients.wait_for_newer("one after a damaged one does")
            kill_supervisor(training)
            with resume_run(run) as again:
                clients.wait_for_newer("one of the resumed run does")
                assert clients.errors == []
                survive_without_its_checkpoint(server, again, clients)
            assert clients.errors == []
            clients.end()
            log = (tmp_path / "log").read_text()
    assert clients.wrong_answers() == []
    assert "Traceback" not in log, log


def survive_without_its_checkpoint(server: RunningServer, training: Supervised, clients: Clients) -> None:
    """Damage the newest checkpoint and kill the engine, while nothing writes another one: an older one answers.

    An answer that was half written then cannot be completed, and fails with a code.
    """
    kill_supervisor(training)
    newest = complete_steps(training.run.checkpoints)[-1]
    for each in step_path(training.run.checkpoints, newest).glob("*.safetensors"):
        draft = each.with_name("draft")  # the kept checkpoints share the file
        draft.write_bytes(bytes(each.stat().st_size))
        draft.replace(each)
    for engine in server.engines():
        engine.kill()
    wait_for(lambda: server.metrics()["engine_restarts_total"] == 1, "the death is noticed")
    wait_for(lambda: clients.answers[-1][0] < newest, "an older checkpoint answers", seconds=240)
    assert len(clients.errors) <= NUM_CLIENTS, "only what was running then"
    assert all("the weights that this answer began with are gone" in text for _, text in clients.errors)
    clients.errors.clear()
