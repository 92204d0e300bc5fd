"""When silence is trouble, and when somebody is only waited for."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.launch.attempt_watch import AttemptWatch, Sign
from trimaran.launch.node import News, Orders, Silent
from trimaran.run import Heartbeat


class Machine:
    """A node of two ranks that shows and tells what a test wants."""

    name, num_ranks = "here", 2

    def __init__(self, *heartbeats: Heartbeat) -> None:
        self.shown = dict(enumerate(heartbeats))
        self.told: list[News] = []

    def start(self, orders: Orders) -> None: ...

    def ask_to_stop(self) -> None: ...

    def kill(self) -> None: ...

    def collect_reports(self, folder: Path, *, seconds: float, gently: bool = False) -> None: ...

    def news(self) -> list[News]:
        told, self.told = self.told, []
        return told

    def heartbeats(self) -> dict[int, Heartbeat]:
        return dict(self.shown)

    def is_silent(self, rank: int, *, stopped: bool = False) -> None:
        self.told.append(Silent(rank=rank, heartbeat=self.shown[rank], seconds=9.0, deadline=6.0, stopped=stopped))


def heartbeat(section: Any, step: int, entered: float) -> Heartbeat:
    return Heartbeat(section=section, step=step, entered=entered, alive=entered, answered=0)


def watch(path: Path, machine: Machine) -> AttemptWatch:
    orders = Orders(attempt=0, first_rank=0, num_ranks=2, world_size=2, store="", token="")
    return AttemptWatch(new_run(path / "run"), [machine], orders)


@pytest.mark.parametrize(
    ("section", "step", "sign"),
    [
        ("data", 7, None),
        ("save", 7, None),
        ("evaluation", 6, None),
        ("compile", 7, None),
        ("step", 7, "trouble"),
        ("data", 8, "trouble"),
    ],
)
def test_ranks_that_wait_for_one_that_may_take_long_have_not_hung(
    tmp_path: Path, section: Any, step: int, sign: Sign | None
) -> None:
    machine = Machine(heartbeat("step", 7, 100.0), heartbeat(section, step, 100.0))
    attempt = watch(tmp_path, machine)
    machine.is_silent(0)
    assert attempt.look() == sign


def test_one_that_takes_too_long_itself_is_trouble(tmp_path: Path) -> None:
    machine = Machine(heartbeat("step", 7, 100.0), heartbeat("data", 7, 100.0))
    attempt = watch(tmp_path, machine)
    machine.is_silent(0)
    assert attempt.look() is None
    machine.is_silent(1)
    assert attempt.look() == "trouble"


def test_a_stopped_rank_is_trouble_though_the_others_evaluate_like_it(tmp_path: Path) -> None:
    machine = Machine(heartbeat("evaluation", 20, 100.0), heartbeat("evaluation", 20, 100.0))
    attempt = watch(tmp_path, machine)
    assert attempt.look() is None
    machine.is_silent(1, stopped=True)
    assert attempt.look() == "trouble"


def test_who_moves_again_is_not_silent_any_more(tmp_path: Path) -> None:
    machine = Machine(heartbeat("step", 7, 100.0), heartbeat("data", 7, 100.0))
    attempt = watch(tmp_path, machine)
    machine.is_silent(0)
    assert attempt.look() is None
    machine.shown = {0: heartbeat("step", 8, 109.0), 1: heartbeat("step", 8, 109.1)}
    assert attempt.look() is None
    assert attempt.silent == {}
