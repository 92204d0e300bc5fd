"""When silent ranks are a hang, and when they only wait for another rank."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.launch import AttemptSpec, AttemptWatch, NodeEvent, RankEnded, RankSilent
from trimaran.runs import AttemptOutcome, Heartbeat, Journal, RunDirectory


class FakeNode:
    """A node of two ranks with the heartbeats and events that a test sets."""

    name, num_ranks = "here", 2

    def __init__(self, *heartbeats: Heartbeat) -> None:
        self.current = dict(enumerate(heartbeats))
        self.events: list[NodeEvent] = []

    def start(self, spec: AttemptSpec) -> None: ...

    def start_ranks(self, spec: AttemptSpec, ranks: Sequence[int]) -> None: ...

    def kill_ranks(self, ranks: Sequence[int]) -> None: ...

    def request_stop(self) -> None: ...

    def request_leave(self) -> None: ...

    def kill(self) -> None: ...

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None: ...

    def poll(self) -> list[NodeEvent]:
        events, self.events = self.events, []
        return events

    def heartbeats(self) -> dict[int, Heartbeat]:
        return dict(self.current)

    def is_silent(self, rank: int, *, stopped: bool = False) -> None:
        self.events.append(
            RankSilent(rank=rank, heartbeat=self.current[rank], seconds=9.0, deadline=6.0, stopped=stopped)
        )


def heartbeat(section: Any, step: int, entered: float) -> Heartbeat:
    return Heartbeat(section=section, step=step, entered=entered, alive=entered, answered=0)


def watch(path: Path, node: FakeNode) -> AttemptWatch:
    spec = AttemptSpec(attempt=0, first_rank=0, num_ranks=2, world_size=2, store="", token="")
    return AttemptWatch(new_run(path / "run"), [node], spec)


@pytest.mark.parametrize(
    ("section", "step", "outcome"),
    [
        ("data", 7, None),
        ("save", 7, None),
        ("evaluation", 6, None),
        ("compile", 7, None),
        ("export", 7, None),
        ("sampling", 7, None),
        ("first", 7, "trouble"),
        ("step", 7, "trouble"),
        ("data", 8, "trouble"),
    ],
)
def test_ranks_that_wait_for_a_rank_in_a_long_section_are_not_hung(
    tmp_path: Path, section: Any, step: int, outcome: AttemptOutcome | None
) -> None:
    node = FakeNode(heartbeat("step", 7, 100.0), heartbeat(section, step, 100.0))
    attempt = watch(tmp_path, node)
    node.is_silent(0)
    assert attempt.poll() == outcome


def test_a_rank_that_takes_too_long_itself_is_trouble(tmp_path: Path) -> None:
    node = FakeNode(heartbeat("step", 7, 100.0), heartbeat("data", 7, 100.0))
    attempt = watch(tmp_path, node)
    node.is_silent(0)
    assert attempt.poll() is None
    node.is_silent(1)
    assert attempt.poll() == "trouble"


def test_a_stopped_rank_is_trouble_even_while_all_evaluate(tmp_path: Path) -> None:
    node = FakeNode(heartbeat("evaluation", 20, 100.0), heartbeat("evaluation", 20, 100.0))
    attempt = watch(tmp_path, node)
    assert attempt.poll() is None
    node.is_silent(1, stopped=True)
    assert attempt.poll() == "trouble"


def test_a_rank_that_makes_progress_again_is_not_silent(tmp_path: Path) -> None:
    node = FakeNode(heartbeat("step", 7, 100.0), heartbeat("data", 7, 100.0))
    attempt = watch(tmp_path, node)
    node.is_silent(0)
    assert attempt.poll() is None
    node.current = {0: heartbeat("step", 8, 109.0), 1: heartbeat("step", 8, 109.1)}
    assert attempt.poll() is None
    assert attempt.silent == {}


def test_an_attempt_is_saved_once_rank_0_says_so(tmp_path: Path) -> None:
    """The others have written their part before rank 0 has committed the whole."""
    node = FakeNode(heartbeat("export", 8, 100.0), replace(heartbeat("finish", 8, 100.0), saved=True))
    attempt = watch(tmp_path, node)
    attempt.poll()
    assert not attempt.is_saved
    node.current[0] = replace(node.current[0], saved=True)
    attempt.poll()
    assert attempt.is_saved
    node.current = {}
    attempt.poll()
    assert attempt.is_saved


def test_an_attempt_knows_what_was_not_done_after_training(tmp_path: Path) -> None:
    attempt = watch(tmp_path, FakeNode(heartbeat("sampling", 8, 100.0), heartbeat("sampling", 8, 100.0)))
    run = RunDirectory(tmp_path / "run")
    with Journal(run, 0) as journal:
        journal.event("trained", step=8, next=["evaluation", "sample"])
        journal.event("evaluation", step=8, loss=1.0)
    attempt.poll()
    assert (attempt.is_saved, attempt.not_done()) == (True, ["sample"])


def test_the_events_of_thousands_of_ranks_are_read_in_turns(tmp_path: Path) -> None:
    """A poll looks at a few files, but at once at all of them when a rank has ended."""
    run = new_run(tmp_path / "run", world_size=20)
    node = FakeNode(*(heartbeat("step", 1, 0.0) for _ in range(20)))
    node.num_ranks = 20
    spec = AttemptSpec(attempt=0, first_rank=0, num_ranks=20, world_size=20, store="", token="")
    watched = AttemptWatch(run, [node], spec, files_per_poll=4)
    for rank in range(20):
        with Journal(run, rank) as journal:
            journal.event("ready", seconds=1.0)
    watched.poll()
    assert [event["rank"] for event in watched.of_kind("ready")] == [0, 1, 2, 3]
    for _ in range(4):
        watched.poll()
    assert sorted(event["rank"] for event in watched.of_kind("ready")) == [*range(20)]
    for rank in range(20):
        with Journal(run, rank) as journal:
            journal.event("done", steps=1)
        node.events.append(RankEnded(rank=rank, code=0, time=time.monotonic()))
    assert watched.poll() == "done"
    assert len(watched.of_kind("done")) == 20
