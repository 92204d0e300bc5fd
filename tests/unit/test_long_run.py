"""What a long run costs to start, show and store does not grow with its length, and its metrics stay exact."""

import io
import json
import math
import os
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.long_run import measure

from tests import forked
from tests.long_run import CHECKPOINT_STEPS, write_long_run, write_steps
from tests.runs import new_run, step_metrics
from trimaran.app import StepHistory, main
from trimaran.core import SLOW_DETAILS
from trimaran.runs import (
    BLOCK_BYTES,
    BLOCK_LINES,
    SCALARS,
    Journal,
    LedgerReader,
    RunDirectory,
    RunTail,
    StepBlock,
    StepIndexer,
    append_line,
    forget_steps_after,
    last_lines,
    last_step,
    lines_from_end,
    read_index,
    read_step,
)
from trimaran.train import NUM_COMPLETE_STEPS, SlowDetails
from trimaran.ui import facts_of, page_of

STEPS = 40_000  # more than are read without the index


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_long_run(tmp_path_factory.mktemp("long") / "run", steps=STEPS, attempts=5)


def indexed(run: RunDirectory) -> LedgerReader:
    """Return a reader that uses the index of a short run, too."""
    return LedgerReader(run, num_lines=64, max_unindexed_bytes=0)


def bytes_read() -> int:
    """Return how many bytes this process has read with system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_lines_are_read_from_the_end_whatever_their_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    lines = [b"x" * length + b"\n" for length in (0, 5, BLOCK_BYTES, 3, 3 * BLOCK_BYTES, BLOCK_BYTES - 1, 0, 1)]
    for ending in (b"", b"half a li"):
        path.write_bytes(b"".join(lines) + ending)
        found = list(lines_from_end(path))[::-1]
        assert [line for _, line in found] == [*lines, *([ending] if ending else [])]
        assert [offset for offset, _ in found] == [sum(map(len, lines[:index])) for index in range(len(found))]
        assert last_lines(path, 3) == lines[-3:]
    assert list(lines_from_end(tmp_path / "missing")) == []


def test_a_restart_reads_only_the_end_of_the_metrics(long_run: RunDirectory) -> None:
    size, before = long_run.metrics.stat().st_size, bytes_read()
    assert last_step(long_run) == STEPS
    assert forget_steps_after(STEPS, long_run.metrics) == []
    assert bytes_read() - before < 4 * BLOCK_BYTES < size / 20
    assert long_run.metrics.stat().st_size == size


@pytest.mark.parametrize("lost", [1, 2, 300])
def test_the_metrics_end_where_a_restart_resumes(tmp_path: Path, lost: int) -> None:
    run = new_run(tmp_path / "run")
    for step in range(1, 1001):
        append_line(run.metrics, step_metrics(step, loss=1.0, seconds=step / 1000).as_dict())
    whole = run.metrics.read_bytes()
    kept = b"".join(whole.splitlines(keepends=True)[: 1000 - lost])
    damaged = b'{"step": 7, \n'
    run.metrics.write_bytes(kept + damaged + whole[len(kept) :] + whole[:100])
    assert forget_steps_after(1000 - lost, run.metrics) == [step / 1000 for step in range(1001 - lost, 1001)]
    assert run.metrics.read_bytes() == kept + damaged
    assert last_step(run) == 1000 - lost


def test_a_new_sidecar_reads_only_what_the_last_one_has_not_sent(long_run: RunDirectory) -> None:
    position = long_run.path / "telemetry" / "fed.json"
    newest = json.loads(last_lines(long_run.metrics, 1)[0])["time"]
    position.write_text(json.dumps({"time": newest - 2.6}))  # ten steps of a quarter of a second
    before = bytes_read()
    sent = [(kind, line) for kind, line in RunTail(long_run).new() if kind != "incident"]
    read = bytes_read() - before
    position.unlink()
    assert [line["step"] for kind, line in sent if kind == "step"] == list(range(STEPS - 10, STEPS + 1))
    assert read < 1 << 20 < long_run.metrics.stat().st_size / 4


def test_incidents_do_not_read_the_steps(long_run: RunDirectory) -> None:
    before = bytes_read()
    with redirect_stdout(io.StringIO()) as shown:
        assert main(["incidents", str(long_run.path)]) == 0
    assert shown.getvalue().count("rank 1 was killed by signal 9") == 4
    events = sum(path.stat().st_size for path in (long_run.path / "events").iterdir())
    assert bytes_read() - before < 2 * events + (2 << 20)


def test_the_index_changes_no_number(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "run", steps=4000, attempts=3)
    ledgers, histories, num_blocks = [], [], []
    for reader in (LedgerReader(run), indexed(run)):
        reader.poll()
        history = StepHistory()
        for step in (steps := list(reader.new_steps())):
            history.add_block(step) if isinstance(step, StepBlock) else history.add(step)
        num_blocks.append(sum(isinstance(step, StepBlock) for step in steps))
        ledgers.append(reader.compute())
        histories.append(history)
    assert num_blocks[0] == 0
    assert num_blocks[1] > 0.6 * 4000 / BLOCK_LINES
    exact, found = histories
    assert ledgers[1].seconds == pytest.approx(ledgers[0].seconds, rel=1e-9)
    assert (found.count, found.not_finite, found.first) == (exact.count, exact.not_finite, exact.first)
    for name in SCALARS:
        one, other = exact.extent(name), found.extent(name)
        assert one is not None
        assert other is not None
        assert (one.first, one.last, one.least, one.most) == (other.first, other.last, other.least, other.most), name
        assert other.total == pytest.approx(one.total, rel=1e-9)


def test_a_wrong_index_is_not_believed(tmp_path: Path) -> None:
    run = write_long_run(tmp_path / "run", steps=3000, attempts=2)
    true = LedgerReader(run).read().seconds  # it is short enough to be read without the index
    assert indexed(run).read().seconds == pytest.approx(true)
    index = run.metrics_index.read_bytes()
    lines = index.splitlines(keepends=True)
    assert len(lines) == 3000 // BLOCK_LINES
    damaged = [
        index.replace(b'"seconds":[', b'"seconds":[9'),  # other numbers
        index[:-30],  # an incomplete line
        b"".join(lines[::2]),  # missing blocks
        b"".join(lines[::-1]),  # another order
        b"x" * len(index),
        b"",
    ]
    for wrong in damaged:
        run.metrics_index.write_bytes(wrong)
        assert indexed(run).read().seconds == pytest.approx(true)
    # Steps were repeated while nobody wrote the index: the same offsets, other lines.
    run.metrics_index.write_bytes(index)
    text = run.metrics.read_text()
    run.metrics.write_text(text.replace('"time":17', '"time":18').replace('"forward":0.0', '"forward":0.1'))
    assert list(read_index(run.metrics, run.metrics_index)) == []


def test_the_index_follows_metrics_that_are_truncated_and_repeated(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    with Journal(run, 0) as journal:
        indexer = StepIndexer(run.metrics, run.metrics_index)

        def ends(count: int) -> list[int]:
            return [BLOCK_LINES * number for number in range(1, count + 1)]

        def train(steps: range, loss: float) -> None:
            for step in steps:
                journal.step(replace(step_metrics(step, loss=loss), time=loss + step))
                indexer.note_line()

        train(range(1, 4 * BLOCK_LINES + 1), 5.0)
        assert [block.steps.last for block in read_index(run.metrics, run.metrics_index)] == ends(4)
        journal.resume(BLOCK_LINES + 100)
        assert [block.steps.last for block in read_index(run.metrics, run.metrics_index)] == ends(1)
        train(range(BLOCK_LINES + 101, 5 * BLOCK_LINES + 1), 3.0)
    found = list(read_index(run.metrics, run.metrics_index))
    assert [block.steps.last for block in found] == ends(4)
    losses = [block.steps.scalars["loss"] for block in found]
    assert [(each.least[1], each.most[1]) for each in losses] == [(5, 5), (3, 5), (3, 3), (3, 3)]
    assert len(run.metrics_index.read_bytes().splitlines()) == 4, "stale lines were removed"


def test_memory_is_bounded_and_sums_stay_exact() -> None:
    history, most = StepHistory(max_steps=64, max_blocks=32), 0
    for number in range(1, 3001):
        metrics = step_metrics(number, loss=math.nan if number == 700 else abs(number - 1666.0))
        step = read_step((json.dumps(metrics.as_dict()).replace("NaN", "null") + "\n").encode())
        assert step is not None
        history.add(step)
        most = max(most, len(history.steps) + len(history.blocks))
    extent = history.extent("loss")
    assert extent is not None
    assert 64 <= most <= 128 + 64
    assert (history.count, extent.count, history.steps[-1].step) == (3000, 2999, 3000)
    assert (extent.first, extent.last) == ((1, 1665.0), (3000, 1334.0))
    assert (extent.least, extent.most) == ((1666, 0.0), (1, 1665.0))
    assert extent.total == sum(abs(step - 1666.0) for step in range(1, 3001) if step != 700)
    assert history.not_finite == [700]
    assert history.first is not None
    assert history.first.loss == 1665.0


def test_lines_of_a_long_run_take_at_most_500_bytes_each(long_run: RunDirectory, tmp_path: Path) -> None:
    added = RunDirectory(tmp_path)
    write_steps(added, range(10**6, 10**6 + 2048), attempt_steps=50_000)
    index_bytes = long_run.metrics_index.stat().st_size / STEPS
    event_bytes = sum(path.stat().st_size for path in (long_run.path / "events").iterdir()) / STEPS
    assert added.metrics.stat().st_size / 2048 + index_bytes + event_bytes < 500
    assert event_bytes < 10, f"a checkpoint every {CHECKPOINT_STEPS} steps, and the starts"
    details = [json.loads(line) for line in added.metrics.read_text().splitlines()]
    for name in ("memory", "ranks", "hfu"):
        steps = [line["step"] for line in details if name in line]
        assert 2048 / 32 <= len(steps) <= 2048 / 8, name
    assert sum("groups" in line for line in details) >= 8


def test_the_first_steps_after_a_start_have_every_detail() -> None:
    slow_details = SlowDetails()
    details = {name: {"value": 1.0} for name in SLOW_DETAILS} | {"waits": {"comm": 1.0}, "groups": {"a": {"b": 1.0}}}
    written = [slow_details.select(step, details) for step in range(5000, 5000 + 3 * NUM_COMPLETE_STEPS)]
    assert all(line == details for line in written[:NUM_COMPLETE_STEPS])
    later = written[NUM_COMPLETE_STEPS:]
    assert all("waits" in line for line in later)
    with_memory = [5000 + NUM_COMPLETE_STEPS + index for index, line in enumerate(later) if "memory" in line]
    interval = with_memory[1] - with_memory[0]
    assert interval > 1
    assert with_memory == [step for step in range(5100, 5300) if step % interval == 0]


def test_a_page_about_a_long_run_is_as_small_as_one_about_a_short_run(long_run: RunDirectory, tmp_path: Path) -> None:
    short = write_long_run(tmp_path / "run", steps=6000, attempts=5)
    sizes = [len(page_of(facts_of(run))) for run in (short, long_run)]
    assert sizes[1] < 1.5 * sizes[0]


@pytest.mark.slow
def test_a_million_steps_cost_about_as_much_as_a_thousand(tmp_path: Path) -> None:
    costs = measure(write_long_run(tmp_path / "run", steps=1_000_000), os.environ)
    limits = {"restart": 1.5, "incidents": 1.5, "watch": 4.0, "report": 7.0, "doctor": 5.0}  # on busy cores
    assert {name: cost for name, cost in costs.items() if cost["cpu_seconds"] > limits.get(name, 5.0)} == {}
    assert costs["watch"]["peak_bytes"] < 200 << 20
    assert costs["watch, 10,000 steps more"]["added_bytes"] < 16 << 20


@pytest.mark.slow
def test_a_real_run_writes_at_most_500_bytes_a_step(tmp_path: Path) -> None:
    settings = ("cluster=2xcpu", "train.steps=600", "data.seq_len=16", "train.global_batch=2", "train.sample.tokens=0",
                "model.shape={layers: 1, hidden: 64, heads: 4, kv_heads: 2, ffn: 128}")  # fmt: skip
    words = [word for each in settings for word in ("--set", each)]
    run = tmp_path / "run"
    forked.run("trimaran", "train", "--warm", "--run-dir", str(run), "--no-check", "--quiet", *words, cwd=tmp_path,
               check=True, timeout=500)  # fmt: skip
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 601))
    later = lines[NUM_COMPLETE_STEPS:]
    index_bytes = (run / "metrics.index.jsonl").stat().st_size / (2 * BLOCK_LINES)
    assert sum(map(len, later)) / len(later) + index_bytes < 500
    found = read_index(run / "metrics.jsonl", run / "metrics.index.jsonl")
    assert [(block.steps.first, block.steps.last) for block in found] == [(1, 256), (257, 512)]
    assert sum(path.stat().st_size for path in (run / "events").iterdir()) < 10_000, "no event is written every step"
