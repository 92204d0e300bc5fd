"""Creating a run from a folder: one of several nodes does it, the others wait for it."""

import multiprocessing
import threading
from pathlib import Path

import pytest

from tests.runs import new_run
from trimaran.core import UserError, dump_recipe
from trimaran.runs import MARKER, RunDirectory, create_run, create_run_from

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return new_run(tmp_path / "launch").path


def test_several_processes_that_create_the_run_at_once_get_the_same(folder: Path, tmp_path: Path) -> None:
    path, go = tmp_path / "runs" / "run", FORK.Barrier(4)

    def race() -> None:
        go.wait(60)
        run = create_run_from(folder, path)
        assert run.read_plan() == RunDirectory(folder).read_plan()
        assert run.read_recipe() == RunDirectory(folder).read_recipe()

    racers = [FORK.Process(target=race) for _ in range(4)]
    for each in racers:
        each.start()
    for each in racers:
        each.join()
    assert [each.exitcode for each in racers] == [0] * 4


def test_a_node_waits_until_another_has_written_the_files(folder: Path, tmp_path: Path) -> None:
    run, source = RunDirectory(tmp_path / "run"), RunDirectory(folder)
    run.path.mkdir()
    (run.path / MARKER).write_text("{}\n")
    run.recipe.write_text(source.recipe.read_text())
    run.plan.write_text(source.plan.read_text()[:50])
    thread = threading.Thread(target=create_run_from, args=(folder, run.path))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    run.plan.write_text(source.plan.read_text())
    thread.join(60)
    assert not thread.is_alive()


def test_files_that_a_lost_node_left_out_are_written_by_another(folder: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    (run.path / MARKER).write_text("{}\n")
    create_run_from(folder, run.path, complete_seconds=0.0)
    assert run.read_plan() == RunDirectory(folder).read_plan()
    run.lease.mkdir()
    run.plan.write_text("{")  # of a run that has started: nobody may overwrite it
    with pytest.raises(UserError, match="A008"):
        create_run_from(folder, run.path)
    assert run.plan.read_text() == "{"


def test_a_run_with_another_recipe_is_refused_and_one_that_was_resumed_with_more_steps_is_not(
    folder: Path, tmp_path: Path
) -> None:
    source = RunDirectory(folder)
    recipe = source.read_recipe()
    run = create_run(tmp_path / "run", recipe, source.read_plan())
    more = recipe.model_copy(update={"train": recipe.train.model_copy(update={"steps": 99})})
    run.recipe.write_text(dump_recipe(more))
    assert create_run_from(folder, run.path) == run
    other = recipe.model_copy(update={"data": recipe.data.model_copy(update={"seq_len": 7})})
    run.recipe.write_text(dump_recipe(other))
    with pytest.raises(UserError, match=r"L021: .*data.seq_len"):
        create_run_from(folder, run.path)


def test_a_folder_without_files_and_a_directory_with_other_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="L021"):
        create_run_from(tmp_path / "none", tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="D002"):
        create_run_from(folder, tmp_path / "other")
