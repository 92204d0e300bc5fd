"""Telemetry of runs with faults: nodes are sampled throughout, and the ledger accounts for every second."""

import signal
import socket
import time
import urllib.request
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from tests.chaos.nodes import TwoMachines, make_run
from tests.chaos.test_nodes import ROOT_NEEDED
from tests.fault.harness import Supervised, lines, wait_for
from tests.goodput import check_goodput, on_page
from trimaran.core import EXIT_DONE
from trimaran.runs import read_ledger

pytestmark = pytest.mark.chaos


def sidecars(supervised: Supervised) -> list[psutil.Process]:
    return [each for each in supervised.processes() if "trimaran.runs.sinks.sidecar" in each.cmdline()]


def test_every_second_of_a_run_with_killed_ranks_and_sidecars_is_accounted_for(tmp_path: Path) -> None:
    settings = ("train.steps=60", "checkpoint.memory=0", "checkpoint.every=10", "telemetry.sample_seconds=0.5")
    began = time.time()
    with Supervised.start(tmp_path / "run", *settings, pause=0.05) as supervised:
        supervised.wait_for_step(18)
        (beside,) = sidecars(supervised)
        supervised.send_signal(1, signal.SIGKILL)
        supervised.wait_for_step(45)
        assert sidecars(supervised) == [beside]  # it survives the ranks' restart
        beside.kill()
        assert supervised.wait() == EXIT_DONE
    ended = time.time()
    ledger, (incident,) = read_ledger(supervised.run), supervised.faults
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total, rel=0.01)
    assert began < ledger.since < supervised.events(0, "start")[0]["time"]
    assert supervised.events(0, "done")[0]["time"] < ledger.until < ended
    steps = lines(supervised.run.metrics)
    counted = sum(ledger.seconds[name] for name in ("compute", "communication", "data", "straggler"))
    assert counted == pytest.approx(
        sum(each["step_seconds"] - each["phases"]["checkpoint"] for each in steps), rel=0.01
    )
    usual = sorted(each["step_seconds"] for each in steps)[len(steps) // 2]
    assert incident.cost["lost_steps"] >= 5
    assert ledger.seconds["replay"] == pytest.approx(incident.cost["lost_steps"] * usual, rel=0.5)
    # From the death to the first new step: the restart and the replayed steps.
    recovery = ledger.seconds["restart"] + incident.cost["lost_steps"] * usual
    assert recovery == pytest.approx(incident.cost["seconds_to_recover"], rel=0.3)
    samples = lines(supervised.run.samples(0))
    assert any(each["ranks"].keys() == {"0", "1"} for each in samples)
    assert max(later["time"] - earlier["time"] for earlier, later in pairwise(samples)) < 12
    assert not [each for each in psutil.process_iter() if "sidecar" in " ".join(each.cmdline())
                and str(supervised.run.path) in each.cmdline()]  # fmt: skip


def test_every_view_shows_the_same_goodput_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = ("train.steps=120", "checkpoint.memory=0", "checkpoint.every=10", "telemetry.sample_seconds=1")
    page = f"http://127.0.0.1:{port}/metrics"
    with Supervised.start(tmp_path / "run", *settings, f"telemetry.prometheus.port={port}", pause=0.05) as supervised:
        supervised.wait_for_step(18)
        supervised.send_signal(1, signal.SIGKILL)
        supervised.wait_for_step(100)
        with urllib.request.urlopen(page, timeout=5) as answer:
            live, known = on_page(answer.read().decode()), read_ledger(supervised.run, now=time.time()).goodput
        assert supervised.wait() == EXIT_DONE
    assert abs(live - known) < 0.3  # the page is up to ten seconds old
    ledger = read_ledger(supervised.run)
    assert ledger.seconds["replay"] > 0
    assert ledger.seconds["restart"] > 0
    # The sidecar's final value, which it computed from the beginning, over the restart, to the end.
    assert on_page((supervised.run.path / "telemetry" / "metrics.prom").read_text()) == pytest.approx(ledger.goodput)
    check_goodput(supervised.run, ledger.goodput)


@ROOT_NEEDED
def test_every_node_is_sampled_under_its_own_number_and_with_its_own_ranks(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "train.steps=60", "telemetry.sample_seconds=0.5")
    with TwoMachines(run) as machines:
        wait_for(lambda: all(len(lines(run.samples(node))) > 4 for node in (0, 1)), 60)
        assert [machine.wait(60) for machine in machines.all] == [EXIT_DONE, EXIT_DONE]
    found = [lines(run.samples(node)) for node in (0, 1)]
    assert len({each["host"] for each in found[0]} | {each["host"] for each in found[1]}) == 2
    for node, samples in enumerate(found):
        assert {rank for each in samples for rank in each["ranks"]} == {str(node)}
    ledger = read_ledger(run)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.total, rel=0.01)
    assert ledger.seconds["compute"] > 0
