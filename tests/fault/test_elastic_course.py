"""A replica that is lost and joins again changes the held-out loss only within the bound of local steps."""

import os
from pathlib import Path
from statistics import mean

import pytest

from tests.course import LEARNED, METHODS, SEEDS, SYNCHRONOUS, held_out_loss
from tests.fault.harness import Supervised
from tests.parity import train_run
from trimaran.core import Plan
from trimaran.data import cache_folder, prepare
from trimaran.runs import create_run

SECONDS = 300.0


@pytest.mark.slow
def test_the_held_out_loss_after_a_loss_and_a_join_is_within_the_bound_of_local_steps(tmp_path: Path) -> None:
    method, exactly = METHODS["local-steps"], SYNCHRONOUS["replicas"]
    (tmp_path / "runs").mkdir()
    ours, exact = [], []
    for seed in SEEDS:
        recipe = method.recipe(seed)
        fields = method.plan().model_dump() | {"comm": {"local_steps": {"steps": 10, "elastic": True}}}
        prepare(recipe.data, cache=cache_folder(os.environ))
        run = create_run(tmp_path / f"elastic-{seed}", recipe, Plan.model_validate(fields))
        extra = {
            "TRIMARAN_TEST_PLUGIN": "tests.fault.replica_plugin",
            "TRIMARAN_TEST_REPLICA_FAULTS": "exchange:1:50",
            "TRIMARAN_TEST_PAUSE": "0.1",
        }
        with Supervised.again(run, extra=extra) as supervised:
            assert supervised.wait(SECONDS) == 0, run.agent_log.read_text()
            assert supervised.attempts() == 1
            joined = supervised.events(1, "ready")[-1]["step"]
            assert 50 < joined < 160
        ours.append(held_out_loss(run))
        exact.append(held_out_loss(train_run(recipe, exactly.plan(), tmp_path / "runs")))
    print("elastic", [round(each, 4) for each in ours], "synchronous", [round(each, 4) for each in exact])
    assert max(exact) < LEARNED, "it has learned something"
    assert mean(ours) <= method.limit(exact), (ours, exact)
