"""A page that follows a run: what is read again, how many bytes that takes, and any range of steps in detail."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import finished_run, new_run, start_ranks, step_metrics
from trimaran.core import UserError
from trimaran.runs import BLOCK_LINES, IncidentLog, Journal, RunDirectory, StepIndexer, append_line, forget_steps_after
from trimaran.ui import MAX_SINGLE_STEPS, PARTS, DetailsFeed, MachinesFeed, RunFeed, StepPyramid, facts_of, read_range

STEPS = 12_000
FAST_PARTS = ("about", "state", "curves", "phases", "details", "ranks", "machines", "checkpoints")


def write_steps(run: RunDirectory, first: int, last: int) -> None:
    """Append lines as rank 0 does; the loss of a step is a known function of it."""
    line = json.dumps(step_metrics(1, loss=2.0).as_dict(), separators=(",", ":")) + "\n"
    with run.metrics.open("a") as file:
        for step in range(first, last + 1):
            file.write(line.replace('"step":1,', f'"step":{step},').replace('"loss":2.0', f'"loss":{loss_of(step)}'))


def loss_of(step: int) -> float:
    return 2.0 + (step * 7919 % 1000) / 1000


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A live run of many steps, with the index that rank 0 writes beside the metrics."""
    run = new_run(tmp_path_factory.mktemp("long") / "run", steps=2 * STEPS)
    start_ranks(run)
    write_steps(run, 1, STEPS)
    indexer = StepIndexer(run.metrics, run.metrics_index)
    while indexer.extend():
        pass
    return run


def bytes_read(call: Callable[[], object]) -> int:
    """Return how many bytes this process reads during a call, by the kernel's count."""

    def count() -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)

    before = count()
    call()
    return count() - before


def test_an_update_reads_only_what_was_appended(long: RunDirectory) -> None:
    feed = RunFeed(long)
    feed.refresh(FAST_PARTS)
    size, last = long.metrics.stat().st_size, feed.state.step
    write_steps(long, last + 1, last + 3)
    took = bytes_read(lambda: feed.refresh(FAST_PARTS))
    assert feed.facts["steps"] == last + 3
    assert feed.facts["curves"]["loss"]["last"] == [last + 3, loss_of(last + 3)]
    assert took < 64_000 < size / 40
    assert bytes_read(lambda: feed.refresh(FAST_PARTS)) < 16_000  # nothing was appended


def test_a_range_of_steps_is_read_without_the_rest(long: RunDirectory) -> None:
    feed = RunFeed(long)
    feed.refresh(FAST_PARTS)
    feed.between(1, 10)  # reads the index
    found: list[dict[str, object]] = []
    took = bytes_read(lambda: found.append(feed.between(8_000, 8_199)))
    points = found[0]["curves"]["loss"]["points"]  # pyrefly: ignore[bad-index]
    assert points == [[step, pytest.approx(loss_of(step))] for step in range(8_000, 8_200)]
    assert took < 4 * BLOCK_LINES * 500


@pytest.mark.parametrize("seed", range(6))
def test_every_range_keeps_its_extremes_and_its_mean(long: RunDirectory, seed: int) -> None:
    chosen = random.Random(seed)
    first = chosen.randrange(1, STEPS - 10)
    last = min(STEPS, first + chosen.choice([5, 300, MAX_SINGLE_STEPS + 700, STEPS]))
    pyramid = StepPyramid(long)
    pyramid.refresh()
    whole = pyramid.history(first, last).extent("loss")
    losses = [loss_of(step) for step in range(first, last + 1)]
    assert whole is not None
    assert (whole.first[0], whole.last[0], whole.count) == (first, last, last - first + 1)
    assert whole.least[1] == pytest.approx(min(losses))
    assert whole.most[1] == pytest.approx(max(losses))
    assert whole.total == pytest.approx(sum(losses))


def test_each_level_of_the_pyramid_has_a_quarter_of_the_blocks_below(long: RunDirectory) -> None:
    pyramid = StepPyramid(long)
    pyramid.refresh()
    blocks = STEPS // BLOCK_LINES
    assert pyramid.levels == [blocks, blocks // 4, blocks // 16]


def test_a_range_beyond_the_index_and_of_a_run_without_one_is_read(tmp_path: Path, long: RunDirectory) -> None:
    run = finished_run(tmp_path / "run")
    feed = RunFeed(run)
    feed.refresh(FAST_PARTS)
    assert [point[0] for point in feed.between(3, 5)["curves"]["loss"]["points"]] == [3, 4, 5]
    assert feed.between(100, 200)["curves"] == {}
    tail = StepPyramid(long)
    tail.refresh()
    assert tail.history(STEPS - 2, STEPS).count == 3


def test_withdrawn_steps_are_read_again(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", steps=2000)
    start_ranks(run)
    write_steps(run, 1, 600)
    StepIndexer(run.metrics, run.metrics_index).extend()
    feed = RunFeed(run)
    feed.refresh(FAST_PARTS)
    assert feed.between(500, 510)["curves"]["loss"]["points"][0] == [500, pytest.approx(loss_of(500))]
    forget_steps_after(400, run.metrics)
    with Journal(run, 0) as journal:
        journal.event("replay", step=400, steps=200, seconds=100.0)
        for step in range(401, 602):
            journal.step(step_metrics(step, loss=9.0))
    feed.refresh(FAST_PARTS)
    assert feed.between(500, 510)["curves"]["loss"]["points"][0] == [500, 9.0]


def test_parts_of_a_finished_run_are_read_once(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    feed = RunFeed(run)
    feed.refresh()
    before = feed.versions(PARTS)
    feed.refresh()
    assert feed.versions(PARTS) == before == (1,) * len(PARTS)
    IncidentLog(run).notice("numeric", "the loss jumped", step=5, action="skipped")
    feed.refresh()
    changed = {part for part, old, new in zip(PARTS, before, feed.versions(PARTS), strict=True) if old != new}
    assert changed == {"state"}
    assert feed.facts.keys() == facts_of(run).keys()


def test_details_and_machines_grow_with_their_files(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run")
    details, machines = DetailsFeed(run), MachinesFeed(run)
    assert details.refresh()
    assert not details.refresh()
    assert not machines.refresh()
    with Journal(run, 0) as journal:
        journal.step(replace(step_metrics(11, loss=1.0), details={"memory": {"allocated": 5}}))
    append_line(run.samples(0), {"time": 1000.0, "node": 0, "cpu": 0.25, "gpus": []})
    assert details.refresh()
    assert details.steps[-1] == (11, {"memory": {"allocated": 5}})
    assert machines.refresh()
    assert machines.spreads()["cpu"] == [(1000.0, 0.25, 0.25, 0.25)]


@pytest.mark.parametrize("text", ["5", "5:", "a:b", "9:3", "-1:4"])
def test_a_range_that_is_none_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError) as found:
        read_range(text)
    assert found.value.code == "A042"
