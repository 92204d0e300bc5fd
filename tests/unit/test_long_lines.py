"""A line that is too long to be ours costs only itself: it is skipped, named with its size, and never in memory."""

import io
import os
import tracemalloc
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from tests.cases import slow
from tests.long_run import write_long_run
from tests.runs import finished_run, new_run, step_metrics
from trimaran.app import RunState, main
from trimaran.runs import (
    MAX_LINE_BYTES,
    LedgerReader,
    LineFollower,
    ReadLimits,
    RunDirectory,
    StepBlock,
    StepIndexer,
    append_line,
    forget_steps_after,
    last_step,
    lines_from_end,
)
from trimaran.ui import RunFeed, RunsRoot, facts_of, page_of

HUGE = 160 << 20  # bytes of a line, in a file without data
PEAK = 8 * MAX_LINE_BYTES  # well below the size of the line


def add_long_line(path: Path, size: int, *, ends: bool) -> None:
    """Append a line of `size` bytes, most of which the file system does not store."""
    with path.open("ab") as file:
        file.write(b'{"step": 301, "x": "')
        file.truncate(file.tell() + size - 20 - ends)
    if ends:
        with path.open("ab") as file:
            file.write(b"\n")


def add_steps(run: RunDirectory, steps: range) -> None:
    for step in steps:
        append_line(run.metrics, step_metrics(step, loss=1.0).as_dict())


@pytest.mark.parametrize("ends", [True, False])
def test_a_long_line_is_skipped_in_both_directions(tmp_path: Path, ends: bool) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"one\n")
    add_long_line(path, HUGE, ends=ends)
    follower = LineFollower(path)
    tracemalloc.start()
    try:
        assert list(follower.new()) == [b"one\n"]
        assert [line for _, line in lines_from_end(path)] == [b"\n" if ends else b"", b"one\n"]
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()
    assert follower.long_lines == [("lines", 4, HUGE)]
    with path.open("ab") as file:
        file.write(b"two\n" if ends else b"rest\ntwo\n")
    assert list(follower.new()) == [b"two\n"]
    assert follower.long_lines == [("lines", 4, HUGE if ends else HUGE + 5)]
    assert [offset for offset, _ in lines_from_end(path)] == [path.stat().st_size - 4, 4, 0]
    os.truncate(path, 4)
    assert list(follower.new()) == []
    assert follower.long_lines == []


def test_lines_up_to_the_limit_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    for size in (MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1):
        path.write_bytes(b"a\n" + b"x" * (size - 1) + b"\nb\n")
        sizes = [2, 2] if size > MAX_LINE_BYTES else [2, size, 2]
        assert [len(line) for line in LineFollower(path).new()] == sizes
        assert len(list(lines_from_end(path))) == 3


@pytest.mark.parametrize(("name", "verbs"), [("metrics", ("watch",)), slow(("metrics", ("incidents", "doctor"))),
                                             slow(("events", ("watch",)))])  # fmt: skip
def test_a_run_with_a_huge_line_is_shown_with_its_size(tmp_path: Path, name: str, verbs: tuple[str, ...]) -> None:
    run, other = finished_run(tmp_path / "runs" / "damaged"), finished_run(tmp_path / "runs" / "healthy")
    assert run.path != other.path
    path = run.metrics if name == "metrics" else run.events(0)
    begin = path.stat().st_size
    add_long_line(path, HUGE, ends=False)
    tracemalloc.start()
    try:
        rows = RunsRoot(tmp_path / "runs").list().runs
        assert {row.slug: row.step for row in rows} == {"healthy": 10, "damaged": 10}
        feed = RunFeed(run)
        facts = feed.refresh()
        assert facts["steps"] == 10
        assert feed.between(3, 9)["curves"]["loss"]["first"] == [3, 4.0]
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()
    for verb in verbs:
        with redirect_stdout(io.StringIO()) as shown:
            assert main([verb, str(run.path)]) == 0
        if verb == "watch":
            assert f"{path.name}: a line of {HUGE >> 20}" in shown.getvalue()
    assert facts["skipped_lines"] == [{"file": path.name, "offset": begin, "num_bytes": HUGE}]
    assert "is damaged and was skipped" in page_of(facts)


def test_a_restart_cuts_a_huge_line_off(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    add_steps(run, range(1, 11))
    size = run.metrics.stat().st_size
    add_long_line(run.metrics, HUGE, ends=False)
    assert last_step(run) == 10
    assert forget_steps_after(10, run.metrics) == []
    assert run.metrics.stat().st_size == size


def test_an_index_goes_on_after_a_long_line(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    add_steps(run, range(1, 101))
    add_long_line(run.metrics, MAX_LINE_BYTES + 1, ends=True)
    add_steps(run, range(101, 700))
    indexer = StepIndexer(run.metrics, run.metrics_index)
    assert [indexer.extend(), indexer.extend()] == [2, 0]


def test_steps_without_an_index_are_estimated(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "run", steps=6000, attempts=5, is_indexed=False)
    limits = ReadLimits(lines_bytes=1 << 18, first_bytes=1 << 14, last_bytes=1 << 16, num_places=100)
    reader = LedgerReader(run, num_lines=64, max_unindexed_bytes=1 << 18, limits=limits)
    reader.poll()
    steps = list(reader.new_steps())
    num_read = sum(not isinstance(step, StepBlock) for step in steps)
    assert len(steps) < 1500
    assert sum(step.count for step in steps if isinstance(step, StepBlock)) == 6000 - num_read
    assert 4000 < reader.steps.num_estimated < 6000
    exact = LedgerReader(run).read()
    assert reader.compute().seconds == pytest.approx(exact.seconds, abs=0.02 * exact.total)


@pytest.mark.slow
def test_a_long_run_without_an_index_is_estimated_and_then_exact(tmp_path: Path) -> None:
    state = RunState(write_long_run(tmp_path / "run", steps=50_000, attempts=5, is_indexed=False))
    state.refresh()
    assert (state.step, state.history.count, state.first_loss) == (50_000, 50_000, 10 / 10**0.3)
    assert state.num_estimated > 25_000
    assert state.as_dict()["estimated_steps"] == state.num_estimated
    while state.num_estimated:
        state.refresh()
    assert state.history.count == 50_000


def test_a_page_says_that_its_numbers_are_estimates(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    add_steps(run, range(1, 11))
    facts = facts_of(run)
    assert "sums and curves are estimates" not in page_of(facts)
    assert "steps were not read, and sums and curves are estimates" in page_of(facts | {"estimated_steps": 1000})
