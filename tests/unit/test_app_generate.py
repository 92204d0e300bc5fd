"""`trimaran generate` on a run without weights shows its status, and which command leads to weights."""

import multiprocessing
import sys
from pathlib import Path

import pytest

from tests.runs import new_run, start_ranks, step_metrics
from trimaran.app import main
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, dump_recipe, parse_recipe
from trimaran.runs import AttemptLog, Journal, RunDirectory

RESUME = "`trimaran resume runs/toy`"
WATCH = "`trimaran watch runs/toy`"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A live run of ten steps that has made three."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trimaran"])
    toy = new_run(Path("runs/toy"), world_size=1)
    attempt = AttemptLog(toy).begin(world_size=1)
    start_ranks(toy, world_size=1)
    with Journal(toy, 0, attempt=attempt) as journal:
        for step in (1, 2, 3):
            journal.step(step_metrics(step, loss=2.0))
    return toy


def answer(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return the status and the fix of the error."""
    assert main(["generate", "toy"]) == 2
    what, where, fix = capsys.readouterr().err.splitlines()
    assert where == "  where: runs/toy/model"
    assert what.startswith("A009: this run has no trained weights: ")
    return what.removeprefix("A009: this run has no trained weights: "), fix.removeprefix("  fix:   ")


def test_for_a_live_run_the_fix_is_to_wait(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    wait = f"wait until it ends: {WATCH} shows it"
    assert answer(capsys) == ("it is training at step 3 of 10", wait)


def test_for_a_stopped_run_the_fix_is_to_resume(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    AttemptLog(run).over(EXIT_AGAIN, "asked to stop")
    resume = f"train to the last step with {RESUME}"
    assert answer(capsys) == ("it was stopped at step 3 of 10", resume)


def test_for_a_failed_run_the_fix_is_to_see_what_happened_first(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    AttemptLog(run).over(EXIT_STUCK, "no progress")
    look = f"see what happened with {WATCH}, then train to the last step with {RESUME}"
    assert answer(capsys) == ("it failed at step 3 of 10", look)


def test_a_run_without_a_supervisor_is_not_waited_for(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    gone = multiprocessing.get_context("fork").Process(target=lambda: AttemptLog(run).begin(world_size=1))
    gone.start()
    gone.join()
    status, fix = answer(capsys)
    assert status == "its processes are gone at step 3 of 10"
    assert fix.startswith("see what happened")


@pytest.mark.parametrize("code", [EXIT_DONE, EXIT_AGAIN], ids=["done", "stopped"])
def test_for_a_run_that_saves_no_weights_the_fix_sets_train_save(
    code: int, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = parse_recipe(run.recipe.read_text(), name="toy", overrides=["train.save=false"])
    run.recipe.write_text(dump_recipe(recipe))
    AttemptLog(run).over(code, "")
    status, fix = answer(capsys)
    assert status.endswith("at step 3 of 10, and train.save is false")
    again = {EXIT_DONE: "train runs/toy/recipe.yaml", EXIT_AGAIN: "resume runs/toy"}[code]
    assert f"`trimaran {again} --set train.save=true`" in fix
