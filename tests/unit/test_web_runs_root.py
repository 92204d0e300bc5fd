"""The list of runs: fast for very many, and nothing outside of its folder can be opened."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.runs import finished_run, new_run
from trimaran.core import UserError
from trimaran.runs import MARKER
from trimaran.ui import SLUG, RunsRoot, check_runs_root

SECONDS = 1.0  # of a core, for a list


def many_runs(root: Path, count: int) -> None:
    """Make folders that are runs by their marker; their files are read only if they are shown."""
    for number in range(count):
        folder = root / f"run-{number:06d}"
        folder.mkdir()
        (folder / MARKER).write_text("{}")


def list_in_time(root: Path, count: int) -> None:
    runs = RunsRoot(root)
    for search, total in (("", count), ("run-0000", 100), ("RUN -0", count), ("nothing", 0)):
        began = time.process_time()
        found = runs.list(search=search)
        assert time.process_time() - began < SECONDS
        assert found.total == total
        assert len(found.runs) == min(50, total)


@pytest.mark.slow
def test_100_000_runs_are_listed_in_time(tmp_path: Path) -> None:
    many_runs(tmp_path, 100_000)
    list_in_time(tmp_path, 100_000)


def test_a_run_says_its_state_model_steps_and_loss(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "first")
    (found,) = RunsRoot(tmp_path).list().runs
    last = json.loads(run.metrics.read_text().splitlines()[-1])
    assert (found.slug, found.step, found.loss) == ("first", last["step"], last["loss"])
    assert found.status is not None
    assert found.model


def test_new_runs_appear_and_changed_ones_are_read_again(tmp_path: Path) -> None:
    runs = RunsRoot(tmp_path)
    assert runs.list().total == 0
    first = new_run(tmp_path / "first")
    assert runs.list().runs[0].step == 0
    finished_run(tmp_path / "second")
    assert {each.slug for each in runs.list().runs} == {"first", "second"}
    first.plan.write_text("{")
    assert next(each for each in runs.list().runs if each.slug == "first").status is None


def test_runs_are_filtered_by_state(tmp_path: Path) -> None:
    finished_run(tmp_path / "one")
    new_run(tmp_path / "two")
    runs = RunsRoot(tmp_path)
    states = {each.slug: each.status for each in runs.list().runs}
    assert states["one"] != states["two"]
    for slug, status in states.items():
        assert status is not None
        assert [each.slug for each in runs.list(statuses=[status]).runs] == [slug]


def test_folders_that_are_no_runs_and_links_are_not_listed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "notes").mkdir()
    (root / "file").write_text("")
    outside = finished_run(tmp_path / "outside")
    (root / "link").symlink_to(outside.path)
    (root / "marked").mkdir()
    (root / "marked" / MARKER).symlink_to(outside.path / MARKER)
    assert RunsRoot(root).list().total == 0


@pytest.mark.parametrize("slug", ["..", ".", "", "../outside", "..%2foutside", "/etc", "a/b", "a\\b", "a\0b", "link",
                                  ".hidden", "-x", "x" * 300, "Ünïcode", "a b", "a\n"])  # fmt: skip
def test_nothing_outside_of_the_folder_is_opened(tmp_path: Path, slug: str) -> None:
    root = tmp_path / "runs"
    finished_run(root / "inside")
    outside = finished_run(tmp_path / "outside")
    (root / "link").symlink_to(outside.path)
    with pytest.raises(UserError) as caught:
        RunsRoot(root).open(slug)
    assert caught.value.code == "W003"
    assert RunsRoot(root).open("inside").path == root / "inside"


def test_names_of_recipes_are_slugs() -> None:
    assert all(SLUG.fullmatch(name) for name in ("stdlib-tiny", "a", "llama-3.1-8b", "x_1", "stdlib-tiny-2"))


def test_a_folder_that_was_named_must_exist(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(UserError) as caught:
            check_runs_root(path, named=True)
        assert caught.value.code == "W002"
    assert check_runs_root(tmp_path / "missing", named=False).list().total == 0


def test_the_list_does_not_miss_a_run_that_comes_in_the_same_moment(tmp_path: Path) -> None:
    runs = RunsRoot(tmp_path)
    for number in range(20):
        before = os.stat(tmp_path).st_mtime_ns
        many_runs_one = tmp_path / f"run-{number}"
        many_runs_one.mkdir()
        (many_runs_one / MARKER).write_text("{}")
        os.utime(tmp_path, ns=(before, before))  # as on a file system with coarse time stamps
        assert len(runs.names()) == number + 1
