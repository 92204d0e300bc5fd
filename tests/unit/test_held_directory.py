"""A run directory that is held open: where it is, and when it counts as moved or deleted."""

import shutil
from pathlib import Path
from queue import SimpleQueue

from tests.runs import new_run
from trimaran.runs import CONFIRM_SECONDS, MARKER, HeldDirectory


def test_a_held_directory_knows_where_it_is(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    held = HeldDirectory(run.path)
    assert (held.check(), held.location, held.run.location) == ("here", run.path, run.path)
    run.path.rename(tmp_path / "moved")
    assert (held.check(), held.location) == ("moved", tmp_path / "moved")
    assert held.run.read_recipe() is not None
    new_run(tmp_path / "run")
    assert held.check() == "moved"
    assert "another one at its path" in held.explain("moved")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "moved").rename(tmp_path / "run")
    assert held.check() == "here"
    shutil.rmtree(tmp_path / "run")
    assert (held.check(), held.location) == ("deleted", None)
    assert held.lost_error().code == "D007"


def test_a_symbolic_link_to_the_run_may_change(tmp_path: Path) -> None:
    """Scripts let a link `latest` point to the newest run, while older ones are still running."""
    run, latest = new_run(tmp_path / "run"), tmp_path / "latest"
    latest.symlink_to(run.path)
    held = HeldDirectory(latest)
    latest.unlink()
    latest.symlink_to(new_run(tmp_path / "other").path)
    assert (held.check(), held.location) == ("here", run.path)


def test_a_run_that_lost_its_marker_only_is_not_deleted(tmp_path: Path) -> None:
    held = HeldDirectory(new_run(tmp_path / "run").path)
    (tmp_path / "run" / MARKER).unlink()
    assert held.check() == "here"
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    assert held.check() == "deleted"


def test_a_directory_that_is_back_at_once_was_not_moved(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    held = HeldDirectory(run.path)
    run.path.rename(tmp_path / "moved")
    assert [held.poll(now) for now in (10.0, 10.0 + 0.9 * CONFIRM_SECONDS)] == ["here", "here"]
    (tmp_path / "moved").rename(run.path)
    assert held.poll(20.0) == "here"
    run.path.rename(tmp_path / "moved")
    assert [held.poll(now) for now in (30.0, 30.0 + 0.9 * CONFIRM_SECONDS)] == ["here", "here"], "it begins anew"
    assert held.poll(30.0 + CONFIRM_SECONDS) == "moved"
    assert held.place == "moved"


def test_a_watched_directory_says_once_that_it_was_moved(tmp_path: Path) -> None:
    held, seen = HeldDirectory(new_run(tmp_path / "run").path), SimpleQueue[str]()
    held.watch(lambda: seen.put(held.place))
    (tmp_path / "run").rename(tmp_path / "moved")
    assert seen.get(timeout=60.0) == "moved"
    assert seen.empty()
