"""The result of a soak: what counts as goodput, when it passes, and its table in the guide."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.mix import KINDS
from tests.chaos.report import MARKS, InjectedFault, Soak, good_seconds, table, with_table
from trimaran.core import Cause, Incident

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fault-tolerance.md"


def fault(cause: Cause, *suspects: int, rank: int = 1) -> InjectedFault:
    incident = Incident(id="i-0001", cause=cause, time=1.0, what="it happened", suspects=suspects)
    return InjectedFault(
        kind="kill -9", rank=rank, names_rank=True, incident=incident, detect=0.1, recover=1.5, lost_steps=1
    )


SOAK = Soak(
    wall_seconds=100.0,
    good_seconds=95.0,
    steps=1000,
    faults=[fault("crash", 1)],
    false_attributions=[],
    unexpected=[],
    ledger={"compute": 90.0, "restart": 3.0, "init": 4.0, "replay": 0.1},
)


def test_a_step_that_waits_for_a_hung_rank_is_not_good_time() -> None:
    steps = [{"step_seconds": 0.11, "phases": {"checkpoint": 0.01}} for _ in range(9)]
    hung = {"step_seconds": 6.5, "phases": {"checkpoint": 0.0}}
    skipped = {"step_seconds": 0.1, "phases": {"checkpoint": 0.0}, "skipped": True}
    assert good_seconds([*steps, hung, skipped]) == pytest.approx(0.9 + 0.5)


def test_a_soak_passes_only_if_every_fault_is_named() -> None:
    assert SOAK.passed
    assert not replace(SOAK, good_seconds=89.0).passed
    assert not replace(SOAK, faults=[fault("crash", 0)]).passed
    assert not replace(SOAK, faults=[fault("crash")]).passed
    assert not replace(SOAK, faults=[replace(fault("crash", 1), incident=None)]).passed


def test_the_table_replaces_the_one_in_the_guide() -> None:
    page = with_table(GUIDE.read_text(), table(SOAK, about="today", peers=False))
    again = with_table(page, "other")
    assert "| kill -9 | 1 | 0.10, 0.10 | 1.50, 1.50, 1.5 | 1 |" in page
    assert "init 4.0 s, restart 3.0 s" in page
    assert again.split(MARKS[0])[1].split(MARKS[1])[0] == "\nother\n"
    assert again.split(MARKS[1])[1] == GUIDE.read_text().split(MARKS[1])[1]


def test_the_mix_is_that_of_a_large_cluster() -> None:
    assert sum(kind.weight for kind in KINDS) == 25
