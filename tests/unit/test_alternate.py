"""`benchmarks/peers/alternate.py`: real processes that alternate, and gradient accumulation of the loops."""

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks.peers import alternate
from benchmarks.peers.alternate import Waiting
from benchmarks.peers.contests import CONTESTS, works
from benchmarks.peers.timer import Timer, TurnTimer
from benchmarks.peers.work import Work
from benchmarks.throughput import TINY, wanted

# A peer without torch: it reports as `child.py` does, and notes the order of the windows in a file.
PEER = """
import sys
from benchmarks.peers.gate import Gate
name, windows, order = sys.argv[1], int(sys.argv[2]), sys.argv[3]
gate = Gate()
print("what a library prints does not disturb the reports")
gate.wait("imported")
if name == "broken":
    raise RuntimeError("cannot build")
gate.wait("ready", torch="2.11", device="a GPU")
for number in range(windows):
    with open(order, "a") as file:
        file.write(name + "\\n")
    window = {"seconds": [0.1], "wall_seconds": 0.1, "cpu_seconds": 0.1}
    if number < windows - 1:
        gate.wait("window", **window)
gate.report("done", line={"peer": name})
"""


def peer_work(name: str, windows: int, contest: str = "small-25m") -> Work:
    return Work(contest=contest, peer=name, shape="tiny", seq_len=8, micro_batch=1, windows=windows, steps=1)


def run(contests: list[list[Work]], folder: Path, *, seconds: float = 60) -> tuple[list[Waiting], list[Work]]:
    """Run the contests with the peers above; return what was saved of them, and what was left."""

    def start(work: Work, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PEER, work.peer, str(work.windows), str(folder / f"order-{work.contest}")]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(
            command, stderr=(folder / f"{number}.err").open("w"), cwd=Path(__file__).parents[2], **pipes
        )

    saved: list[Waiting] = []
    left = alternate.run(contests, start, saved.append, parallel=2, until=time.monotonic() + seconds)
    return saved, left


def test_peers_alternate_window_by_window_and_one_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    first = [peer_work("a", 3), peer_work("b", 2), peer_work("broken", 2)]
    second = [peer_work("c", 1, "small-60m")]
    saved, left = run([first, second], tmp_path)
    assert (tmp_path / "order-small-25m").read_text().split() == ["a", "b", "b", "a", "a"]
    assert (tmp_path / "order-small-60m").read_text().split() == ["c"]
    assert [peer.line and peer.line["peer"] for peer in saved] == ["a", "b", None, "c"]
    assert "cannot build" in (tmp_path / "2.err").read_text()
    assert left == []


def test_nothing_starts_when_the_time_is_up(tmp_path: Path) -> None:
    work = peer_work("a", 1)
    assert run([[work]], tmp_path, seconds=-1) == ([], [work])


def test_windows_that_there_was_time_for_are_kept() -> None:
    process = subprocess.Popen(["true"], stdout=subprocess.PIPE, text=True)
    peer = Waiting(peer_work("trimaran", 4), 0, process)
    process.wait()
    assert peer.partial_line() is None
    peer.machine = {"torch": "2.11", "device": "a GPU"}
    peer.windows = [{"seconds": [0.1], "wall_seconds": 0.1, "cpu_seconds": 0.2}] * 2
    line = peer.partial_line()
    assert line is not None
    assert line["seconds"] == [0.1, 0.1]
    assert line["note"] == "the time was up after 2 of 4 windows"


class Turns:
    """A gate that records its reports and never waits."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, int]] = []

    def wait(self, state: str, **fields: Any) -> None:
        self.reports.append((state, len(fields.get("seconds", []))))


def test_a_timer_waits_before_every_window_and_does_not_time_the_steps_after_a_wait() -> None:
    work = Work.read(peer_work("loop", 2).fields() | {"warm": 3, "settle": 2, "steps": 4})
    gate = Turns()
    timer = TurnTimer(work, gate)  # type: ignore[arg-type]
    waited = [timer.step() for _ in range(work.all_steps)]
    assert work.all_steps == 15
    assert [number for number, each in enumerate(waited, 1) if each] == [3, 9, 15]
    assert gate.reports == [("ready", 0), ("window", 4)]
    assert (len(timer.seconds), len(timer.cpu_seconds)) == (8, 2)


@pytest.mark.parametrize("module", ["plain_loop", "loop"])
def test_micro_batches_of_a_loop_train_as_one_batch_does(module: str) -> None:
    ready = importlib.import_module(f"benchmarks.peers.{module}").ready
    base = peer_work("loop", 1).fields() | {"precision": "fp32", "compile": False, "warm": 1, "steps": 3}
    whole, split = (
        ready(work)(Timer(work))
        for work in (Work.read(base | {"micro_batch": 4}), Work.read(base | {"micro_batch": 2, "grad_accum": 2}))
    )
    assert split["first_loss"] == pytest.approx(whole["first_loss"], abs=1e-5)
    assert split["last_loss"] == pytest.approx(whole["last_loss"], abs=1e-4)
    assert whole["last_loss"] != whole["first_loss"]


def test_tokens_of_a_step_count_micro_batches_and_ranks() -> None:
    assert works("small-25m-accum8", CONTESTS["small-25m-accum8"], {})["trimaran"].tokens_per_step == 8 * 16 * 1024
    assert works("cpu-2", CONTESTS["cpu-2"], {})["loop+plain"].rows_per_step == 8


def test_a_star_and_a_list_of_peers_choose_contests_and_peers() -> None:
    chosen = wanted("small-25m*", TINY, peers="trimaran,trimaran+run")
    assert list(chosen) == ["small-25m", "small-25m-accum8", "small-25m-512", "small-25m-2048"]
    assert {work.peer for each in chosen.values() for work in each} == {"trimaran", "trimaran+run"}
    assert json.loads(json.dumps(chosen["small-25m"][0].fields()))["warm"] == 20
