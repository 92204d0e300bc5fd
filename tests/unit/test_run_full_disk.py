"""Lines on a disk that is full: written whole, kept in order, and helped by the reserve."""

import errno
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.disks import fill, mounted
from tests.runs import new_run, step_metrics
from trimaran.runs import (
    PIECE_BYTES,
    RESERVE_BYTES,
    AttemptLog,
    IncidentLog,
    Journal,
    LineWriter,
    RunDirectory,
    append_line,
    fill_reserve,
    read_attempts,
    read_incidents,
    remove_reserve,
)

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "size=16m") as folder:
        yield folder


@pytest.fixture
def run(disk: Path) -> RunDirectory:
    return new_run(disk / "run")


def records(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, each of which must be complete."""
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [each["data"] for each in records(run.events(0)) if each["kind"] == kind]


def test_lines_on_a_full_disk_are_kept_and_written_in_order_when_there_is_room(disk: Path) -> None:
    writer, filler = LineWriter(disk / "lines.jsonl"), disk / "filler"
    long = "x" * 1000
    writer.write({"step": 0, "text": long})
    fill(filler)
    for step in range(1, 50):  # some still fit into the last block
        writer.write({"step": step, "text": long})
    assert writer.failure == "No space left on device"
    assert 40 < writer.num_kept < 50
    kept = writer.num_kept
    assert [each["step"] for each in records(writer.path)] == list(range(50 - kept))
    filler.unlink()
    assert writer.flush()
    assert writer.failure == ""
    assert [each["step"] for each in records(writer.path)] == list(range(50))
    assert writer.lost.count == 0


def test_lines_beyond_the_buffer_are_counted_with_their_steps(disk: Path) -> None:
    writer, filler = LineWriter(disk / "lines.jsonl", max_kept_bytes=10_000), disk / "filler"
    writer.write({"step": 1})
    fill(filler)
    for step in range(2, 40):
        writer.write({"step": step, "text": "x" * 1000})
    filler.unlink()
    assert writer.flush()
    found = [each["step"] for each in records(writer.path)]
    lost = range(writer.lost.first_step, writer.lost.last_step + 1)
    assert sorted([*found, *lost]) == list(range(1, 40))
    assert len(lost) == writer.lost.count > 20
    assert found == sorted(found)


def test_a_write_that_only_partly_succeeds_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    """Some file systems write what fits; the rest of the lines follows when there is room."""
    room = 25

    def write_what_fits(fd: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        count, room = min(room, len(data)), max(0, room - len(data))
        return os.write(fd, data[:count])

    writer = LineWriter(tmp_path / "lines.jsonl", write_to=write_what_fits)
    for step in range(10):
        writer.write({"step": step})
        records(writer.path)
    assert writer.failure == "Disk quota exceeded"
    room = 45  # four of the lines
    writer.flush()
    assert [each["step"] for each in records(writer.path)] == list(range(6))
    room = 10_000
    assert writer.flush()
    assert [each["step"] for each in records(writer.path)] == list(range(10))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.ESTALE])
def test_lines_survive_a_disk_that_is_read_only_or_broken_for_a_while(tmp_path: Path, number: int) -> None:
    is_broken = False

    def write(fd: int, data: bytes) -> int:
        if is_broken:
            raise OSError(number, os.strerror(number))
        return os.write(fd, data)

    writer = LineWriter(tmp_path / "lines.jsonl", write_to=write)
    writer.write({"step": 1})
    is_broken = True
    writer.write({"step": 2})
    assert writer.failure == os.strerror(number)
    is_broken = False
    assert writer.flush()
    assert [each["step"] for each in records(writer.path)] == [1, 2]


def test_the_part_of_a_line_that_a_killed_process_left_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    for torn in ('{"step": 1}\n{"st', '{"step": 1}\n{"text": "' + "x" * 20_000, '{"ste'):
        file.write_text(torn)
        append_line(file, {"step": 2})
        assert records(file)[-1] == {"step": 2}
        assert len(records(file)) == 1 + torn.count("\n")


def test_a_line_takes_a_single_write_once_the_file_is_open(tmp_path: Path) -> None:
    """Rank 0 writes a line at every step."""
    num_writes = 0

    def counted(fd: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        return os.write(fd, data)

    writer = LineWriter(tmp_path / "lines.jsonl", write_to=counted)
    for step in range(5):
        writer.write({"step": step, "loss": float("nan")})
    assert num_writes == 5
    assert [each["step"] for each in records(writer.path)] == list(range(5))
    assert records(writer.path)[-1]["loss"] is None


def test_the_reserve_makes_room_for_incidents_events_and_attempts(run: RunDirectory) -> None:
    assert fill_reserve(run.reserve)
    assert run.reserve.stat().st_blocks * 512 >= RESERVE_BYTES  # the blocks are real
    fill(run.path.parent / "filler")
    incident = IncidentLog(run).notice("storage", "the disk is full")
    AttemptLog(run).begin(world_size=2)
    with Journal(run, 0) as journal:
        for step in range(1, 400):  # 30 times the size of a piece
            journal.event("checkpoint", step=step, failed="No space left on device " + "x" * 1000)
    assert read_incidents(run) == [incident]
    assert len(read_attempts(run).attempts) == 1
    assert len(events(run, "checkpoint")) == 399
    assert 0 < run.reserve.stat().st_size < RESERVE_BYTES
    (run.path.parent / "filler").unlink()
    assert fill_reserve(run.reserve)
    assert run.reserve.stat().st_size == RESERVE_BYTES
    remove_reserve(run.reserve)
    assert not run.reserve.exists()


def test_a_disk_without_room_for_a_reserve_gets_none(run: RunDirectory) -> None:
    fill(run.path.parent / "filler")
    assert not fill_reserve(run.reserve)
    log = IncidentLog(run)
    log.notice("storage", "the disk is full")
    log.notice("storage", "it is still full")
    assert read_incidents(run) == []
    (run.path.parent / "filler").unlink()
    log.flush()
    assert [(each.id, each.what) for each in read_incidents(run)] == [
        ("i-0001", "the disk is full"),
        ("i-0002", "it is still full"),
    ]


def test_a_file_system_that_cannot_allocate_gets_a_written_reserve(tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    assert fill_reserve(tmp_path / "reserve", allocate=refuse)
    assert (tmp_path / "reserve").stat().st_size == RESERVE_BYTES


def test_many_processes_share_the_reserve_of_a_full_disk(run: RunDirectory) -> None:
    """Each rank writes its last events when the disk is full; all of them find room."""
    assert fill_reserve(run.reserve)
    for rank in range(6):
        run.events(rank).touch()
    fill(run.path.parent / "filler")

    def write_events(rank: int) -> None:
        with Journal(run, rank) as journal:
            for step in range(60):
                journal.event("error", step=step, message="x" * 500)

    _run_all([lambda rank=rank: write_events(rank) for rank in range(6)])
    for rank in range(6):
        found = [each for each in records(run.events(rank)) if each["kind"] == "error"]
        assert [each["step"] for each in found] == list(range(60))
    assert run.reserve.stat().st_size > 0


def _run_all(targets: list[Callable[[], None]]) -> None:
    processes = [FORK.Process(target=each) for each in targets]
    for each in processes:
        each.start()
    for each in processes:
        each.join()
    assert [each.exitcode for each in processes] == [0] * len(processes)


def test_metrics_are_complete_after_a_full_disk_and_two_events_say_so(run: RunDirectory) -> None:
    fill_reserve(run.reserve)
    filler = run.path.parent / "filler"
    with Journal(run, 0) as journal:
        for step in range(1, 31):
            if step == 5:
                fill(filler)
            if step == 25:
                filler.unlink()
            journal.step(step_metrics(step, loss=1.0))
    assert [each["step"] for each in records(run.metrics)] == list(range(1, 31))
    failed, written = events(run, "disk")
    assert failed == {"file": "metrics.jsonl", "failed": "No space left on device"}
    assert written == {"file": "metrics.jsonl"}


def test_metrics_that_are_lost_are_named(run: RunDirectory) -> None:
    """Metrics do not take from the reserve, but may use what is left of a piece; that is not room."""
    fill_reserve(run.reserve)
    with Journal(run, 0) as journal:
        for step in range(1, 301):
            if step == 5:
                fill(run.path.parent / "filler")
            journal.step(step_metrics(step, loss=1.0))
    written = [each["step"] for each in records(run.metrics)]
    assert 5 < len(written) < 200
    assert written == list(range(1, len(written) + 1))
    failed, lost = events(run, "disk")
    assert failed["failed"] == lost["failed"] == "No space left on device"
    assert (lost["first_lost"], lost["last_lost"], lost["lost"]) == (written[-1] + 1, 300, 300 - len(written))
    assert run.reserve.stat().st_size >= RESERVE_BYTES - 2 * PIECE_BYTES


def test_a_gap_that_a_killed_rank_left_in_the_metrics_is_named(tmp_path: Path) -> None:
    """It kept lines in memory that it could not write. One missing step is usual after a kill."""
    run = new_run(tmp_path / "run")
    for start, gaps in ((10, []), (12, []), (30, [{"lost": 19, "first_lost": 12, "last_lost": 30}])):
        with Journal(run, 0) as journal:
            journal.resume(start)
            found = [{key: each[key] for key in ("lost", "first_lost", "last_lost")} for each in events_or_none(run)]
            assert found == gaps
            if start == 10:
                journal.step(step_metrics(11, loss=1.0))


def events_or_none(run: RunDirectory) -> list[dict[str, Any]]:
    return events(run, "disk") if run.events(0).exists() else []


def test_a_rewind_forgets_the_kept_metrics_of_later_steps(run: RunDirectory) -> None:
    filler = run.path.parent / "filler"
    with Journal(run, 0) as journal:
        journal.step(step_metrics(1, loss=1.0))
        fill(filler)
        for step in range(2, 40):
            journal.step(step_metrics(step, loss=1.0))
        journal.resume(20)
        filler.unlink()
        for step in range(21, 25):
            journal.step(step_metrics(step, loss=2.0))
    assert [each["step"] for each in records(run.metrics)] == list(range(1, 25))
    assert [each["loss"] for each in records(run.metrics)[20:]] == [2.0] * 4
