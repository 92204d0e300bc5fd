"""A run that has no trained weights says how it stands, and which command leads to some."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import new_run, start_ranks, step_metrics
from trimaran.app.main import main
from trimaran.checkpoint.manifest import MANIFEST
from trimaran.core import EXIT_AGAIN, EXIT_DONE, EXIT_STUCK, dump_recipe, parse_recipe
from trimaran.run import Journal, RunDirectory
from trimaran.run.attempts import AttemptLog

RESUME, EXPORT = "`trimaran resume runs/toy`", "make step 3 a Hugging Face folder with `trimaran export runs/toy`"
WATCH = "`trimaran watch runs/toy`"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run of ten steps that has made three, and is still at work."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trimaran"])
    toy = new_run(Path("runs/toy"), world_size=1)
    attempt = AttemptLog(toy).begin(world_size=1)
    start_ranks(toy, world_size=1)
    with Journal(toy, 0, attempt=attempt) as journal:
        for step in (1, 2, 3):
            journal.step(step_metrics(step, loss=2.0))
    return toy


def keep(run: RunDirectory) -> None:
    """Leave what looks like a checkpoint of the third step."""
    folder = run.checkpoints / "step-00000003"
    folder.mkdir(parents=True)
    (folder / MANIFEST).touch()


def answer(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return how the run stands, and the mend."""
    assert main(["generate", "toy"]) == 2
    what, where, fix = capsys.readouterr().err.splitlines()
    assert where == "  where: runs/toy/model"
    assert what.startswith("A009: this run has no trained weights: ")
    return what.removeprefix("A009: this run has no trained weights: "), fix.removeprefix("  fix:   ")


def test_a_run_at_work_is_waited_for_or_its_checkpoint_taken(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    wait = f"wait for its end: {WATCH} shows it"
    assert answer(capsys) == ("it is training at step 3 of 10", wait)
    keep(run)
    assert answer(capsys) == ("it is training at step 3 of 10", f"{wait}, or {EXPORT}")


def test_a_run_that_was_stopped_goes_on_or_its_checkpoint_is_taken(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    AttemptLog(run).over(EXIT_AGAIN, "asked to stop")
    resume = f"go on to the last step with {RESUME}"
    assert answer(capsys) == ("it was stopped at step 3 of 10", resume)
    keep(run)
    assert answer(capsys) == ("it was stopped at step 3 of 10", f"{resume}, or {EXPORT}")


def test_a_run_that_failed_is_looked_at_first(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    AttemptLog(run).over(EXIT_STUCK, "no progress")
    keep(run)
    look = f"see what happened with {WATCH}, then go on to the last step with {RESUME}"
    assert answer(capsys) == ("it failed at step 3 of 10", f"{look}, or {EXPORT}")


def test_a_run_whose_supervisor_is_gone_is_not_waited_for(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    monkeypatch.setattr("os.getpid", lambda: gone.pid)
    AttemptLog(run).begin(world_size=1)
    standing, mend = answer(capsys)
    assert standing == "its processes went away at step 3 of 10"
    assert mend.startswith("see what happened")


@pytest.mark.parametrize("code", [EXIT_DONE, EXIT_AGAIN], ids=["done", "stopped"])
def test_a_run_that_saves_nothing_is_told_how_it_would(
    code: int, run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = parse_recipe(run.recipe.read_text(), name="toy", overrides=["train.save=false"])
    run.recipe.write_text(dump_recipe(recipe))
    AttemptLog(run).over(code, "")
    standing, mend = answer(capsys)
    assert standing.endswith("at step 3 of 10, and train.save is false")
    again = {EXIT_DONE: "train runs/toy/recipe.yaml", EXIT_AGAIN: "resume runs/toy"}[code]
    assert f"`trimaran {again} --set train.save=true`" in mend
    keep(run)
    assert (again in answer(capsys)[1]) == (code == EXIT_AGAIN), "a checkpoint is enough where all steps are made"
    assert EXPORT in answer(capsys)[1]
