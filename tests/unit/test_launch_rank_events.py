"""Rank events that do not end the run become incidents, once each, with the event as evidence."""

from pathlib import Path
from typing import Any

import pytest

from tests.runs import new_run
from trimaran.core import Incident
from trimaran.launch.rank_events import RankEventIncidents
from trimaran.run import IncidentLog, read_incidents

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
