"""Rank events that do not end the run become incidents, once each, with the event as evidence."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.core import Incident
from trimaran.launch import RankEventIncidents
from trimaran.runs import IncidentLog, read_incidents

BAD = {"reason": "the loss is nan", "loss": None, "ranks": [1], "sample_ids": [7, 9]}
DIFFERING = {"message": "replicas differ", "ranks": [2], "keys": ["model/embed"], "since": 5}
REFUSED = [{"tier": "disk", "step": 40, "why": "rank-00001.safetensors is empty"}]


def filed(path: Path, *events: dict[str, Any]) -> list[Incident]:
    run = new_run(path / "run")
    RankEventIncidents(IncidentLog(run), attempt=3, steps_before=45).add(events)
    return read_incidents(run)


@pytest.mark.parametrize(
    ("kind", "data", "cause", "action", "suspects"),
    [
        ("skip", BAD | {"action": "skip"}, "numeric", "skipped", (1,)),
        ("skip", BAD | {"action": "rewind"}, "numeric", "rewound", (1,)),
        ("differ", DIFFERING | {"action": "rewind"}, "numeric", "rewound", (2,)),
        ("differ", DIFFERING | {"action": "skip"}, "numeric", "continued", (2,)),
        ("checkpoint", {"path": "step-10", "failed": "No space left on device"}, "storage", "continued", ()),
        ("resume", {"tier": "disk", "refused": REFUSED}, "storage", "continued", ()),
    ],
)
def test_an_event_of_all_ranks_is_one_incident(
    tmp_path: Path, kind: str, data: dict[str, Any], cause: str, action: str, suspects: tuple[int, ...]
) -> None:
    event = {"kind": kind, "rank": 0, "step": 12, "data": data}
    (found,) = filed(tmp_path, event, event | {"rank": 1})
    assert (found.cause, found.action, found.suspects) == (cause, action, suspects)
    assert (found.step, found.attempt) == (12, 3)
    assert data.items() >= found.evidence.items()


@pytest.mark.parametrize("kind", ["skip", "differ"])
def test_an_event_that_ends_the_ranks_is_no_incident_here(tmp_path: Path, kind: str) -> None:
    assert filed(tmp_path, {"kind": kind, "rank": 0, "step": 1, "data": BAD | DIFFERING | {"action": "stop"}}) == []


def test_repeated_failed_saves_are_one_incident_until_a_save_succeeds(tmp_path: Path) -> None:
    saves = [(1, "full"), (2, "full"), (3, ""), (4, "full")]
    events = [
        {"kind": "checkpoint", "rank": 0, "step": step, "data": {"failed": why} if why else {}} for step, why in saves
    ]
    assert [each.step for each in filed(tmp_path, *events)] == [1, 4]


def test_failed_saves_are_counted_by_reason(tmp_path: Path) -> None:
    message = (
        "No space left (runs/a/.step-{step:08d}.9f3c000{step}.draft/rank-00000 (disk /: {step}.0 MiB of 1.0 GiB free))"
    )
    events = [
        {"kind": "checkpoint", "rank": 0, "step": step, "data": {"failed": message.format(step=step)}}
        for step in (2, 4, 6)
    ]
    events += [{"kind": "checkpoint", "rank": 0, "step": 8, "data": {"failed": "Read-only file system"}}]
    full, read_only = filed(tmp_path, *events)
    assert (full.step, full.evidence["count"], full.evidence["last_step"]) == (2, 3, 6)
    assert full.what.startswith("3 checkpoints, of steps 2 to 6, could not be saved: No space left")
    assert (full.action, read_only.step) == ("continued", 8)


def test_steps_after_an_older_checkpoint_are_counted_as_lost(tmp_path: Path) -> None:
    (found,) = filed(tmp_path, {"kind": "resume", "rank": 0, "step": 30, "data": {"refused": REFUSED}})
    assert found.cost == {"lost_steps": 15}


def test_a_damaged_checkpoint_is_described(tmp_path: Path) -> None:
    (found,) = filed(tmp_path, {"kind": "resume", "rank": 0, "step": 30, "data": {"refused": REFUSED}})
    assert found.what.endswith("was not used: step 40 (disk): rank-00001.safetensors is empty")


FULL = "No space left on device"


def disk(step: int, **data: Any) -> dict[str, Any]:
    return {"kind": "disk", "rank": 0, "step": step, "data": {"file": "metrics.jsonl", **data}}


def failed_save(step: int) -> dict[str, Any]:
    failed = f"rank 0: the checkpoint cannot be written: {FULL} (/x/.step-{step}.draft ({step} MiB free))"
    return {"kind": "checkpoint", "rank": 0, "step": step, "data": {"failed": failed}}


def test_one_full_disk_is_one_incident_whatever_cannot_be_written(tmp_path: Path) -> None:
    saved = {"kind": "checkpoint", "rank": 0, "step": 40, "data": {}}
    (found,) = filed(tmp_path / "a", disk(3, failed=FULL), failed_save(10), failed_save(20), disk(31), saved)
    assert "2 checkpoints, of steps 10 to 20, could not be saved" in found.what
    assert found.what.endswith("; metrics could not be written for a while; the metrics are complete again")
    assert (found.cause, found.action, found.step) == ("storage", "continued", 3)
    lost = disk(31, lost=4, first_lost=5, last_lost=8)
    (found,) = filed(tmp_path / "b", failed_save(10), disk(13, failed=FULL), saved, failed_save(50), lost)
    assert "the checkpoint of step 50 could not be saved" in found.what
    assert found.what.endswith("the metrics of steps 5 to 8 were lost")
    assert (found.evidence["first_lost"], found.evidence["last_lost"]) == (5, 8)


def test_a_disk_that_fills_up_twice_is_two_incidents(tmp_path: Path) -> None:
    first, second = filed(tmp_path, disk(3, failed=FULL), disk(9), disk(20, failed=FULL))
    assert first.what == f"metrics could not be written for a while: {FULL}; the metrics are complete again"
    assert second.what == f"metrics cannot be written and are kept in memory: {FULL}"


def test_metrics_that_a_killed_rank_had_not_written_are_an_incident(tmp_path: Path) -> None:
    (found,) = filed(tmp_path, disk(30, lost=19, first_lost=12, last_lost=30))
    assert found.what == "the metrics of steps 12 to 30 were lost"


def connections(rank: int, refused: int, descriptors: int = 90) -> dict[str, Any]:
    data = {"refused": refused, "descriptors": descriptors, "limit": 1024}
    return {"kind": "connections", "rank": rank, "step": 7, "data": data}


def test_a_flood_of_connections_is_one_incident_with_the_newest_count_of_each_rank(tmp_path: Path) -> None:
    (incident,) = filed(tmp_path, connections(0, 100), connections(1, 200), connections(0, 1000))
    assert (incident.cause, incident.action, incident.suspects) == ("network", "continued", ())
    assert incident.what == "another program tries to connect to ports of the ranks: 1,200 packets were refused"


def test_descriptors_that_run_out_are_an_incident(tmp_path: Path) -> None:
    (incident,) = filed(tmp_path, connections(0, 0, 900))
    assert incident.what == "a rank has 900 of 1,024 file descriptors open"
