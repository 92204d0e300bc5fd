"""Connections that do not prove the run's token are counted, and many of them are one incident."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.runs import new_run
from trimaran.launch import StrangerCheck
from trimaran.runs import IncidentLog, read_incidents


def test_a_flood_of_the_channel_is_one_incident_and_a_few_connections_are_none(tmp_path: Path) -> None:
    run, refused = new_run(tmp_path / "run"), [5000]  # those before this attempt do not count
    watch: Any = SimpleNamespace(spec=SimpleNamespace(attempt=1, world_size=4), highest_step=12)
    check = StrangerCheck(IncidentLog(run), watch, lambda: refused[0])
    refused[0] += 99
    check.poll()
    assert read_incidents(run) == []
    for _ in range(3):
        refused[0] += 100
        check.poll()
    (incident,) = read_incidents(run)
    assert (incident.cause, incident.action, incident.step) == ("network", "continued", 12)
    assert "199 connections were refused" in incident.what


def test_many_ranks_that_connect_at_once_are_no_flood(tmp_path: Path) -> None:
    run, refused = new_run(tmp_path / "run"), [0]
    watch: Any = SimpleNamespace(spec=SimpleNamespace(attempt=0, world_size=1000), highest_step=0)
    check = StrangerCheck(IncidentLog(run), watch, lambda: refused[0])
    refused[0] = 900
    check.poll()
    assert read_incidents(run) == []
