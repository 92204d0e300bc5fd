"""Faults after the last step is saved: they neither restart the run nor change its exit code."""

import signal
from pathlib import Path

import pytest

from tests.fault.harness import Supervised, lines, wait_for
from trimaran.core import EXIT_DONE


def test_a_rank_killed_while_it_generates_the_sample_does_not_fail_the_run(tmp_path: Path) -> None:
    settings = ("train.steps=4", "train.evaluate.batches=2", "train.sample={tokens: 60000, seconds: 600}")
    with Supervised.start(tmp_path / "run", *settings) as supervised:
        supervised.wait_for_events(0, "evaluation", 1)
        supervised.send_signal(1, signal.SIGKILL)
        assert supervised.wait() == EXIT_DONE
    (incident,) = supervised.faults
    assert (incident.cause, incident.suspects, incident.action) == ("crash", (1,), "finished")
    assert supervised.attempts() == 1
    assert [each["how"] for each in lines(supervised.run.attempts) if "how" in each] == ["done"]
    assert "not done: sample" in lines(supervised.run.attempts)[-1]["why"]
    assert [each["data"]["what"] for each in supervised.events(0, "unfinished")] == ["sample"]
    assert (supervised.run.model / "model.safetensors").exists()


@pytest.mark.chaos
def test_a_rank_killed_while_the_model_is_exported_is_restarted_and_repeats_no_step(tmp_path: Path) -> None:
    extra = {"TRIMARAN_TEST_PLUGIN": "tests.chaos.plugin", "TRIMARAN_TEST_EXPORT_SECONDS": "0.2"}
    with Supervised.start(tmp_path / "run", "train.steps=4", extra=extra) as supervised:
        wait_for(lambda: (supervised.run.path / ".model.draft").exists())
        supervised.send_signal(0, signal.SIGKILL)
        assert supervised.wait() == EXIT_DONE
    (incident,) = supervised.faults
    assert (incident.cause, incident.action, incident.step) == ("crash", "restarted", 4)
    assert [each["step"] for each in supervised.events(0, "ready")] == [0, 4]
    assert [each["step"] for each in lines(supervised.run.metrics)] == [1, 2, 3, 4]
    assert (supervised.run.model / "model.safetensors").exists()
