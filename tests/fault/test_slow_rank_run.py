"""A rank that becomes slow in the middle of a run and recovers, and the autopilot that deals rows by speed."""

from pathlib import Path

import pytest

from tests.elastic_runs import assert_as_one_size
from tests.fault.harness import Supervised, wait_for
from trimaran.autopilot.decision_ledger import read_decisions
from trimaran.core import Decision
from trimaran.run import RunDirectory

pytestmark = pytest.mark.slow
SLEEPING = {"TRIMARAN_TEST_PLUGIN": "tests.fault.sleeping_layers", "TRIMARAN_TEST_ROW_SECONDS": "0.015"}
SETTINGS = ("train.steps=170", "plan.micro_batch=4", "autopilot={mode: act, budget: 0.3}")


def kept(run: RunDirectory) -> list[Decision]:
    return [each for each in read_decisions(run) if each.outcome == "kept"]


def test_a_rank_that_becomes_slow_gets_fewer_rows_and_equal_ones_when_it_recovers(tmp_path: Path) -> None:
    with Supervised.start(tmp_path / "run", *SETTINGS, extra=SLEEPING) as supervised:
        run = supervised.run
        supervised.wait_for_step(22, 120)
        slow = run.path / "slow-1"
        slow.write_text("3")
        wait_for(lambda: kept(run), 200)
        first, second = run.read_plan().rows_by_rank
        assert first > second, "the slow rank has fewer rows"
        assert first + second == 8, "the global batch is the same"
        slow.unlink()
        assert supervised.wait(400) == 0
    there, *later = kept(run)
    assert "rank 1 computes" in there.reason
    assert there.measured is not None
    assert there.measured["gain"] > 0.15
    assert len(later) <= 2
    assert not run.read_plan().micro_batches, "equal again"
    assert_as_one_size(run, tmp_path / "calm", tolerance=1e-4)
